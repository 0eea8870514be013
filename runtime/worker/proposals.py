"""Guesses, purely, of what a sequence says next: what followed the same tokens before.

Text that is copied or edited stands in the prompt, in the answer so far, or in the answer that the
client expects, its prediction. Where the last tokens occur in one of them, what follows them there
is proposed. A wrong guess costs time and changes nothing: the model says what it would have said.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

NGRAM = 3
"""So many equal tokens make a place a guess."""

MOST_TOKENS = 15
"""Proposed at once, at most."""

_INDEXED_AT_ONCE = 4096
"""A long prompt is indexed in parts, one with each token, so that nobody waits for the whole."""

_PREDICTED = 7
"""Proposed of a prediction before any of it was said."""

_NEAR_GRAM, _NEAR_TOKENS = 2, 32
"""Behind a place that was left, so few tokens are found again within so many."""


class _Source:
    """A text that may be said again, and where each of its n-grams stood last."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self._num_indexed = 0
        self._after: dict[tuple[int, ...], int] = {}

    def index(self) -> None:
        """Take note of some more of it. What nothing follows yet is left for later."""
        first = self._num_indexed
        end = min(len(self.token_ids) - NGRAM, first + _INDEXED_AT_ONCE)
        if first >= end:
            return
        part = self.token_ids[first : end + NGRAM - 1]
        grams = zip(*(islice(part, number, None) for number in range(NGRAM)), strict=False)
        self._after.update(zip(grams, range(first + NGRAM, end + NGRAM), strict=True))
        self._num_indexed = end

    def find(self, gram: tuple[int, ...]) -> int | None:
        """Where goes on what begins like this; the last place of those that are indexed."""
        return self._after.get(gram)


class Proposer:
    """What one sequence may say next. It follows one place until that says something else."""

    def __init__(self, token_ids: Iterable[int], prediction: Iterable[int] = ()) -> None:
        """`token_ids` are the prompt and what was said of the answer already."""
        self._said = _Source([*token_ids])
        predicted = _Source([*prediction])
        self._sources = [predicted, self._said] if predicted.token_ids else [self._said]
        self._source = self._said
        self._at: int | None = None
        self._num_agreed = 0
        self._left_at: int | None = None
        """Where `_source` was left for something else."""
        if predicted.token_ids:
            self._source, self._at, self._num_agreed = predicted, 0, _PREDICTED
        else:
            self._look()

    @property
    def guess(self) -> int | None:
        """The next token, if there is anything to go by."""
        return None if self._at is None else self._source.token_ids[self._at]

    def note(self, token_id: int) -> bool | None:
        """The sequence says this; whether it was the guess, or None as there was none."""
        guess = self.guess
        self._said.token_ids.append(token_id)
        if self._at is not None and guess == token_id:
            self._at += 1
            self._num_agreed += 1
            if self._at < len(self._source.token_ids):
                return True
        elif self._at is not None:
            self._left_at = self._at
        self._look()
        return None if guess is None else guess == token_id

    @property
    def num_proposed(self) -> int:
        """Tokens of `proposal`: no more than have agreed up to now, as who just began to repeat
        something may stop soon.
        """
        if self._at is None:
            return 0
        return min(self._num_agreed, MOST_TOKENS, len(self._source.token_ids) - self._at)

    def proposal(self) -> list[int]:
        """What may come, the guess first."""
        if self._at is None:
            return []
        return self._source.token_ids[self._at : self._at + self.num_proposed]

    def catch_up(self, token_ids: list[int]) -> None:
        """Its prompt and all that it has said, while nobody asked what it says next."""
        said = self._said.token_ids
        said += token_ids[len(said) :]
        self._at = self._left_at = None
        self._look()

    def _look(self) -> None:
        """Find another place to go by."""
        self._at, self._num_agreed = self._near(), _NEAR_GRAM
        if self._at is not None:
            return
        gram = tuple(self._said.token_ids[-NGRAM:])
        for source in self._sources:
            source.index()
            at = source.find(gram)
            if at is not None and at < len(source.token_ids):
                self._source, self._at, self._num_agreed = source, at, NGRAM
                self._left_at = None
                return

    def _near(self) -> int | None:
        """Where what was left for an edit goes on. The nearest place: lines are often alike."""
        if self._left_at is None:
            return None
        token_ids = self._source.token_ids
        start, gram = self._left_at, self._said.token_ids[-_NEAR_GRAM:]
        end = min(start + _NEAR_TOKENS, len(token_ids) - _NEAR_GRAM)
        for at in range(start, end):
            if token_ids[at : at + _NEAR_GRAM] == gram:
                self._left_at = None
                return at + _NEAR_GRAM
        return None


def num_accepted(proposal: list[int], drawn: list[int]) -> int:
    """How much of a proposal is said. `drawn` are the tokens that the model draws after what was
    said and after each token of the proposal, so up to the first that differs they are what it
    says anyway, and that one is what it says instead. Each is drawn as without a proposal, so what
    is said has the very same distribution.
    """
    pairs = zip(proposal, drawn, strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), len(proposal))
