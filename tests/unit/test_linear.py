"""The forms of quantised layers: which one when, and that each computes the same."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from typing import cast

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache

from runtime.worker.linear import (
    Form,
    FormedEmbedding,
    FormedLinear,
    choose_forms,
    form_of,
    gains_from_columns,
    lay_columns,
)

_ARGUMENTS = qwen3.ModelArgs(
    model_type="qwen3",
    hidden_size=128,
    num_hidden_layers=2,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    vocab_size=1152,
    max_position_embeddings=1024,
    rope_theta=1e6,
    tie_word_embeddings=True,
)


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "form"),
    [
        (1, 12288, "as_is"),
        (7, 12288, "as_is"),
        (8, 1024, "as_is"),
        (31, 1024, "as_is"),
        (8, 4096, "flat"),
        (31, 4096, "flat"),
        (32, 1024, "dequantised"),
        (32, 4096, "dequantised"),
        (32, 4097, "flat"),
        (255, 12288, "flat"),
        (256, 12288, "dequantised"),
        (2048, 1024, "dequantised"),
    ],
)
def test_the_form_follows_what_was_measured(num_rows: int, num_outputs: int, form: Form) -> None:
    assert form_of(num_rows, num_outputs) == form


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (8, 1), (1, 20), (40, 1), (4, 10), (2, 150)])
@pytest.mark.parametrize("num_outputs", [64, 1088, 4160])
def test_every_form_multiplies_as_upstream_does(
    num_outputs: int, shape: tuple[int, int], has_bias: bool
) -> None:
    mx.random.seed(3)
    layer = nn.QuantizedLinear(128, num_outputs, has_bias, group_size=64, bits=4)
    if has_bias:
        layer.bias = mx.random.normal((num_outputs,))
    x = mx.random.normal((*shape, 128))
    expected = layer(x)
    assert choose_forms(nn.Sequential(layer)) == 1
    assert type(layer) is FormedLinear
    formed = layer(x)
    assert formed.shape == expected.shape == (*shape, num_outputs)
    assert formed.dtype == expected.dtype
    assert mx.allclose(formed, expected, rtol=0.0, atol=1e-5 * _largest(expected))


def test_a_model_says_the_same_with_layers_that_choose_their_form() -> None:
    mx.random.seed(4)
    model = qwen3.Model(_ARGUMENTS)
    nn.quantize(model, group_size=64, bits=4)
    arrays = [id(array) for array in _arrays(model)]
    token_ids = mx.random.randint(0, 1000, (9, 40))
    expected = model(token_ids, cache=make_prompt_cache(model))
    step = model(token_ids[:, :1], cache=make_prompt_cache(model))
    assert choose_forms(model) == 2 * 7 + 1
    assert type(model.model.embed_tokens) is FormedEmbedding
    assert [id(array) for array in _arrays(model)] == arrays, "something was copied"
    for said, wanted in (
        (model(token_ids, cache=make_prompt_cache(model)), expected),
        (model(token_ids[:, :1], cache=make_prompt_cache(model)), step),
    ):
        assert mx.allclose(said, wanted, rtol=0.0, atol=1e-4 * _largest(wanted))


def test_layers_that_were_not_measured_stay_as_they_are() -> None:
    class Adapted(nn.QuantizedLinear):
        """As a LoRA is: it computes something else."""

    others = [
        nn.Linear(64, 64),
        Adapted(64, 64, group_size=64, bits=4),
        nn.QuantizedLinear(64, 64, group_size=64, bits=8),
        nn.QuantizedLinear(64, 64, group_size=32, bits=4, mode="mxfp4"),
    ]
    before = [type(layer) for layer in others]
    assert choose_forms(nn.Sequential(*others)) == 0
    assert [type(layer) for layer in others] == before


def _arrays(module: nn.Module) -> list[mx.array]:
    return [cast("mx.array", array) for _, array in tree_flatten(module.parameters())]


def _largest(array: mx.array) -> float:
    return cast("float", mx.abs(array).max().item())


@pytest.mark.skipif(not gains_from_columns(), reason="only the reference BLAS is known to agree")
def test_weights_that_lie_column_by_column_multiply_to_the_same_bits() -> None:
    mx.random.seed(7)
    model = qwen3.Model(_ARGUMENTS)
    mx.eval(model.parameters())
    prompts = [mx.random.randint(0, 1152, shape) for shape in ((1, 1), (1, 70), (5, 1), (3, 16))]
    before = [model(one) for one in prompts]
    mx.eval(before)
    weights = dict(tree_flatten(model.parameters()))
    assert lay_columns(model) == 2 * 7 + 1
    after = [model(one) for one in prompts]
    assert all(mx.array_equal(one, other) for one, other in zip(before, after, strict=True))
    laid = dict(tree_flatten(model.parameters()))
    assert all(mx.array_equal(laid[name], one) for name, one in weights.items())


def test_layers_that_add_a_bias_or_are_not_float32_keep_their_weights() -> None:
    half = nn.Linear(64, 64, bias=False)
    half.weight = half.weight.astype(mx.bfloat16)
    quantised = nn.QuantizedLinear(64, 64, bias=False, group_size=64, bits=4)
    assert lay_columns(nn.Sequential(nn.Linear(64, 64), half, quantised)) == 0
