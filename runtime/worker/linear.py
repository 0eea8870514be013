"""How linear layers multiply: in the form that was measured to be fastest on the device.

Knows mlx's linear layers and embeddings; docs/decisions/0058 has the figures.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import sys
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

Form = Literal["as_is", "flat", "dequantised"]

_HOPPER = "sm_90"
_MEASURED_BITS = 4
_FEW_ROWS = 8


def form_of(num_rows: int, num_outputs: int) -> Form:
    """The form in which a layer of `num_outputs` multiplies `num_rows` fastest on NVIDIA's Hopper.

    `as_is` is what upstream does. There the rows of a batch [rows, 1, inputs] are multiplied one
    after the other from eight rows on; `flat` gives them as one matrix [1, rows, inputs]. The
    kernel for that keeps few processors busy where there are few outputs, and is far from the
    device's rate where there are many rows: `dequantised` multiplies by the weights in full.
    """
    if num_rows < _FEW_ROWS:
        return "as_is"
    if num_rows >= 256 or (num_rows >= 32 and num_outputs <= 4096):
        return "dequantised"
    return "as_is" if num_outputs <= 1024 else "flat"


class FormedLinear(nn.QuantizedLinear):
    """A quantised linear layer that chooses its form by how many rows there are."""

    num_few: int
    """Elements of an input of fewer rows than any form but upstream's is for."""

    def __call__(self, x: mx.array) -> mx.array:
        """`x` [..., inputs] times the weights: [..., outputs]."""
        if x.size < self.num_few:  # each microsecond here is paid by each layer for each token
            return super().__call__(x)
        y = _multiplied(self, x)
        return y + self["bias"] if "bias" in self else y


class FormedEmbedding(nn.QuantizedEmbedding):
    """A quantised embedding whose use as the last layer chooses its form likewise."""

    num_few: int

    def as_linear(self, x: mx.array) -> mx.array:
        """`x` [..., inputs] times the weights: [..., vocabulary]."""
        return super().as_linear(x) if x.size < self.num_few else _multiplied(self, x)


def _multiplied(layer: Any, x: mx.array) -> mx.array:
    weight, scales, biases = layer["weight"], layer["scales"], layer["biases"]
    group_size, bits = layer.group_size, layer.bits
    num_inputs, num_outputs = x.shape[-1], weight.shape[0]
    num_rows = x.size // num_inputs
    form = form_of(num_rows, num_outputs)
    if form == "dequantised":
        whole = mx.dequantize(weight, scales, biases, group_size, bits, dtype=x.dtype)
        return (x.reshape(num_rows, num_inputs) @ whole.T).reshape(*x.shape[:-1], num_outputs)
    rows = x.reshape(1, num_rows, num_inputs) if form == "flat" else x
    y = mx.quantized_matmul(rows, weight, scales, biases, True, group_size, bits)
    return y.reshape(*x.shape[:-1], num_outputs) if form == "flat" else y


def gains_from_forms() -> bool:
    """Whether the forms were measured to be faster on this device; nowhere but on Hopper so far."""
    if not mx.cuda.is_available():
        return False
    return str(mx.device_info().get("architecture", "")).startswith(_HOPPER)


def choose_forms(model: nn.Module) -> int:
    """Have a model's quantised layers choose their form; how many do.

    Layers of other types stay as they are: those that are split over ranks, and subclasses, a LoRA
    among them, which compute something else.
    """
    classes = {nn.QuantizedLinear: FormedLinear, nn.QuantizedEmbedding: FormedEmbedding}
    chosen: list[Any] = [
        module
        for _, module in model.named_modules()
        if type(module) in classes and module.mode == "affine" and module.bits == _MEASURED_BITS
    ]
    for module in chosen:
        # The same object with the same arrays, in the place that it has.
        module.__class__ = classes[type(module)]
        num_inputs = module.weight.shape[1] * 32 // module.bits
        module.num_few = _FEW_ROWS * num_inputs
    return len(chosen)


def gains_from_columns() -> bool:
    """Whether weights that lie column by column are multiplied faster here: on CPUs under Linux,
    where mlx is built with the reference BLAS. Accelerate and GPUs do not care.
    """
    return sys.platform == "linux" and mx.default_device() == mx.Device(mx.cpu)


def lay_columns(model: nn.Module) -> int:
    """Have the float32 weights `[outputs, inputs]` of a model lie in memory column by column; how
    many do.

    The reference BLAS then adds up many outputs at once instead of one number after the other.
    Each output is the sum of the same products in the same order, so that no bit of it changes.
    Layers with a bias stay as they are: that would be added first instead of last.
    """
    chosen: list[Any] = [
        module
        for _, module in model.named_modules()
        if type(module) in (nn.Linear, nn.Embedding)
        and module.weight.dtype == mx.float32
        and "bias" not in module
    ]
    for module in chosen:
        weight = mx.contiguous(module.weight.T).T
        mx.eval(weight)
        module.weight = weight
    return len(chosen)
