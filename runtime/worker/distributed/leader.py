"""Rank 0 of a model that several processes compute: the engine's parts, with every call told on.

The other ranks do the same calls on their shards, see `follower`. Belongs to the mlx thread.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import queue
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import mlx.core as mx
import msgspec
from typing_extensions import override

from runtime.ranks import Ranks, Split
from runtime.wire import KvOptions, Load
from runtime.worker import model as models
from runtime.worker.decode import DecodedToken, DecodeFailed, Decoder
from runtime.worker.distributed.disks import OtherDisks
from runtime.worker.distributed.launch import Followers, OnLost
from runtime.worker.distributed.records import (
    Answer,
    Begin,
    Free,
    Insert,
    Loaded,
    NewKv,
    Prefill,
    Question,
    Record,
    Row,
    Said,
    Score,
    Step,
    Take,
)
from runtime.worker.distributed.shards import LeaderParts, Numbered, Rank
from runtime.worker.model import LoadedModel
from runtime.worker.sampler import Sampler
from runtime.worker.scores import TokenScore
from runtime.worker.sequence import Sequence as Choice
from runtime.worker.sequence import SequenceGroup
from runtime.worker.taint import EngineTainted
from runtime.worker.vision.images import ImageBatch

_MAX_SAMPLERS = 256


class RankConnections(Protocol):
    """The connections to all other ranks."""

    def send(self, record: Record) -> None: ...

    def loaded(self) -> list[Loaded]: ...

    @property
    def ask(self) -> Callable[[Question], Callable[[], list[Answer]]]: ...


class SharedKv(list[Any], Numbered):
    """Rank 0's part of layer caches."""

    def __init__(self, kv: list[Any], number: int) -> None:
        super().__init__(kv)
        self.number = number


class Share(Numbered):
    """What of a run's KV the other ranks have."""

    def __init__(self, number: int) -> None:
        self.number = number


class Leader:
    """Tells the followers; knows what they may forget. Belongs to the mlx thread."""

    def __init__(self, peers: RankConnections) -> None:
        self._peers = peers
        self._unused: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self.loaded = peers.loaded
        self.ask = peers.ask
        self.tell_now = peers.send

    def tell(self, record: Record) -> None:
        """Send a record, after what became unused before it."""
        unused: list[int] = []
        while not self._unused.empty():
            unused.append(self._unused.get())
        if unused:
            self._peers.send(Free(numbers=unused))
        self._peers.send(record)

    def share(self, kv: list[Any]) -> SharedKv:
        """A number for layer caches, which the followers may forget when nobody has them."""
        shared = SharedKv(kv, next(self._numbers))
        weakref.finalize(shared, self._unused.put, shared.number)
        return shared

    def new_share(self) -> Share:
        """A number for a run, of which the same holds."""
        share = Share(next(self._numbers))
        weakref.finalize(share, self._unused.put, share.number)
        return share


