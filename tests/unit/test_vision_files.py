"""Which directories are models that see, told from their files."""

from __future__ import annotations

import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from api.http.images import shown_images
from runtime.config.settings import ModelSettings, Settings
from runtime.errors import InvalidRequest
from runtime.models.files import read_spec
from runtime.models.vision_files import BLIND_TYPES, missing_package
from runtime.supervisor import placement
from runtime.types import Image, Message, ModelSpec
from tests.model_folders import make_model

pytest.importorskip("mlx_vlm")

TEXT = "language_model.model.norm.weight"
TOWER = "vision_tower.blocks.0.norm.weight"
CONFIG = {
    "model_type": "qwen3_vl",
    "text_config": {"max_position_embeddings": 2048},
    "vision_config": {"hidden_size": 32, "intermediate_size": 64, "patch_size": 16},
}
PROCESSOR = {"max_pixels": 256 * 256}
NO_SETTINGS = ModelSettings()


def model(
    path: Path,
    *tensors: str,
    config: object = CONFIG,
    processor: object = PROCESSOR,
    settings: ModelSettings = NO_SETTINGS,
) -> ModelSpec:
    make_model(path, config)
    if processor is not None:
        (path / "preprocessor_config.json").write_text(json.dumps(processor))
    save_file({name: np.zeros(2, np.float32) for name in tensors}, path / "model.safetensors")
    return read_spec("a", path, settings)


@pytest.mark.parametrize(
    "vision_encoder", [TOWER, "visual.patch_embed.proj.weight", "model.visual.merger.mlp.0.weight"]
)
def test_a_model_with_its_vision_tower_and_processor_sees(tmp_path: Path, vision_encoder: str):
    spec = model(tmp_path / "a", TEXT, vision_encoder)
    assert spec.is_vision
    assert spec.sees
    assert "vision" in spec.capabilities
    assert spec.context == 2048


def test_a_conversion_that_left_the_tower_out_reads_text(tmp_path: Path):
    assert not model(tmp_path / "a", TEXT).is_vision


def test_without_an_image_processor_it_reads_text(tmp_path: Path):
    assert not model(tmp_path / "a", TEXT, TOWER, processor=None).is_vision


def test_a_type_that_is_not_known_to_see_reads_text(tmp_path: Path):
    assert not model(tmp_path / "a", TEXT, TOWER, config=CONFIG | {"model_type": "qwen3"}).is_vision


@pytest.mark.parametrize("model_type", ["glm4v", "kimi_vl", "idefics3"])
def test_a_type_without_a_lens_of_its_own_is_to_be_tried_out(tmp_path: Path, model_type: str):
    spec = model(tmp_path / "a", TEXT, TOWER, config=CONFIG | {"model_type": model_type})
    assert (spec.is_vision, spec.sees) == (True, True)
    assert spec.image_bytes


@pytest.mark.parametrize("model_type", ["mllama", "llava_next", "phi3_v"])
def test_a_type_that_cannot_be_shown_images_is_not_said_to_see(tmp_path: Path, model_type: str):
    spec = model(tmp_path / "a", TEXT, TOWER, config=CONFIG | {"model_type": model_type})
    assert (spec.is_vision, spec.sees, spec.image_bytes) == (True, False, 0)
    image = Image(at=0, field="messages[0].content[0]", data=b"x")
    messages = (Message(role="user", images=(image,)),)
    with pytest.raises(InvalidRequest) as caught:
        shown_images(messages, spec, Settings(home=tmp_path), [])
    assert caught.value.param == image.field
    assert caught.value.message == (
        f"messages[0].content[0] is an image, and a cannot be shown one: {BLIND_TYPES[model_type]}."
        " Could not process image."
    )


@pytest.mark.parametrize("settings", [ModelSettings(vision=False), ModelSettings(ranks=2)])
def test_settings_can_make_it_read_text_only(tmp_path: Path, settings: ModelSettings):
    spec = model(tmp_path / "a", TEXT, TOWER, settings=settings)
    assert (spec.is_vision, spec.image_bytes) == (False, 0)


def test_the_index_of_a_sharded_model_tells_what_is_in_it(tmp_path: Path):
    path = tmp_path / "a"
    make_model(path, CONFIG)
    (path / "preprocessor_config.json").write_text("{}")
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {TOWER: "model-00001-of-00001.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_spec("a", path, NO_SETTINGS).is_vision


def test_damaged_weights_show_no_tower_and_are_listed_all_the_same(tmp_path: Path):
    path = make_model(tmp_path / "a", CONFIG, preprocessor_config={})
    assert not read_spec("a", path, NO_SETTINGS).is_vision


@pytest.mark.parametrize(
    ("processor", "num_pixels"),
    [
        (PROCESSOR, 256 * 256),
        ({"size": {"shortest_edge": 1024, "longest_edge": 65536}}, 65536),
        ({"size": {"height": 128, "width": 64}}, 128 * 64),
        ({}, 4 << 20),
    ],
)
def test_the_memory_of_encoding_an_image_follows_its_largest_size(
    tmp_path: Path, processor: object, num_pixels: int
):
    spec = model(tmp_path / "a", TEXT, TOWER, processor=processor)
    assert spec.image_bytes == num_pixels // 16**2 * (6 * 32 + 2 * 64) * 4


def test_encoding_an_image_is_reserved_for_where_it_needs_more_than_a_prefill(tmp_path: Path):
    spec = model(tmp_path / "a", TEXT, TOWER, processor={"max_pixels": 4096**2})
    profile = placement.Profile.of(spec, None)
    blind = placement.Profile(weights_bytes=profile.weights_bytes, context=profile.context)
    more = placement.reservation(profile) - placement.reservation(blind)
    assert more == spec.image_bytes - profile.weights_bytes // 2


def test_a_type_that_needs_another_package_is_told_apart():
    assert missing_package("multi_modality", lambda _: None) == "opencv-python-headless"
    assert missing_package("multi_modality", lambda _: ModuleSpec("cv2", None)) is None
    assert missing_package("qwen2_vl", lambda _: None) is None
