"""Kinds of models without a lens of their own: shown pictures as upstream is, or refused."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from runtime.kv.media import place_media
from runtime.models.vision_files import KEPT_TYPES
from runtime.types import ChatPrompt, Image, Message
from runtime.worker.input.template import Template
from runtime.worker.model import LoadedModel
from runtime.worker.vision.fallback_processor import FallbackProcessor
from runtime.worker.vision.image_loader import PillowImageLoader
from runtime.worker.vision.images import ImageBatch
from runtime.worker.vision.self_test import MAX_DEVIATION, run_self_test
from tests.contract.seen_again import load
from tests.tiny_tried_vlms import KINDS, write_tried
from tests.tiny_vlms import encoded, picture

pytest.importorskip("mlx_vlm")

REFUSED = {
    "paligemma": "otherwise than alone",
    "llava_next": "more of an image than it says in tokens",
}
SEEING = sorted(KINDS.keys() - REFUSED)
UNPADDED = {"llava"}
"""Upstream pads images of these kinds as well, which their image processors know nothing of."""
DEVIATION = 1e-4
FIRST, SECOND = picture(1, 112, 84), picture(2, 84, 112)
TEXT = "look at this:  and at this one, which is another:  So, which is it?"
PLACES = (14, 49)


def tried(path: Path, kind: str) -> LoadedModel:
    model = load(path, kind)
    assert model.vision_model is not None
    model.vision_model.open(model.stream)
    return model


@pytest.fixture(scope="module", params=SEEING)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tried(write_tried(tmp_path_factory.mktemp("tried"), request.param), request.param)


def image_processor_of(model: LoadedModel) -> FallbackProcessor:
    assert model.vision_model is not None
    assert isinstance(model.vision_model.image_processor, FallbackProcessor), (
        model.vision_model.blindness
    )
    return model.vision_model.image_processor


def as_upstream_says(model: LoadedModel, text: str) -> mx.array:
    """Logits after a prompt with both pictures, all of it by upstream."""
    image_processor = image_processor_of(model)
    pictures = [FIRST, SECOND]
    if model.spec.model_type in UNPADDED:
        inputs = dict(image_processor.processor(text=[text], images=pictures, return_tensors="mlx"))
    else:
        utils: Any = importlib.import_module("mlx_vlm.utils")
        inputs = utils.prepare_inputs(
            image_processor.processor, images=pictures, prompts=text, add_special_tokens=False
        )
    whole = model.model.whole
    ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask", None)
    pixels = inputs.pop("pixel_values")
    found = whole.get_input_embeddings(ids, pixels, mask=mask, **inputs).to_dict()
    given = {**inputs, **{name: one for name, one in found.items() if one is not None}}
    return whole.language_model(ids, cache=model.new_kv(), **given).logits[0, -1]


def as_we_say(model: LoadedModel, text: str, prompt: ChatPrompt, cuts: list[float]) -> mx.array:
    """The same, as a request goes, in slices that end at these shares of the prompt."""
    image_processor = image_processor_of(model)
    assert model.vision_model is not None
    template = Template(model.tokenizer, markup=image_processor.markup)
    hung, prompt_images = PillowImageLoader(image_processor).hang(prompt)
    media = [prompt_images[image.data].medium for image in hung.messages[0].images]
    assert template.render(hung) == text.replace(
        image_processor.markup.mark, image_processor.markup.spelled
    )
    ids = template.encode(template.render(hung)).token_ids
    placed = place_media(ids, image_processor.markup.placeholder, media, [])
    image_batch = ImageBatch(
        placed.spans, tuple(prompt_images[span.digest] for span in placed.spans)
    )
    kv, start, num_tokens = model.new_kv(), 0, len(placed.token_ids)
    for end in [*(int(cut * num_tokens) for cut in cuts), num_tokens - 1]:
        model.prefill(placed.token_ids[start:end], kv, image_batch, start)
        start = end
    caches = model.to_decode(kv, image_batch, num_tokens)
    return model.model(mx.array([placed.token_ids[-1:]]), caches)[0, -1]


def test_pictures_are_read_as_upstream_reads_them_wherever_slices_end(model: LoadedModel):
    images = tuple(
        Image(at=at, field="image", data=encoded(drawn))
        for at, drawn in zip(PLACES, (FIRST, SECOND), strict=True)
    )
    prompt = ChatPrompt(messages=(Message(role="user", text=TEXT, images=images),))
    turn = [
        {"type": "text", "text": TEXT[: PLACES[0]]},
        {"type": "image"},
        {"type": "text", "text": TEXT[PLACES[0] : PLACES[1]]},
        {"type": "image"},
        {"type": "text", "text": TEXT[PLACES[1] :]},
    ]
    text = image_processor_of(model).processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": turn}], tokenize=False, add_generation_prompt=True
    )
    theirs = as_upstream_says(model, text)
    for cuts in ([], [0.3, 0.5], [0.2, 0.25, 0.7, 0.9]):
        ours = as_we_say(model, text, prompt, cuts)
        assert mx.abs(ours - theirs).max() <= DEVIATION


def test_what_such_a_model_saw_is_kept_where_its_kind_is_tested(model: LoadedModel):
    assert model.keeps_pictures == (model.spec.model_type in KEPT_TYPES)
    assert model.unproven is None, "words are kept"


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_shown_pictures_says_why(tmp_path: Path, kind: str):
    model = tried(write_tried(tmp_path, kind), kind)
    assert model.vision_model is not None
    assert model.vision_model.image_processor is None
    assert REFUSED[kind] in model.vision_model.blindness
    assert model.unproven == kind


@pytest.mark.parametrize("kind", ["aya_vision", "glm4v", "llava", "pixtral"])
def test_a_tokenizer_that_begins_every_text_by_a_token_is_no_reason(tmp_path: Path, kind: str):
    path = write_tried(tmp_path, kind)
    file = Tokenizer.from_file(str(path / "tokenizer.json"))
    bos = file.token_to_id("<bos>")
    file.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    file.save(str(path / "tokenizer.json"))
    image_processor = image_processor_of(tried(path, kind))
    assert image_processor.opening == (bos,)
    assert bos not in image_processor.prepare(np.asarray(FIRST)).token_ids


def test_a_template_that_shows_no_images_is_a_reason(tmp_path: Path):
    path = write_tried(tmp_path, "idefics3")
    template = path / "chat_template.jinja"
    template.write_text(template.read_text().replace("<image>", ""))
    vision_model = tried(path, "idefics3").vision_model
    assert vision_model is not None
    assert vision_model.blindness == "its chat template does not show where an image is"


def test_what_cannot_be_tried_is_read_by_mlx_lm_where_that_can(tmp_path: Path):
    path = write_tried(tmp_path, "mistral3")
    template = path / "chat_template.jinja"
    template.write_text(template.read_text().replace("[IMG]", ""))
    model = load(path, "mistral3")
    assert model.vision_model is None
    assert model.blindness == "its chat template does not show where an image is"
    assert type(model.new_kv()[0]).__module__ == "mlx_lm.models.cache"
    assert model.unproven is None, "its KV is kept"


def test_a_processor_that_cannot_be_loaded_is_a_reason(tmp_path: Path):
    path = write_tried(tmp_path, "idefics3")
    settings = {"image_processor_type": "NoSuchImageProcessor"}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    vision_model = tried(path, "idefics3").vision_model
    assert vision_model is not None
    assert vision_model.blindness.startswith("its image processor cannot be loaded")
    assert str(path) not in vision_model.blindness


def test_the_trial_finds_out_what_is_read_otherwise(tmp_path: Path):
    """A model that is driven in wrong ways."""
    model = tried(write_tried(tmp_path, "glm4v"), "glm4v")
    assert model.vision_model is not None
    image_processor = image_processor_of(model)
    assert run_self_test(model.vision_model, image_processor) is None
    model.model.says_positions = False
    assert run_self_test(model.vision_model, image_processor) is not None, (
        "this kind wants to be told in every call"
    )
    model.model.says_positions = True
    image_processor.has_grid = False
    why = run_self_test(model.vision_model, image_processor)
    assert why == "mlx-vlm reads an image among words in a way that is not known here"
    assert MAX_DEVIATION < 0.1


def test_pictures_of_the_same_size_are_told_apart(model: LoadedModel):
    image_processor = image_processor_of(model)
    gallery = PillowImageLoader(image_processor)
    images = tuple(
        Image(at=0, field="image", data=encoded(picture(seed, 64, 64))) for seed in (1, 2, 1)
    )
    hung, prompt_images = gallery.hang(ChatPrompt(messages=(Message(role="user", images=images),)))
    first, second, again = (image.data for image in hung.messages[0].images)
    assert first == again != second
    one, other = (prompt_images[digest].prepare() for digest in (first, second))
    assert one.token_ids == other.token_ids
    seen, else_ = (np.asarray(prompt_image.inputs["pixel_values"]) for prompt_image in (one, other))
    assert not np.array_equal(seen, else_)
