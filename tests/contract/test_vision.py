"""For every family that sees: kept by one process, gone on with by another, exactly."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from runtime.config.settings import ModelSettings
from runtime.kv.media import identity_ids
from runtime.models.files import read_spec
from runtime.types import ChatPrompt, GenerateRequest, Message, SamplingParams, TextPrompt
from runtime.types import Image as Sent
from runtime.worker.decode import Decoder
from runtime.worker.input.template import Template
from runtime.worker.model import LoadedModel
from runtime.worker.output.parser import Dialect, OutputParser
from runtime.worker.sequence import Sequence, SequenceGroup
from runtime.worker.vision.image_loader import PillowImageLoader
from runtime.worker.vision.processors import FAMILIES
from tests.contract.seen_again import (
    ANSWER,
    BEGINNING,
    CASES,
    FIRST,
    HEAD,
    NEXT,
    WAYS,
    SeeingSession,
    load,
    words,
)
from tests.kv_sessions import BLOCK_TOKENS
from tests.tiny_models import write_model
from tests.tiny_vlms import VISION_FAMILIES, encoded, picture, write_vlm

TIMEOUT_S = 280
NEEDS_STATE = {"qwen3_5", "qwen3_5_moe", "gemma3", "gemma4"}
KEEPS_STATE = {*NEEDS_STATE, "aya_vision", "lfm2_vl", "llama4"}
LIVE = WAYS[:2]
"""Ways that the first process went on from the caches that it still had."""

DEVIATION = 1e-4
"""Of logits where slices are not the same: kernels sum in another order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seen")
    for life in ("before", "after"):
        command = [sys.executable, "-m", "tests.contract.seen_again", life, str(folder)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "MLX_DISABLE_COMPILE": "1"}
        subprocess.run([*command, *CASES], check=True, timeout=TIMEOUT_S, env=environment)
    return folder


def said(folder: Path, life: str, family: str) -> dict[str, Any]:
    results = json.loads((folder / f"{life}.json").read_text())[family]
    assert "error" not in results, results["error"]
    return results


def logits(folder: Path, life: str, family: str) -> dict[str, mx.array]:
    found = mx.load(str(folder / family / f"{life}.safetensors"))
    assert isinstance(found, dict)
    return found


def on_disk(num_tokens: int, num_held: int, *, needs_state: bool) -> int:
    """Whole blocks of so many shared tokens, and of what is behind the last one each token."""
    if num_tokens % BLOCK_TOKENS and needs_state:
        num_tokens = HEAD
    elif num_tokens > num_held - num_held % BLOCK_TOKENS:
        return num_tokens
    return num_tokens - num_tokens % BLOCK_TOKENS


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", CASES)
def test_another_process_goes_on_as_if_it_were_the_same(folder: Path, family: str, way: str):
    before, after = (said(folder, life, family) for life in ("before", "after"))
    assert before["is_whole"] == (family == "gemma4")
    found = after["ways"][way]
    first, second = found["spans"][0][0], found["spans"][1][0]
    held = before["num_held"]
    shared = {"the same": held - len(ANSWER) - 1, "another second picture": second}
    start = shared.get(way, first if way == "swapped" else held)
    if way not in LIVE:
        start = on_disk(start, held, needs_state=family in KEEPS_STATE)
    inside = [begun for begun, end in found["spans"] if begun < start < end]
    assert found["start"] == (inside or [start])[0]
    assert found["num_encoded"] == sum(end > found["start"] for _, end in found["spans"])
    assert (found["retreats"], found["rejected"]) == (0, 0)
    one, other = (logits(folder, life, family)[way] for life in ("before", "after"))
    assert one.shape == other.shape
    deviation = 0.0 if way in LIVE else DEVIATION
    assert bool(mx.abs(one - other).max() <= deviation)


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def model(request: pytest.FixtureRequest, folder: Path) -> LoadedModel:
    said(folder, "before", request.param)
    return load(folder / request.param / "model", request.param)


