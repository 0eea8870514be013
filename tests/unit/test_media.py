"""Pictures among tokens: identity ids, where they are, positions."""

from __future__ import annotations

import pytest

from runtime.kv.media import (
    Medium,
    around,
    identity_ids,
    located,
    model_ids,
    place_media,
    rope_delta,
    rope_positions,
)
from store.block_names import HashChain
from store.types import MediaSpan

PAD = 7
CAT, DOG = Medium(b"c" * 32, 6, (1, 2, 3)), Medium(b"d" * 32, 6, (1, 2, 3))
TEXT = [1, 2, PAD, 3, PAD, 4, 5]


def test_pictures_take_the_places_of_their_placeholders():
    placed = place_media(TEXT, PAD, [CAT, DOG], [0, 2, 3, 5, 7])
    assert placed.token_ids == [1, 2, *identity_ids(CAT), 3, *identity_ids(DOG), 4, 5]
    assert placed.spans == (
        MediaSpan(2, 8, CAT.digest, CAT.grid),
        MediaSpan(9, 15, DOG.digest, DOG.grid),
    )
    assert placed.positions == [0, 2, 8, 15, 17]
    assert model_ids(placed.token_ids, PAD) == [1, 2, *[PAD] * 6, 3, *[PAD] * 6, 4, 5]


@pytest.mark.parametrize("media", [[CAT], [CAT, DOG, CAT]])
def test_each_placeholder_has_one_picture(media: list[Medium]):
    with pytest.raises(ValueError, match=r"shorter|longer"):
        place_media(TEXT, PAD, media, [])


def test_identity_ids_are_no_token_ids_and_tell_pictures_apart():
    assert identity_ids(CAT) == identity_ids(CAT)
    assert not set(identity_ids(CAT)) & set(identity_ids(DOG))
    assert min(identity_ids(CAT)) >= 1 << 31
    assert max(identity_ids(CAT)) < 1 << 32


def test_blocks_before_a_picture_are_shared_and_those_with_it_are_not():
    chain = HashChain(b"", b"", block_size=4)
    text = [*range(10, 18), PAD, *range(10, 18)]
    hashes = [
        chain.block_hashes(place_media(text, PAD, [medium], []).token_ids) for medium in (CAT, DOG)
    ]
    same = [one == other for one, other in zip(*hashes, strict=True)]
    assert same == [True, True, False, False, False]


def test_swapped_pictures_are_another_prompt():
    one, other = (place_media(TEXT, PAD, media, []) for media in ([CAT, DOG], [DOG, CAT]))
    assert len(one.token_ids) == len(other.token_ids)
    assert one.token_ids[2:8] == other.token_ids[9:15]
    assert one.token_ids[:8] != other.token_ids[:8]


def test_pictures_are_located_again_in_identity_ids():
    placed = place_media(TEXT, PAD, [CAT, DOG], [])
    assert located(placed.token_ids, [CAT, DOG]) == placed.spans
    assert located([1, 2], []) == ()
    assert located(placed.token_ids, [DOG, CAT]) is None
    assert located(placed.token_ids, [CAT]) is None
    assert located(placed.token_ids[:10], [CAT, DOG]) is None
    assert located([1, 2], [CAT]) is None


def test_what_a_cut_divides():
    spans = place_media(TEXT, PAD, [CAT, DOG], []).spans
    assert [around(spans, at) for at in (2, 8, 9, 15)] == [None] * 4
    assert [around(spans, at) for at in (3, 7)] == [spans[0]] * 2


def test_positions_count_on_after_the_largest_of_a_picture():
    """Text 0 1, a grid of two rows and three columns from 2 on, text from 5 on, and again."""
    spans = place_media(TEXT, PAD, [CAT, DOG], []).spans
    frames = [0, 1, *[2] * 6, 5, *[6] * 6, 9, 10]
    rows = [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 6, 7, 7, 7, 9, 10]
    columns = [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 6, 7, 8, 9, 10]
    whole = rope_positions(spans, 0, 17)
    assert whole.tolist() == [frames, rows, columns]
    for start in range(17):
        for end in range(start + 1, 18):
            assert (rope_positions(spans, start, end) == whole[:, start:end]).all()
    assert [rope_delta(spans, at) for at in (0, 8, 14, 15, 17)] == [0, -3, -3, -6, -6]


def test_pictures_without_a_grid_count_like_text():
    spans = (MediaSpan(2, 8, CAT.digest),)
    assert rope_positions(spans, 0, 10).tolist() == [list(range(10))] * 3
    assert rope_delta(spans, 10) == 0
