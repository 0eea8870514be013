"""Two answers beside each other: equal, or where they part and why; pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import msgspec

TIE = 1e-3
"""Two tokens whose log probabilities differ by less may come in either order: several times the
float noise that is measured, and far below what a wrong position or a lost block makes."""


class Scored(msgspec.Struct, array_like=True):
    """A token that was written, and the likeliest ones in its place, best first."""

    token: str
    logprob: float
    top: list[tuple[str, float]] = []

    def of(self, token: str) -> float | None:
        """The log probability of another token in this place, if it is among the likeliest."""
        return dict(reversed(self.top)).get(token)


class Divergence(NamedTuple):
    """Where two answers part."""

    where: str
    reason: str
    is_explained: bool


def parting(ours: Sequence[Scored], theirs: Sequence[Scored]) -> int | None:
    """The number of the first token in which they differ; None where there is none."""
    pairs = zip_longest(ours, theirs)
    parts = (at for at, (a, b) in enumerate(pairs) if a is None or b is None or a.token != b.token)
    return next(parts, None)


def noise(ours: Sequence[Scored], theirs: Sequence[Scored]) -> float:
    """The most by which the log probabilities of the same tokens differ, as far as both go along.

    What follows another token is no longer the same, so it does not count.
    """
    end = parting(ours, theirs)
    pairs = list(zip(ours, theirs, strict=False))[:end]
    return max((abs(a.logprob - b.logprob) for a, b in pairs), default=0.0)


def divergence(
    where: str, ours: Sequence[Scored], theirs: Sequence[Scored], names: tuple[str, str]
) -> Divergence:
    """Why two answers that differ do so, if their log probabilities say it."""
    at = parting(ours, theirs)
    if at is None:
        return Divergence(where, "the tokens are equal and the texts are not", False)
    if at >= len(ours) or at >= len(theirs):
        shorter = names[0] if at >= len(ours) else names[1]
        return Divergence(where, f"{shorter} ended after {at} tokens, the other went on", False)
    a, b = ours[at], theirs[at]
    margins = (_margin(a, b.token), _margin(b, a.token))
    told = "; ".join(
        f"{name}: {one.token!r} {one.logprob:.5f}, {other.token!r} {_shown(one.of(other.token))}"
        for name, one, other in ((names[0], a, b), (names[1], b, a))
    )
    is_tie = all(margin is not None and margin < TIE for margin in margins)
    kind = "a tie" if is_tie else "no tie"
    return Divergence(where, f"token {at + 1} is {kind} ({told})", is_tie)


def _margin(one: Scored, other: str) -> float | None:
    """By how much the chosen token is likelier than the other."""
    beside = one.of(other)
    return None if beside is None else one.logprob - beside


def _shown(logprob: float | None) -> str:
    return "not among the likeliest" if logprob is None else f"{logprob:.5f}"
