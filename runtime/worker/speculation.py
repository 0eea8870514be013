"""Whether guesses are worth a wider step, decided purely from what was measured.

A step that computes several tokens of each row takes longer than a plain one, by how much depends
on the device, the model and the rows. What a request repeats is known at no cost, because plain
steps test each guess as well. So it is tried where it should pay, and a request that loses by it
anyway stops until it can afford another try.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.worker.proposals import MOST_TOKENS, Proposer

WIDTHS = (2, 4, 8, MOST_TOKENS + 1)
"""Tokens of each row in one step; few, as a device compiles kernels for each."""

_MARGIN = 1.1
"""How much faster it must be expected to be."""

_FIRST_DRAFT_COST = 0.3
_SMOOTHING = 0.2
_MEMORY = 1 / 12
_FIRST_RATE = 0.6
_FIRST_COST = 1.3
_CREDIT = 0.5
_MOST_CREDIT = 4.0
_CREDIT_PER_STEP = 0.005
"""A request that never gains loses half a step, and then at most so much of its time."""


class StepCosts:
    """What steps took on this device, in seconds, by the number of rows and the tokens of each."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], float] = {}
        self._num_seen: dict[tuple[int, int], int] = {}
        self.drafts: StepCosts | None = None
        """What a draft model takes for each token of a step of so many rows, where there is one."""

    def saw(self, num_rows: int, width: int, seconds: float) -> None:
        """A step took so long. The first of each kind may have had kernels to compile."""
        key = num_rows.bit_length(), width
        self._num_seen[key] = self._num_seen.get(key, 0) + 1
        average = self._seconds.get(key)
        if average is None or self._num_seen[key] == 2:
            self._seconds[key] = seconds if average is None else min(average, seconds)
        else:
            self._seconds[key] = average + _SMOOTHING * (seconds - average)

    def is_known(self, num_rows: int, width: int) -> bool:
        """More than one such step was seen."""
        return self._num_seen.get((num_rows.bit_length(), width), 0) > 1

    def plain_s(self, num_rows: int) -> float | None:
        """Seconds of a plain step, or None before there were any."""
        return self._seconds.get((num_rows.bit_length(), 1)) if self.is_known(num_rows, 1) else None

    @property
    def measured_ms(self) -> dict[str, float]:
        """Milliseconds by "rows x width", rows being the most of their power of two."""
        return {
            f"{(1 << rows) - 1} x {width}": round(seconds * 1000, 2)
            for (rows, width), seconds in sorted(self._seconds.items())
        }

    def of_draft(self, num_rows: int) -> float:
        """What one drafted token of each row takes, in plain steps: measured, or else a guess."""
        seconds = self.drafts.plain_s(num_rows) if self.drafts is not None else None
        plain_s = self.plain_s(num_rows)
        return seconds / plain_s if seconds and plain_s else _FIRST_DRAFT_COST

    def of(self, num_rows: int, width: int) -> float | None:
        """What such a step takes, in plain steps: measured, or else as if each token cost as much
        as those of the widest that was. None before there were plain steps.
        """
        plain_s = self.plain_s(num_rows)
        if plain_s is None:
            return None
        for known in (w for w in sorted(WIDTHS, reverse=True) if w <= width):
            if self.is_known(num_rows, known):
                return self._seconds[num_rows.bit_length(), known] / plain_s * width / known
        return _FIRST_COST * max(1.0, width / WIDTHS[1])


@dataclass(slots=True)
class Controller:
    """What guessing has brought one request. `balance` is in plain steps: tokens gained less time
    lost, and a small credit that grows back.
    """

    rate: float = _FIRST_RATE
    """How many guesses were right lately."""
    balance: float = _CREDIT
    draft_rate: float = _FIRST_RATE
    """How many tokens of a draft model were right lately."""

    @property
    def may_try(self) -> bool:
        """It has not lost more than it may."""
        return self.balance > 0.0

    def saw_guess(self, *, is_right: bool) -> None:
        """A guess was tested, in whatever step."""
        self.rate += _MEMORY * (is_right - self.rate)

    def saw_drafted(self, num_right: int, num_tested: int) -> None:
        """So many of the drafted tokens that were tested were right."""
        for number in range(min(num_right + 1, num_tested)):
            self.draft_rate += _MEMORY * ((number < num_right) - self.draft_rate)

    def saw_plain(self) -> None:
        """A plain step: there may be another try one day."""
        if self.balance < _CREDIT:
            self.balance += _CREDIT_PER_STEP

    @property
    def num_rest_steps(self) -> int:
        """Plain steps after which it may try again."""
        return 0 if self.may_try else int(-self.balance / _CREDIT_PER_STEP) + 1

    def rest(self, num_steps: int) -> None:
        """So many plain steps were made without it."""
        self.balance = min(self.balance + num_steps * _CREDIT_PER_STEP, _CREDIT)

    def settle(self, num_gained: int, num_lost: float) -> None:
        """What a step brought it, in tokens, and what it cost, in plain steps."""
        self.balance = min(self.balance + num_gained - num_lost, _MOST_CREDIT)