@pytest.fixture(scope="module")
def qwen(folder: Path) -> LoadedModel:
    said(folder, "before", "qwen3_vl")
    return load(folder / "qwen3_vl" / "model", "qwen3_vl")


def last_logits(session: SeeingSession, group: SequenceGroup, cuts: list[int]) -> mx.array:
    """Of a prompt that is computed in slices that end there."""
    group.kv = session.loaded.new_kv()
    start = 0
    for cut in [*cuts, len(group.token_ids) - 1]:
        end = group.image_batch.whole_around(start, cut)
        if end > start:
            session.loaded.prefill(group.token_ids[start:end], group.kv, group.image_batch, start)
            start = end
    return session.say(group, [])[1][0]


def upstream_logits(session: SeeingSession, group: SequenceGroup) -> mx.array:
    """What upstream computes for the whole prompt at once."""
    whole, pad = session.loaded.model.whole, session.image_processor.markup.placeholder
    ids = mx.array(group.token_ids)[None]
    views = [prompt_image.prepare().inputs for prompt_image in group.image_batch.prompt_images]
    joined = {
        name: mx.array(np.concatenate([np.asarray(view[name]) for view in views]))
        for name in views[0]
    }
    found = whole.get_input_embeddings(
        ids, joined.pop("pixel_values"), mask=mx.ones_like(ids), **joined
    ).to_dict()
    given = {name: one for name, one in found.items() if one is not None}
    given.pop("attention_mask_4d", None)
    types = (ids == pad).astype(mx.int32)
    cache = session.loaded.new_kv()
    return whole.language_model(ids, cache=cache, mm_token_type_ids=types, **given).logits[0, -1]


def test_slices_may_end_anywhere_and_give_what_upstream_gives_for_the_whole(model: LoadedModel):
    session = SeeingSession(model, None)
    marks = [
        model.tokenizer.encode(f"<|vision_{one}|>", add_special_tokens=False)
        for one in ("start", "end")
    ]
    parts = (words(1, 9), *marks[:1], FIRST, *marks[1:], words(2, 30))
    first = session.group(parts).image_batch.spans[0].start
    whole = last_logits(session, session.group(parts), [])
    for cuts in ([first], [first + 1, first + 3], [5, first + 2, first + 20]):
        assert mx.abs(last_logits(session, session.group(parts), cuts) - whole).max() <= DEVIATION
    assert mx.abs(upstream_logits(session, session.group(parts)) - whole).max() <= DEVIATION


def sequence_of(session: SeeingSession, parts: tuple[Any, ...], num_tokens: int) -> Sequence:
    group = session.group(parts)
    group.max_tokens = num_tokens
    group.request = GenerateRequest(
        request_id="r",
        model="m",
        prompt=TextPrompt(text=""),
        sampling=SamplingParams(temperature=0.0),
        ignore_eos=True,
    )
    detokenizer = Template(session.loaded.tokenizer).detokenizer(group.token_ids)
    group.sequences = [Sequence(group, 0, OutputParser(Dialect(), index=0), detokenizer)]
    return group.sequences[0]


def test_rows_with_pictures_and_without_are_decoded_together_as_alone(model: LoadedModel):
    session = SeeingSession(model, None)
    prompts: list[tuple[tuple[Any, ...], int]] = [
        ((words(1, 30),), 9),
        (BEGINNING.parts, 12),
        ((words(2, 70),), 8),
        ((words(3, 4), FIRST, words(4, 9)), 7),
    ]

    check_together_as_alone(session, prompts)


def check_together_as_alone(
    session: SeeingSession, prompts: list[tuple[tuple[Any, ...], int]]
) -> None:
    """Rows of one batch say what each says by itself."""
    together = decoded(session, prompts)
    for one, prompt in zip(together, prompts, strict=True):
        (alone,) = decoded(session, [prompt])
        assert [token for token, _ in one] == [token for token, _ in alone]
        for (_, first), (_, other) in zip(one, alone, strict=True):
            assert mx.abs(first - other).max() <= DEVIATION


