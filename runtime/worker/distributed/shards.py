"""The KV of runs where several ranks compute a model: one slot file has the parts of all of them.

So a slot is published, moved, damaged and deleted for all ranks at once. A rank's tensors bear its
number. Rank 0 names every run; the others keep their part for as long as it keeps its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import msgspec
from typing_extensions import override

from runtime.kv.pack import RankLayouts, RunKv, rank_suffix
from runtime.kv.parts import Caches, Parts, Span
from runtime.kv.writer import Packed
from runtime.ranks import Split
from runtime.worker.distributed.records import (
    Assemble,
    Bare,
    Cut,
    Give,
    GiveBack,
    HasRead,
    Join,
    Loaded,
    Read,
    Record,
)
from store.errors import SlotDamaged, SlotMissing, StoreFailed
from store.types import SlotHeader

_FAILURES = {one.reason: one for one in (SlotMissing, StoreFailed)}


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

    def new_share(self) -> Numbered: ...

    def loaded(self) -> list[Loaded]:
        """What each of them said of its shard."""
        ...

    def has_read(self) -> list[HasRead]:
        """What each of them answers to `Read`."""
        ...

    def given(self, wanted: Give) -> list[Packed]:
        """The parts of the others, in order; any thread may ask."""
        ...


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
    def pack(self, kv: RunKv, start: int = 0) -> Packed:
        packed, suffix = super().pack(kv, start), rank_suffix(self.rank.number)
        tensors = [one._replace(name=one.name + suffix) for one in packed.tensors]
        return Packed(packed.layout, tensors)

    @override
    def _own(
        self, layout: str, tensors: Mapping[str, mx.array]
    ) -> tuple[str, Mapping[str, mx.array]]:
        try:
            found = msgspec.json.decode(layout, type=RankLayouts)
        except msgspec.MsgspecError as error:
            raise SlotDamaged(f"its layout cannot be read: {error}") from error
        if (found.split, len(found.ranks)) != (self.rank.split, self.rank.num_ranks):
            raise SlotDamaged(f"it is of {len(found.ranks)} ranks that are split by {found.split}")
        suffix = rank_suffix(self.rank.number)
        own = {n.removesuffix(suffix): one for n, one in tensors.items() if n.endswith(suffix)}
        return found.ranks[self.rank.number], own


class LeaderParts(RankParts):
    """Rank 0's: whatever is done here the others are told to do as well."""

    def __init__(self, model: Caches, rank: Rank, peers: Peers) -> None:
        """Waits until the others have loaded their shards."""
        super().__init__(model, rank)
        self._peers = peers
        for other in peers.loaded():
            self.needs_state |= other.needs_state
            self.unsupported = self.unsupported or other.unsupported

    @override
    def bytes_per_token(self, kv: Sequence[Any]) -> int:
        """As if all ranks had as much: a slot file has all of it."""
        return super().bytes_per_token(kv) * self.rank.num_ranks

    @override
    def cut(self, kv: Sequence[Any], spans: Sequence[Span]) -> list[RunKv]:
        shares = [self._peers.new_share() for _ in spans]
        runs = [share.number for share in shares]
        self._peers.tell(Cut(kv=number_of(kv), spans=list(spans), runs=runs))
        cut = super().cut(kv, spans)
        return [one._replace(share=share) for one, share in zip(cut, shares, strict=True)]

    @override
    def bare(self, kv: RunKv) -> RunKv:
        self._peers.tell(Bare(run=number_of(kv.share)))
        return super().bare(kv)

    @override
    def joined(self, pieces: Sequence[tuple[RunKv, int]]) -> RunKv:
        share = self._peers.new_share()
        self._peers.tell(Join(run=share.number, pieces=_numbered(pieces)))
        return super().joined(pieces)._replace(share=share)

    @override
    def assemble(
        self, kv: Sequence[Any], pieces: Sequence[tuple[RunKv, int]], num_room: int
    ) -> None:
        self._peers.tell(Assemble(kv=number_of(kv), pieces=_numbered(pieces), num_room=num_room))
        super().assemble(kv, pieces, num_room)

    @override
    def take(self, header: SlotHeader, tensors: Mapping[str, mx.array]) -> RunKv:
        """As of `Parts`; what one rank cannot take up is taken up by none."""
        share = self._peers.new_share()
        self._peers.tell(Read(run=share.number, slot=header.id))
        try:
            own = super().take(header, tensors)
        finally:
            answers = self._peers.has_read()
        for rank, answer in enumerate(answers, 1):
            if answer.failure is not None:
                kind = _FAILURES.get(answer.failure, SlotDamaged)
                raise kind(f"rank {rank}: {answer.message}")
        return own._replace(share=share)

    @override
    def pack(self, kv: RunKv, start: int = 0) -> Packed:
        own = super().pack(kv, start)

        def whole() -> Packed:
            # It holds `kv`, so that the others still have theirs.
            wanted = Give(run=number_of(kv.share), has_state=kv.state is not None)
            parts = [own, *self._peers.given(wanted)]
            layouts = RankLayouts(self.rank.split, tuple(part.layout for part in parts))
            tensors = [tensor for part in parts for tensor in part.tensors]
            return Packed(msgspec.json.encode(layouts).decode(), tensors)

        return Packed(own.layout, own.tensors, self.rank.num_ranks, whole)

    @override
    def give_back(self) -> None:
        self._peers.tell(GiveBack())
        super().give_back()


def number_of(shared: object) -> int:
    """What all ranks call this."""
    assert isinstance(shared, Numbered)
    return shared.number


def _numbered(pieces: Sequence[tuple[RunKv, int]]) -> list[tuple[int, int]]:
    return [(number_of(kv.share), num_tokens) for kv, num_tokens in pieces]
