"""Which models' kernels are compiled: that takes mlx up to half a minute for each on CUDA.

mlx keeps what it compiled in a folder of its own, across processes. A mark beside it says that a
model of this shape was warmed to the end; it goes when the folder goes.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from runtime.environment import kernel_folder

_MARKS = "hearth-warmed"


def kept_at() -> Path | None:
    """Where mlx keeps the kernels that it compiled; None where it compiles none to files."""
    if not mx.cuda.is_available():
        return None
    return kernel_folder()


def open_libraries() -> None:
    """Have cuBLAS and cuDNN ready for the first model, which would wait half a second for them."""
    if not mx.cuda.is_available():
        return
    some = mx.zeros((1, 8, 64, 128), mx.bfloat16)
    one = some[:, :, :1]
    attention = mx.fast.scaled_dot_product_attention
    mx.eval(
        some @ some.swapaxes(-1, -2),
        attention(some, some, some, scale=1.0, mask="causal"),
        attention(one, some, some, scale=1.0),
    )


class CompiledKernels:
    """Whether all kernels that a model's warming needs were compiled before, by its shape.

    `also` tells apart what is warmed beyond the model: the number of rows, wide steps.
    """

    def __init__(self, model: Any, also: object, folder: Path | None) -> None:
        self._mark: Path | None = None
        if folder is not None:
            device = sorted((key, str(value)) for key, value in mx.device_info().items())
            names = [one for one in device if one[0] in ("architecture", "device_name")]
            parameters = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
            arrays = [(name, array.shape, str(array.dtype)) for name, array in parameters]
            text = repr((version("mlx"), names, also, arrays))
            self._mark = folder / _MARKS / hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def are_there(self) -> bool:
        """They need not be compiled again."""
        return self._mark is not None and self._mark.exists()

    def note(self) -> None:
        """All of them are compiled now. What cannot be noted is compiled again."""
        if self._mark is not None:
            with suppress(OSError):
                self._mark.parent.mkdir(parents=True, exist_ok=True)
                self._mark.touch()