def decoded(
    session: SeeingSession, prompts: list[tuple[tuple[Any, ...], int]]
) -> list[list[tuple[int, mx.array]]]:
    """The tokens of each, and the logprobs that they were drawn from."""
    decoder = Decoder(session.loaded, 4)
    sequences = [sequence_of(session, *one) for one in prompts]
    steps: dict[int, list[tuple[int, mx.array]]] = {id(one): [] for one in sequences}

    def step() -> None:
        for token in decoder.step():
            token.sequence.output_token_ids.append(token.token_id)
            steps[id(token.sequence)].append((token.token_id, token.logprobs))

    for sequence in sequences:  # each joins while those before it run
        sequence.group.kv = session.loaded.new_kv()
        session.prefill(sequence.group, keeps=False)
        decoder.insert(sequence.group, sequence.group.sequences, takes=True)
        step()
    while decoder.num_running:
        step()
    return [steps[id(one)] for one in sequences]


def test_rows_of_quantised_kv_do_not_disturb_each_other(folder: Path):
    case = "qwen3_vl in 4 bits"
    said(folder, "before", case)
    session = SeeingSession(load(folder / case / "model", *CASES[case]), None)
    prompts = [(BEGINNING.parts, 9), ((words(2, 70),), 8), ((words(3, 4), FIRST, words(4, 9)), 7)]
    together = decoded(session, prompts)
    assert [len(one) for one in together] == [9, 8, 7]
    for one, prompt in zip(together, prompts, strict=True):
        (alone,) = decoded(session, [prompt])
        assert [token for token, _ in one] == [token for token, _ in alone]


@pytest.mark.parametrize("kind", ["glm4v", "idefics3", "lfm2_vl"])
def test_rows_of_kinds_without_a_lens_of_their_own_are_decoded_together_as_alone(
    folder: Path, kind: str
):
    said(folder, "before", kind)
    session = SeeingSession(load(folder / kind / "model", kind), None)
    prompts = [(BEGINNING.parts, 9), ((words(2, 70),), 8), ((words(3, 4), FIRST, words(4, 9)), 7)]
    check_together_as_alone(session, prompts)


@pytest.mark.parametrize("family", sorted(NEEDS_STATE))
def test_kv_is_not_quantised_where_layers_keep_something_else(folder: Path, family: str):
    said(folder, "before", family)
    with pytest.raises(ValueError, match=r"kv_bits .* (ArraysCache|RotatingKVCache); leave"):
        load(folder / family / "model", family, 8)


def known_session(model: LoadedModel) -> SeeingSession:
    """One that has said the beginning."""
    session = SeeingSession(model, None)
    group = session.group(BEGINNING.parts)
    session.see(group)
    session.prefill(group)
    return session


def test_a_match_that_ends_inside_a_picture_goes_back_to_its_start(model: LoadedModel):
    session = known_session(model)
    group = session.group(NEXT["another second picture"])
    span = group.image_batch.spans[1]
    theirs = session.group(BEGINNING.parts).cursor.token_ids
    ids = [*group.cursor.token_ids]
    ids[span.start] = theirs[span.start]
    group.cursor.token_ids = ids
    num_tokens = session.see(group)
    expected = group.image_batch.spans[0].start if session.tiers.needs_state else span.start
    assert num_tokens == expected
    assert session.tiers.counts.vlm_retreat == (not session.tiers.needs_state)
    session.prefill(group, keeps=False)
    assert mx.abs(session.say(group, [])[1] - cold(model, group)).max() <= DEVIATION


def cold(model: LoadedModel, group: SequenceGroup) -> mx.array:
    session = SeeingSession(model, None)
    fresh = session.group(NEXT["another second picture"])
    assert fresh.token_ids == group.token_ids
    return last_logits(session, fresh, [])


