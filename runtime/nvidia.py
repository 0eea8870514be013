"""Whether mlx computes on an NVIDIA GPU here, told without importing it: the server never does.

Two things are otherwise there. Importing mlx opens the device, and a process which has done that
cannot be forked. And what a worker allocates is the GPU's memory, not the machine's.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

_CONTROL = Path("/dev/nvidiactl")


def is_used(find: Callable[[str], ModuleSpec | None] = find_spec, control: Path = _CONTROL) -> bool:
    """The package of mlx's CUDA backend is installed, and the driver is there."""
    if not control.exists():
        return False
    spec = find("mlx")
    folders = [Path(one).parent for one in spec.submodule_search_locations or ()] if spec else []
    return any(list(folder.glob("mlx_cuda_*.dist-info")) for folder in folders)
