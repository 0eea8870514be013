"""The KV of runs where several ranks compute a model: each has a part of every one.

Rank 0 names every run; the others keep their part for as long as it keeps its own. What rank 0 has
on disk the others have as well, each on its own and under the same names (`disks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import msgspec
from typing_extensions import override

from runtime.kv.pack import PackedKv, RankLayout, RunKv, Which
from runtime.kv.parts import Caches, Parts, Span
from runtime.ranks import Split
from runtime.worker.distributed.records import (
    Answer,
    Assemble,
    Cut,
    Dress,
    GiveBack,
    Loaded,
    Question,
    Record,
)
from store.errors import SlotDamaged


class Rank(NamedTuple):
    """Which part of a model a process has: of every layer ("tensor") or of them ("pipeline")."""

    number: int
    num_ranks: int
    split: Split


class Numbered:
    """What all ranks call `number`; the others forget it when nobody here has it."""

    number: int


class Peers(Protocol):
    """All other ranks, told from the mlx thread, as far as nothing else is said."""

    def tell(self, record: Record) -> None: ...

    def tell_now(self, record: Record, /) -> None:
        """Any thread may."""
        ...

    def new_share(self) -> Numbered:
        """Any thread may ask."""
        ...

    def loaded(self) -> list[Loaded]:
        """What each of them said of its shard."""
        ...

    def ask(self, question: Question, /) -> Callable[[], list[Answer]]:
        """Have each of them do that, and wait for their answers, in order; any thread may."""
        ...


class Part(NamedTuple):
    """What the others are to write of a run that begins at `start`."""

    share: Numbered
    which: Which
    start: int


class RankParts(Parts):
    """One rank's part of everything."""

    def __init__(self, model: Caches, rank: Rank) -> None:
        super().__init__(model)
        self.rank = rank

    @property
    @override
    def can_divide(self) -> bool:
        return False

    @override
    def packed(self, kv: RunKv, start: int = 0, which: Which = "all") -> PackedKv:
        own, rank = super().packed(kv, start, which), self.rank
        layout = RankLayout(rank.split, rank.number, rank.num_ranks, own.layout)
        return own._replace(layout=msgspec.json.encode(layout).decode())

    @override
    def _own(
        self, layout: str, tensors: Mapping[str, mx.array]
    ) -> tuple[str, Mapping[str, mx.array]]:
        try:
            found = msgspec.json.decode(layout, type=RankLayout)
        except msgspec.MsgspecError as error:
            raise SlotDamaged(f"its layout cannot be read: {error}") from error
        rank = Rank(found.rank, found.num_ranks, self.rank.split)
        if (found.split, rank) != (self.rank.split, self.rank):
            ranks = f"rank {found.rank} of {found.num_ranks}"
            raise SlotDamaged(f"it is of {ranks} that are split by {found.split}")
        return found.layout, tensors


class LeaderParts(RankParts):
    """Rank 0's: whatever is done here the others are told to do as well."""

    def __init__(self, model: Caches, rank: Rank, peers: Peers, num_here: int = 1) -> None:
        """Waits until the others have loaded their shards; `num_here` ranks are on this machine."""
        super().__init__(model, rank)
        self._peers = peers
        self._num_here = num_here
        for other in peers.loaded():
            self.needs_state |= other.needs_state
            self.unsupported = self.unsupported or other.unsupported

    @override
    def cut(self, kv: Sequence[Any], spans: Sequence[Span]) -> list[RunKv]:
        shares = [self._peers.new_share() for _ in spans]
        runs = [share.number for share in shares]
        self._peers.tell(Cut(kv=number_of(kv), spans=list(spans), runs=runs))
        cut = super().cut(kv, spans)
        return [one._replace(share=share) for one, share in zip(cut, shares, strict=True)]

    @override
    def bare(self, kv: RunKv) -> RunKv:
        share = self._peers.new_share()
        self._peers.tell(Dress(run=share.number, of=number_of(kv.share)))
        return super().bare(kv)._replace(share=share)

    @override
    def with_state(self, kv: RunKv, state: RunKv) -> RunKv:
        share, state_of = self._peers.new_share(), number_of(state.share)
        self._peers.tell(Dress(run=share.number, of=number_of(kv.share), state_of=state_of))
        return super().with_state(kv, state)._replace(share=share)

    @override
    def assemble(
        self, kv: Sequence[Any], pieces: Sequence[tuple[RunKv, int]], num_room: int
    ) -> None:
        numbered = [(number_of(one.share), num_tokens) for one, num_tokens in pieces]
        self._peers.tell(Assemble(kv=number_of(kv), pieces=numbered, num_room=num_room))
        super().assemble(kv, pieces, num_room)

    @override
    def packed(self, kv: RunKv, start: int = 0, which: Which = "all") -> PackedKv:
        assert isinstance(kv.share, Numbered)
        part = Part(kv.share, which, start)
        return super().packed(kv, start, which)._replace(num_parts=self._num_here, share=part)

    @override
    def give_back(self) -> None:
        self._peers.tell(GiveBack())
        super().give_back()


def number_of(shared: object) -> int:
    """What all ranks call this."""
    assert isinstance(shared, Numbered)
    return shared.number