def digest_of(model: LoadedModel, data: bytes) -> bytes:
    assert model.vision_model is not None
    assert model.vision_model.image_processor is not None
    image = Sent(at=0, field="image", data=data)
    prompt = ChatPrompt(messages=(Message(role="user", images=(image,)),))
    hung, prompt_images = PillowImageLoader(model.vision_model.image_processor).hang(prompt)
    digest = hung.messages[0].images[0].data
    assert (
        len(identity_ids(prompt_images[digest].medium)) == prompt_images[digest].medium.num_tokens
    )
    return digest


def test_a_picture_is_its_pixels_however_they_are_written(qwen: LoadedModel):
    drawn = picture(1, 84, 112)
    png = digest_of(qwen, encoded(drawn))
    assert digest_of(qwen, encoded(drawn, compress_level=1)) == png
    assert digest_of(qwen, encoded(drawn, "BMP")) == png
    assert digest_of(qwen, encoded(drawn, "WEBP", lossless=True)) == png
    lossy = encoded(drawn, "JPEG")
    assert digest_of(qwen, lossy) == digest_of(qwen, lossy) != png
    assert digest_of(qwen, encoded(picture(2, 84, 112))) != png


def test_the_same_pixels_in_another_shape_or_grid_are_another_picture(
    qwen: LoadedModel, tmp_path: Path
):
    wide, tall = (encoded(Image.new("RGB", size, (9, 9, 9))) for size in ((112, 56), (56, 112)))
    assert digest_of(qwen, wide) != digest_of(qwen, tall)
    other = write_vlm(tmp_path, "qwen3_vl")
    settings = json.loads((other / "preprocessor_config.json").read_text())
    settings["max_pixels"] = 64 * 64
    (other / "preprocessor_config.json").write_text(json.dumps(settings))
    assert digest_of(load(other, "qwen3_vl"), wide) != digest_of(qwen, wide)


def test_the_template_in_a_file_of_older_models_is_read(tmp_path: Path):
    path = write_vlm(tmp_path, "qwen2_5_vl")
    jinja = path / "chat_template.jinja"
    template = {"chat_template": jinja.read_text()}
    jinja.unlink()
    assert not load(path, "qwen2_5_vl").tokenizer.has_chat_template
    (path / "chat_template.json").write_text(json.dumps(template))
    assert load(path, "qwen2_5_vl").tokenizer.chat_template == template["chat_template"]
    assert read_spec("m", path, ModelSettings()).capabilities[1] == "chat"


def test_a_worker_of_a_model_that_reads_text_only_knows_nothing_of_pictures(tmp_path: Path):
    path = write_model(tmp_path)
    script = f"""
import sys
from pathlib import Path
import runtime.worker.__main__
from tests.kv_sessions import load
assert load(Path({str(path)!r})).vision_model is None
known = {{"mlx_vlm", "runtime.worker.vision.image_loader", "runtime.worker.vision.pictures"}}
assert not known & set(sys.modules), known & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=TIMEOUT_S)


def test_what_is_used_of_upstream_is_there():
    caches = importlib.import_module("mlx_vlm.models.cache")
    assert next(iter(inspect.signature(caches.make_prompt_cache).parameters)) == "model"
    utils = importlib.import_module("mlx_vlm.utils")
    assert {"model_path", "lazy"} <= set(inspect.signature(utils.load_model).parameters)
    assert "model_path" in inspect.signature(utils.load_config).parameters
    features = importlib.import_module("mlx_vlm.models.base").InputEmbeddingsFeatures
    assert {"inputs_embeds", "deepstack_visual_embeds"} <= set(features.__dataclass_fields__)
    text = importlib.import_module("mlx_vlm.models.gemma4.language").Gemma4TextModel
    overlay = text._apply_blockwise_bidirectional_overlay
    assert list(inspect.signature(overlay).parameters) == ["self", "base_mask", "mm_token_type_ids"]
    assert "_block_sequence_ids_for_mask" in vars(text)
    assert set(FAMILIES) == set(VISION_FAMILIES)
