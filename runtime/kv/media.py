"""Pictures among the tokens of a sequence: what stands for them, and where positions go on.

Pure. The placeholders of a picture say nothing of it, so that what is hashed, compared and stored
has *identity ids* in their place: numbers that no vocabulary has, drawn from the picture's digest.
Blocks, trees and slots thus tell pictures apart as they tell words apart, and text before one is
shared whatever it shows. The model itself is given the placeholders.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import shake_256
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from store.types import MediaSpan

_LOWEST = 1 << 31
"""Identity ids have the highest of their 32 bits; token ids never do."""


class Medium(NamedTuple):
    """A picture as a model takes it in.

    `grid` is frames, rows and columns of its tokens where they have positions of their own.
    """

    digest: bytes
    num_tokens: int
    grid: tuple[int, ...] = ()


class Placed(NamedTuple):
    """Identity ids with the pictures in them; each of `positions` where it is now."""

    token_ids: list[int]
    spans: tuple[MediaSpan, ...]
    positions: list[int]


def identity_ids(medium: Medium) -> list[int]:
    """One identity id for each of its tokens: 31 bits each, the same for the same picture."""
    drawn = array("I", shake_256(medium.digest).digest(4 * medium.num_tokens))
    return [one | _LOWEST for one in drawn]


def model_ids(token_ids: list[int], placeholder: int) -> list[int]:
    """What the model is given for identity ids."""
    return [placeholder if one >= _LOWEST else one for one in token_ids]


def place_media(
    token_ids: Sequence[int], placeholder: int, media: Sequence[Medium], positions: Sequence[int]
) -> Placed:
    """Put pictures in the places of their placeholders, of which there is one for each.

    Raises:
        ValueError: there are more or fewer.
    """
    places = [at for at, token_id in enumerate(token_ids) if token_id == placeholder]
    placed: list[int] = []
    spans: list[MediaSpan] = []
    done = 0
    for at, medium in zip(places, media, strict=True):
        placed += token_ids[done:at]
        start = len(placed)
        placed += identity_ids(medium)
        spans.append(MediaSpan(start, len(placed), medium.digest, medium.grid))
        done = at + 1
    placed += token_ids[done:]
    longer = [span.end - span.start - 1 for span in spans]
    shifted = [
        position + sum(more for at, more in zip(places, longer, strict=True) if at < position)
        for position in positions
    ]
    return Placed(placed, tuple(spans), shifted)


def moved(span: MediaSpan, by: int) -> MediaSpan:
    """The same picture so many tokens later."""
    return span._replace(start=span.start + by, end=span.end + by)


def located(token_ids: Sequence[int], media: Sequence[Medium]) -> tuple[MediaSpan, ...] | None:
    """Where these pictures, in this order and no others, are among identity ids; None if not so."""
    spans: list[MediaSpan] = []
    at = 0
    for medium in media:
        at = next((i for i in range(at, len(token_ids)) if token_ids[i] >= _LOWEST), len(token_ids))
        end = at + medium.num_tokens
        if list(token_ids[at:end]) != identity_ids(medium):
            return None
        spans.append(MediaSpan(at, end, medium.digest, medium.grid))
        at = end
    return None if highest(token_ids[at:]) >= _LOWEST else tuple(spans)


def highest(token_ids: Sequence[int]) -> int:
    """The largest of some token ids, -1 without any; of packed ones that is soon known."""
    if isinstance(token_ids, array) and token_ids:
        return int(np.frombuffer(token_ids, np.uintc).max())
    return max(token_ids, default=-1)


def around(spans: Iterable[MediaSpan], position: int) -> MediaSpan | None:
    """The picture that a cut at this position would divide."""
    return next((span for span in spans if span.start < position < span.end), None)


def rope_delta(spans: Iterable[MediaSpan], position: int) -> int:
    """How far the model's position is from the number of tokens, after this many of them."""
    return sum(_shift(span) for span in spans if span.end <= position)


def rope_positions(spans: Sequence[MediaSpan], start: int, end: int) -> NDArray[np.int32]:
    """The positions `[3, tokens]` of the tokens `[start, end)`: frame, row, column.

    Text counts on by one in all three; a picture's tokens count from where the text stopped, each
    by its place in the grid, and the text after it goes on after the largest.
    Source: Qwen2-VL (arXiv 2409.12191), section 2.1.
    """
    found = np.tile(np.arange(start, end, dtype=np.int32), (3, 1))
    delta = 0
    for span in spans:
        low, high = max(span.start, start), min(span.end, end)
        if span.grid and low < high:
            cells = np.indices(span.grid, dtype=np.int32).reshape(3, -1)
            base = span.start + delta
            found[:, low - start : high - start] = cells[:, low - span.start : high - span.start]
            found[:, low - start : high - start] += base
        if span.end < end:
            found[:, max(span.end - start, 0) :] += _shift(span)
        delta += _shift(span)
    return found


def _shift(span: MediaSpan) -> int:
    return max(span.grid) - (span.end - span.start) if span.grid else 0
