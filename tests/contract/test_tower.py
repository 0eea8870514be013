"""What a vision tower computes in parts is what it computes at once."""

from __future__ import annotations

import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.contract.seen_again import FIRST, SECOND, SeeingSession, load, words
from tests.tiny_vlms import VISION_FAMILIES, picture, write_vlm

pytest.importorskip("mlx_vlm")


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_picture_is_seen_in_parts_of_one_layer_and_none_is_computed_before(
    tmp_path: Path, family: str
):
    model = load(write_vlm(tmp_path, family), family)
    session = SeeingSession(model, None)
    prepared = session.image_processor.prepare(np.asarray(picture(1, 84, 112)))
    with mx.stream(model.stream):
        whole = session.vision_model.encoded(prepared)
    first, second = (words(seed, 9) for seed in (1, 2))
    group = session.group((first, FIRST, second, SECOND, first))
    end = len(group.token_ids)
    num_parts = 1
    while not model.look(group.image_batch, 0, end, 0.0):
        num_parts += 1
        assert len(group.image_batch.rows) + len(group.image_batch.looks) <= num_parts
    assert num_parts >= 2 * 2, "each of two layers of the tower, for each picture"
    assert model.num_encoded_images == 3
    rows = group.image_batch.rows[0]
    assert mx.array_equal(rows.embeddings, whole.embeddings)
    assert len(rows.deepstack) == len(whole.deepstack)
    for one, other in zip(rows.deepstack, whole.deepstack, strict=True):
        assert mx.array_equal(one, other)
    model.look(group.image_batch, 0, end, time.perf_counter())
    assert model.num_encoded_images == 3, "nothing is seen twice"
