"""The table of model types that see agrees with the pinned mlx-vlm."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any, cast

import pytest

from runtime.config.settings import ModelSettings
from runtime.models import vision_files
from runtime.models.files import read_spec
from runtime.models.vision_files import BLIND_TYPES, KEPT_TYPES, SEEING_TYPES, VLM_TYPES
from runtime.worker.vision.processors import FAMILIES
from tests.tiny_tried_vlms import KINDS
from tests.tiny_vlms import VISION_FAMILIES

pytest.importorskip("mlx_vlm")

LEFT_OUT = {
    "they are refused by name": set(BLIND_TYPES),
    "served under another name": {"aya_vision", "fastvlm", "llava_bunny"},
    "nobody has looked at them yet": {"deepseek_v41", "inkling", "llmjpvl", "qwen4_exp"},
}
"""Types of upstream with a vision tower that are not in the table, and why."""


def upstream() -> Any:
    return cast("Any", importlib.import_module("mlx_vlm.utils"))


@pytest.mark.parametrize("model_type", sorted(VLM_TYPES))
def test_upstream_turns_the_images_of_every_listed_type_into_embeddings(model_type: str):
    module, _ = upstream().get_model_and_args({"model_type": model_type})
    parameters = list(inspect.signature(module.Model.get_input_embeddings).parameters)
    assert parameters[1:3] == ["input_ids", "pixel_values"] or parameters[2] == "pixel_values"
    assert hasattr(module, "ModelConfig")


def test_no_type_of_upstream_with_a_vision_tower_is_overlooked():
    folder = Path(upstream().__file__).parent / "models"
    towers = {
        path.parent.name
        for path in folder.glob("*/vision.py")
        if (path.parent / "language.py").is_file()
    }
    renamed: dict[str, str] = upstream().MODEL_REMAPPING
    listed = {renamed.get(name, name) for name in VLM_TYPES}
    assert towers - listed == set().union(*LEFT_OUT.values()) - listed


def test_what_mlx_lm_calls_otherwise_is_known():
    renamed = cast("Any", importlib.import_module("mlx_lm.utils")).MODEL_REMAPPING
    assert renamed == vision_files._OTHER_NAMES


def test_tokenizers_that_transformers_has_are_known_without_importing_it():
    auto: Any = importlib.import_module("transformers.models.auto.tokenization_auto")
    words = vision_files.words_of("transformers/models/auto/tokenization_auto.py")
    pairs = auto.TOKENIZER_MAPPING_NAMES.items()
    assert {word for pair in pairs for word in pair if word is not None} <= words
    assert {"TikTokenTokenizer", "ChatGLMTokenizer", "kimi_k2"}.isdisjoint(words)


def test_what_mlx_lm_imports_by_a_name_of_a_file_is_known_without_importing_it():
    for package in ("models", "tool_parsers", "chat_templates"):
        folder = Path(importlib.import_module(f"mlx_lm.{package}").__path__[0])
        named = {file.stem for file in folder.glob("*.py")} - {"__init__"}
        assert vision_files.names_in(f"mlx_lm/{package}") == named


def test_every_tested_type_has_a_tiny_model_that_is_recognised(vlms_dir: Path):
    assert set(VISION_FAMILIES) == SEEING_TYPES
    for family in VISION_FAMILIES:
        spec = read_spec(family, vlms_dir / family, ModelSettings())
        assert spec.is_vision
        assert spec.sees
        assert (spec.context, spec.model_type) == (4096, family)
        assert spec.kv_bytes_per_token


def test_every_type_that_is_kept_has_a_tiny_model():
    assert SEEING_TYPES | (KINDS.keys() & KEPT_TYPES) == KEPT_TYPES
    assert KEPT_TYPES <= VLM_TYPES
    assert not KEPT_TYPES & BLIND_TYPES.keys()


def test_the_worker_drives_every_type_that_is_said_to_see():
    assert set(FAMILIES) == SEEING_TYPES