class Agreement:
    """What rank 0 draws is what all ranks have drawn."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group
        self._last: mx.array | None = None
        # Rows that share a sampler are drawn at once, on all ranks alike.
        self.wrap = lru_cache(maxsize=_MAX_SAMPLERS)(self._wrap)

    def _wrap(self, sampler: Sampler) -> Sampler:
        return lambda logprobs: self._spread(sampler(logprobs))

    def _spread(self, token_ids: mx.array) -> mx.array:
        token_ids = token_ids.astype(mx.int32)
        if self._group.rank():
            token_ids = token_ids * 0
        if self._last is not None:
            # Nothing else would have all ranks spread their rows in the same order.
            (token_ids,) = mx.depends([token_ids], [self._last])
        self._last = mx.distributed.all_sum(token_ids, group=self._group)
        return self._last


@dataclass(eq=False, slots=True, kw_only=True)
class LeaderModel(LoadedModel):
    """A model whose other parts compute along."""

    lead: Leader

    @staticmethod
    def of(model: LoadedModel, agree: Callable[[Sampler], Sampler], lead: Leader) -> LeaderModel:
        """The same model; it gives no embeddings, which would need all ranks as well."""
        return LeaderModel(
            spec=msgspec.structs.replace(model.spec, pooling=None),
            model=model.model,
            tokenizer=model.tokenizer,
            eos_token_ids=model.eos_token_ids,
            vocab_size=model.vocab_size,
            is_batchable=model.is_batchable,
            stream=model.stream,
            weights_bytes=model.weights_bytes,
            dialect=model.dialect,
            kv_bits=model.kv_bits,
            agree=agree,
            lead=lead,
        )

    @override
    def new_kv(self, num_tokens: int = 0) -> list[Any]:
        shared = self.lead.share(LoadedModel.new_kv(self, num_tokens))
        self.lead.tell(NewKv(kv=shared.number))
        return shared

    @override
    def prefill(
        self,
        token_ids: list[int],
        kv: list[Any],
        image_batch: ImageBatch | None = None,
        start: int = 0,
    ) -> None:
        """As of `LoadedModel`. Raises EngineTainted: the ranks are out of step."""
        assert isinstance(kv, SharedKv)
        self.lead.tell(Prefill(kv=kv.number, token_ids=token_ids))
        try:
            LoadedModel.prefill(self, token_ids, kv, image_batch, start)
        except (RuntimeError, ValueError) as error:
            raise EngineTainted(str(error)) from error

    @override
    def score(
        self, token_ids: list[int], kv: list[Any], following: list[int], num_top: int
    ) -> list[TokenScore]:
        """As of `LoadedModel`. Raises EngineTainted: the ranks are out of step."""
        assert isinstance(kv, SharedKv)
        number = kv.number
        self.lead.tell(Score(kv=number, token_ids=token_ids, following=following, num_top=num_top))
        try:
            return LoadedModel.score(self, token_ids, kv, following, num_top)
        except (RuntimeError, ValueError) as error:
            raise EngineTainted(str(error)) from error


class LeaderDecoder(Decoder):
    """A decoder whose batches are formed on all ranks."""

    def __init__(
        self, model: LoadedModel, max_batch: int, lead: Leader, *, overlaps: bool = True
    ) -> None:
        super().__init__(model, max_batch, overlaps=overlaps)
        self._lead = lead
        self._rows: dict[Choice, int] = {}
        self._num_rows = 0

    @override
    def insert(self, group: SequenceGroup, sequences: Iterable[Choice], *, takes: bool) -> None:
        assert isinstance(group.kv, SharedKv)
        rows: list[Row] = []
        sequences = list(sequences)
        for one in sequences:
            self._num_rows += 1
            self._rows[one] = self._num_rows
            said = list(one.output_token_ids)
            rows.append(Row(self._num_rows, one.index, one.ends_at_eos, said))
        self._lead.tell(
            Insert(
                kv=group.kv.number,
                request=group.request,
                token_ids=group.token_ids,
                num_prompt_tokens=group.num_prompt_tokens,
                max_tokens=group.max_tokens,
                rows=rows,
                takes=takes,
            )
        )
        super().insert(group, sequences, takes=takes)

    @override
    def take(self, sequence: Choice) -> list[Any] | None:
        row = self._rows.pop(sequence, None)
        if row is None:
            return None
        taken = super().take(sequence)
        kv = self._lead.share(taken or [])
        self._lead.tell(Take(row=row, kv=kv.number))
        return kv if taken is not None else None

    @override
    def step(self) -> Iterator[DecodedToken]:
        """As of `Decoder`. Raises EngineTainted: the ranks are out of step."""
        self._lead.tell(Step())
        try:
            tokens = list(super().step())
        except DecodeFailed as error:
            raise EngineTainted(str(error)) from error
        said = [(self._rows[token.sequence], token.token_id) for token in tokens]
        ended: list[tuple[int, int]] = []
        for number, token in enumerate(tokens):
            if token.is_last:
                kv = self._lead.share(token.kv or [])
                ended.append((self._rows.pop(token.sequence), kv.number))
                tokens[number] = replace(token, kv=kv)
        self._lead.tell(Said(tokens=said, ended=ended))
        yield from tokens


class DistributedGroup:
    """All ranks of one model, started and joined."""

    def __init__(self, load: Load, ranks: Ranks, on_lost: OnLost) -> None:
        """`on_lost` is told from another thread. Raises RanksFailed."""
        self._ranks = ranks
        self._wanted: Split | None = ranks.split
        self._followers = Followers(ranks, on_lost)
        # They need no secrets: rank 0 says what to read and to write.
        kv = KvOptions(kv_bits=load.kv.kv_bits, root=load.kv.root)
        self._followers.send(Begin(load=msgspec.structs.replace(load, kv=kv)))
        self._lead = Leader(self._followers)
        self._split: Split = "tensor"

    @staticmethod
    def of(load: Load, on_lost: OnLost) -> DistributedGroup | None:
        """None for a model that one process has. Raises RanksFailed."""
        return (
            DistributedGroup(load, load.options.ranks, on_lost)
            if load.options.ranks is not None
            else None
        )

    def split(self, model: Any) -> None:
        """Leave rank 0's share of a model. Raises ValueError."""
        self._split = models.split(model, self._followers.group, self._wanted)

    def model(self, model: LoadedModel) -> LoadedModel:
        """The warm model, which from now on computes and draws on all ranks alike."""
        return LeaderModel.of(model, Agreement(self._followers.group).wrap, self._lead)

    def decoder(self, model: LoadedModel, max_batch: int, *, overlaps: bool) -> Decoder:
        return LeaderDecoder(model, max_batch, self._lead, overlaps=overlaps)

    def parts(self, model: LoadedModel) -> LeaderParts:
        """The KV of runs on all ranks. Waits until all have loaded."""
        rank = Rank(0, self._followers.group.size(), self._split)
        return LeaderParts(model, rank, self._lead, self._ranks.num_here)

    def disks(self) -> OtherDisks:
        """Those of the other ranks."""
        return OtherDisks(self._lead, are_away=not self._ranks.are_here)

    def leave(self) -> None:
        """Have the others end."""
        self._followers.leave()
