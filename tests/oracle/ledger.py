"""What conversations said, in plain lists, and what of it a server must or may reuse.

A talk `is_awake` while a server has answered it since it started: then all of it must be reused,
to the token. Else what was told durable must be, in whole blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.oracle.talking import BLOCK, TOO_SLOW, WINDOW, Answer, num_common, whole


@dataclass(eq=False)
class Talk:
    """A conversation.

    `pieces` are what was asked in it, those from before a branch too, and `tries` what was asked
    and not answered. The first `num_durable` of its tokens were told durable, of which the first
    `num_own` are on disk as its own. It may be listed by a try: what is told of more than
    `num_sure` tokens is not of its `ids`. One that `is_harmed` may have lost any of its files, one
    that `is_going` is being deleted.
    """

    name: str
    tenant: str
    model: str
    session: str | None
    ids: list[int]
    pieces: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    tries: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    num_durable: int = 0
    num_own: int = 0
    num_sure: int = sys.maxsize
    is_awake: bool = False
    is_harmed: bool = False
    is_going: bool = False

    @property
    def num_kept(self) -> int:
        """So many tokens, in whole blocks, must be there after a kill."""
        return 0 if self.is_harmed else whole(min(self.num_durable, len(self.ids) - 1))

    def is_beside(self, tenant: str, model: str) -> bool:
        """Whether it may share its KV with who asks this."""
        return (self.tenant, self.model) == (tenant, model)


class Ledger:
    """All talks, and the pieces of those that were deleted. Without memory all that must be reused
    is in whole blocks: the end behind them is written when the model rests.
    """

    def __init__(self, *, has_memory: bool = True) -> None:
        self.has_memory = has_memory
        self.talks: list[Talk] = []
        self.buried: set[tuple[int, ...]] = set()
        self.num_excused = self.num_reused = 0

    def due(self, prompt: Sequence[int], tenant: str, model: str) -> int:
        """The least that must be reused of a prompt."""
        there = [one for one in self._beside(tenant, model) if not one.is_going]
        return max((self._due_of(one, prompt) for one in there), default=0)

    def allowed(self, prompt: Sequence[int], tenant: str, model: str) -> int:
        """The most that may be reused of a prompt: what its tenant said and did not delete."""
        shared = (num_common(prompt, one.ids) for one in self._beside(tenant, model))
        return max(shared, default=0)

    def _due_of(self, talk: Talk, prompt: Sequence[int]) -> int:
        shared = min(num_common(prompt, talk.ids), len(prompt) - 1)
        if talk.is_awake:
            there = min(shared, len(talk.ids) - 1)
            return there if self.has_memory else whole(there)
        return min(whole(shared), talk.num_kept)

    def _beside(self, tenant: str, model: str) -> list[Talk]:
        return [one for one in list(self.talks) if one.is_beside(tenant, model)]

    def check(self, answer: Answer, due: int, allowed: int) -> None:
        """What was reused for a prompt, when so much had to be and so much could be."""
        assert answer.num_cached <= allowed, f"{allowed} tokens may be reused: {answer}"
        if answer.reason == TOO_SLOW:
            self.num_excused += 1
            return
        assert answer.num_cached >= due, f"{due} tokens must be reused: {answer}"
        self.num_reused += due >= BLOCK

    def said(self, talk: Talk, prompt: Sequence[int], answer: Answer) -> None:
        """A talk was answered: what is new in its prompt is a piece."""
        if talk not in self.talks:
            self.talks.append(talk)
        talk.pieces.append(tuple(prompt[len(talk.ids) :]))
        talk.ids = [*prompt, *answer.token_ids]
        talk.num_durable = answer.num_durable
        talk.num_own = min(talk.num_own, talk.num_durable)
        talk.is_awake = True

    def going(self, talk: Talk) -> None:
        """It is about to be deleted. What others have durable of it may be so as its only."""
        talk.is_going = True
        for other in self._beside(talk.tenant, talk.model):
            if num_common(other.ids, talk.ids):
                other.num_durable = min(other.num_durable, other.num_own)

    def deleted(self, talk: Talk) -> None:
        """The server said that it is gone."""
        self.going(talk)
        self.talks.remove(talk)
        self.buried |= {*talk.pieces, *talk.tries}

    def gone(self) -> list[tuple[int, ...]]:
        """What was deleted and nobody has said since: the ends of pieces, where talks branched."""
        said = {piece for one in list(self.talks) for piece in (*one.pieces, *one.tries)}
        ends = (one[max((num_common(one, s) for s in said), default=0) :] for one in self.buried)
        return [one for one in ends if len(one) >= WINDOW]

    def heard(self, talk: Talk, num_durable: int) -> None:
        """The server lists it with so many tokens on disk as its own."""
        talk.num_own = min(num_durable, len(talk.ids) - 1, talk.num_sure)
        talk.num_durable = max(talk.num_durable, talk.num_own)

    def stopped(self, *, is_killed: bool) -> None:
        """The server ended. If it was told to, all that it answered is on disk; what a kill before
        that took is not there again.
        """
        for one in self.talks:
            if one.is_awake and not is_killed:
                one.num_durable = one.num_own = len(one.ids) - 1
            one.is_awake = False
