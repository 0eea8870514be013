"""What is said of a model's tools before it is loaded is not denied when it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from runtime.config.settings import ModelSettings
from runtime.models.files import read_spec
from runtime.types import ToolUse
from runtime.worker.input.template import Template
from runtime.worker.output.upstream import dialect_of
from tests.model_folders import make_model
from tests.templates import NO_CALLS, QWEN3, SMOLLM2, TEMPLATES
from tests.tiny_models import write_tokenizer

ODD = {
    "names_no_tools": SMOLLM2 + "{# <tool_call> arguments #}",
    "shows_no_tools": SMOLLM2 + "{# no tools #}",
    "refuses_all": "{{ raise_exception('tools arguments <tool_call>') }}",
}
CASES = TEMPLATES | ODD


def promised(path: Path) -> ToolUse:
    return read_spec("m", path, ModelSettings()).tool_use


@pytest.mark.parametrize("name", CASES)
def test_what_a_template_s_text_tells_of_tools_is_so_when_it_is_asked(tmp_path: Path, name: str):
    path = make_model(tmp_path / "m")
    write_tokenizer(path, template=CASES[name])
    tokenizer: Any = load_tokenizer(path)
    template = Template(tokenizer, reads_calls=bool(dialect_of(tokenizer).name))
    assert promised(path) in (template.forms.tools, "untried")


def test_what_the_text_does_not_tell_is_untried(tmp_path: Path):
    path = make_model(tmp_path / "m")
    config, jinja = path / "tokenizer_config.json", path / "chat_template.jinja"

    def given(text: str = "", **table: object) -> ToolUse:
        config.write_text(json.dumps(table))
        jinja.write_text(text)
        return promised(path)

    assert given() == "no"
    assert given(SMOLLM2) == given(chat_template=SMOLLM2) == "generic"
    assert given(QWEN3) == given(chat_template=QWEN3) == given(QWEN3, chat_template=QWEN3)
    assert given(QWEN3) == "native"
    assert given(NO_CALLS) == "untried"
    several = [{"name": "default", "template": SMOLLM2}, {"name": "tool_use", "template": QWEN3}]
    assert given(chat_template=several) == given(SMOLLM2, chat_template=QWEN3) == "untried"
    assert given(chat_template_type="deepseek_v32") == "untried"
