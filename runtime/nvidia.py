"""Whether mlx computes on an NVIDIA GPU here, told without importing it: the server never does.

What a worker allocates there is the GPU's memory, not the machine's.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

_CONTROL = Path("/dev/nvidiactl")
_TELL_S = 20.0


def is_used(find: Callable[[str], ModuleSpec | None] = find_spec, control: Path = _CONTROL) -> bool:
    """The package of mlx's CUDA backend is installed, and the driver is there."""
    if not control.exists():
        return False
    spec = find("mlx")
    folders = [Path(one).parent for one in spec.submodule_search_locations or ()] if spec else []
    return any(list(folder.glob("mlx_cuda_*.dist-info")) for folder in folders)


def memory_bytes(program: str = "nvidia-smi") -> int | None:
    """The memory of the first GPU, which is the one that mlx takes; None if nobody tells.

    It starts a process, and takes some tenths of a second.
    """
    command = (program, "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TELL_S)
        return int(told.stdout.splitlines()[0]) << 20
    return None
