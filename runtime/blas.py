"""Where a fast BLAS is: the Linux CPU wheel of mlx bundles a reference one, about 50 times slower.

The worker's loader is told to take an OpenBLAS of the system instead; it exports the same symbols.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

_PATTERNS = (
    "/usr/lib/*-linux-gnu/openblas-pthread/libopenblas.so.0",
    "/usr/lib/*-linux-gnu/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",
    "/usr/lib64/libopenblas.so.0",
    "/usr/lib/libopenblas.so.0",
    "/usr/local/lib/libopenblas.so.0",
)

INSTALL_HINT = "apt install libopenblas0-pthread (Debian, Ubuntu) or dnf install openblas (Fedora)"

_THREADS = "OPENBLAS_NUM_THREADS"
_NUM_THREADS = 2
"""More only spin: measured with float32 models of 192 and 1,024 dimensions on four x86-64 cores."""


def blas_environment(setting: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What to change in the environment of a process that is to use a fast BLAS.

    Raises:
        FileNotFoundError: as `find_blas`.
    """
    library = find_blas(setting)
    if library is None:
        return {}
    preloaded = environ.get("LD_PRELOAD")
    return {
        "LD_PRELOAD": f"{library}:{preloaded}" if preloaded else str(library),
        _THREADS: environ.get(_THREADS, str(_NUM_THREADS)),
    }


def find_blas(setting: str) -> Path | None:
    """The library to preload into workers for `cpu_blas`, "auto", "off" or a path; None for none.

    Raises:
        FileNotFoundError: the setting is a path where no file is.
    """
    if setting == "off" or (setting == "auto" and sys.platform != "linux"):
        return None
    if setting != "auto":
        path = Path(setting)
        if not path.is_file():
            raise FileNotFoundError(setting)
        return path
    for pattern in _PATTERNS:
        found = sorted(Path("/").glob(pattern.lstrip("/")))
        if found:
            return found[0]
    return None