@dataclass(slots=True, eq=False)
class Speculation:
    """What one row proposes, and what that brings it."""

    proposer: Proposer
    controller: Controller = field(default_factory=Controller)
    num_gained: int = 0
    """Tokens that the last step said beyond the first."""
    _is_ahead: bool = False

    @property
    def chance(self) -> Chance | None:
        """What a wider step may bring, if there is anything to propose. While its next token is
        still computed that has to be right first.
        """
        num_proposed = self.proposer.num_proposed
        if not num_proposed:
            return None
        rate = self.controller.rate
        return Chance(num_proposed, rate, 1.0 if self._is_ahead else rate)

    @property
    def draft_chance(self) -> Chance:
        """What a wider step may bring if a draft model proposes."""
        return Chance(MOST_TOKENS, self.controller.draft_rate)

    def note_next(self, token_id: int) -> None:
        """The token that it says with the next step is known already."""
        if not self._is_ahead:
            self.note([token_id])
            self._is_ahead = True

    def note_said(self, token_id: int) -> None:
        """It has said this with a plain step."""
        if self._is_ahead:
            self._is_ahead = False
        else:
            self.note([token_id])

    def wake(self, token_ids: list[int], next_id: int | None, num_rest_steps: int) -> None:
        """Go on after a rest, of which it took no notice: all tokens of the row by now, and the
        next one where it is known.
        """
        self.controller.rest(num_rest_steps)
        self._is_ahead = next_id is not None
        self.proposer.catch_up(token_ids if next_id is None else [*token_ids, next_id])

    def note(self, token_ids: Iterable[int]) -> None:
        """It goes on like this."""
        for token_id in token_ids:
            is_right = self.proposer.note(token_id)
            if is_right is not None:
                self.controller.saw_guess(is_right=is_right)


class Chance(NamedTuple):
    """A row that has something to propose: how many tokens, and how likely each of them is right
    if those before it are. `certainty` is how likely there is anything to propose at all.
    """

    num_proposed: int
    rate: float
    certainty: float = 1.0

    def expected(self, width: int) -> float:
        """Tokens gained by a step of this width, on average."""
        num = min(self.num_proposed, width - 1)
        if self.rate >= 1.0:
            return self.certainty * num
        return self.certainty * self.rate * (1 - self.rate**num) / (1 - self.rate)


def best_width(
    num_rows: int, chances: Sequence[Chance], cost: Callable[[int], float | None]
) -> int:
    """The width of the step that says most tokens of all rows per second: 1, the plain step, unless
    another is expected to be clearly faster. `cost` gives a width's time in plain steps.
    """
    return best_step(num_rows, chances, cost)[0]


def best_step(
    num_rows: int, chances: Sequence[Chance], cost: Callable[[int], float | None]
) -> tuple[int, float]:
    """The same, and the tokens that it is expected to say in the time of a plain step."""
    best, most = 1, num_rows * _MARGIN
    longest = max((chance.num_proposed for chance in chances), default=0)
    for width in _widths_for(longest):
        taken = cost(width)
        if taken is None:
            return 1, float(num_rows)
        speed = (num_rows + sum(chance.expected(width) for chance in chances)) / taken
        if speed > most:
            best, most = width, speed
    return best, most


def _widths_for(num_proposed: int) -> Iterable[int]:
    """Those that would be used: none has more than twice the room that is needed."""
    if not num_proposed:
        return ()
    fits = next((width for width in WIDTHS if width > num_proposed), WIDTHS[-1])
    return (width for width in WIDTHS if width <= fits)
