"""One recorded output of each family is read as it is meant; all of them are in tests/contract."""

from __future__ import annotations

import pytest

from tests import recorded_outputs

ONE_EACH = (
    "deepseek/v4-marker-in-arguments",
    "gemma4/edge-values-key-with-space",
    "glm/glm47-significant-whitespace",
    "gpt-oss/vllm-preamble-call-end-terminated",
    "kimi/k3-control-marker-text-in-value",
    "llama/l3-vllm-parameters-key",
    "mistral/llamacpp-v11-call-id-parallel",
    "qwen3-hermes/string-escapes-code",
    "qwen3-xml/q38-marker-in-arguments",
)


@pytest.mark.parametrize("name", ONE_EACH)
def test_an_output_is_read_as_it_is_meant(name: str):
    (case,) = [one for one in recorded_outputs.cases() if one.id == name]
    assert recorded_outputs.problems(case) == []
