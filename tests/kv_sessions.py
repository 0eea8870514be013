"""One real model with real tiers over a real store, driven as the engine does, in this process."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from runtime.kv import parts
from runtime.kv.cursor import CacheCursor
from runtime.ranks import KvForm
from runtime.types import GenerateRequest, MissReason, ModelSpec, TokenPrompt
from runtime.worker import model as models
from runtime.worker.model import LoadedModel
from runtime.worker.scheduler import Scheduler
from runtime.worker.sequence import SequenceGroup
from store.block_names import HashChain
from store.keyed_names import Asker
from tests.kv_worker import MODEL, SECRET, KvWorker
from tests.waiting import PATIENCE_S

BLOCK_TOKENS = 16
SLICE_TOKENS = 32
REQUEST = GenerateRequest(request_id="r", model="m", prompt=TokenPrompt(token_ids=()))


def ids(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(10, 400), k=num_tokens)


FIRST, SAID, NEXT = ids(1, 100), ids(2, 20), ids(3, 30)
TURN_2 = [*FIRST, *SAID, *NEXT]


def load(path: Path, kv_bits: int | None = None, kv_start: int = 0) -> LoadedModel:
    nbytes = (path / "model.safetensors").stat().st_size
    spec = ModelSpec(
        id="m", path=str(path), context=4096, model_type="", nbytes=nbytes, created_s=1
    )
    return models.load(spec, lambda _: None, KvForm(kv_bits, kv_start=kv_start))


class Session(KvWorker):
    """`root` is None without a disk. Blocks of 16 tokens, slices of 32.

    Whoever closes it and makes another one of its root has restarted it.
    """

    def __init__(
        self,
        model: parts.Caches,
        root: Path | None = None,
        *,
        hot_bytes: int = 1 << 30,
        block_size: int = BLOCK_TOKENS,
    ) -> None:
        chain = HashChain(SECRET, MODEL, block_size=block_size)
        super().__init__(model, root, hot_bytes=hot_bytes, chain=chain)
        self.model = model
        self._grid = Scheduler(max_batch=1, max_slice=SLICE_TOKENS, block_s=1.0)

    def cursor(
        self, token_ids: Sequence[int], session: str | None = None, **fields: Any
    ) -> CacheCursor:
        cursor = CacheCursor(
            token_ids=list(token_ids),
            asker=Asker("m", session),
            after_deletion=self.number,
            **fields,
        )
        cursor.rename(self.chain)
        return cursor

    def take_up(self, cursor: CacheCursor) -> tuple[list[Any], int]:
        """Layer caches with what is known of a prompt, read from disk if need be."""
        self.tiers.begin(cursor)
        self.wait_for(cursor)
        kv, num_tokens = self.tiers.restore(cursor)
        self.check()
        return kv, num_tokens

    def wait_for(self, *cursors: CacheCursor) -> None:
        """Until what they need of the disk is read."""
        while any(cursor.is_waiting for cursor in cursors):
            self.hear()

    def hear(self) -> None:
        """Wait for one piece of news and take it in."""
        self.handle(self.inbox.get(timeout=PATIENCE_S))

    def compute(
        self, cursor: CacheCursor, kv: list[Any], start: int, *, keeps: bool = True
    ) -> dict[int, mx.array]:
        """Prefill all but the last token slice by slice; the logits by where their slice ends.

        What is known behind a lost piece is taken up as by the engine.
        """
        group = SequenceGroup(
            request=REQUEST,
            token_ids=[*cursor.token_ids],
            num_prompt_tokens=len(cursor.token_ids),
            max_tokens=1,
            deadline_s=0.0,
            cursor=cursor,
            num_computed_tokens=start,
        )
        logits: dict[int, mx.array] = {}
        while group.num_remaining_tokens or not logits:
            if keeps and self.tiers.knows_more(cursor, group.num_computed_tokens):
                num_had = group.num_computed_tokens
                kv[:], group.num_computed_tokens = self.tiers.restore(cursor, num_had=num_had)
                self.check()
            plan = self._grid.next_slice(group, 0)
            if plan.end == plan.start:
                logits[plan.end] = mx.zeros(0)
            else:
                logits[plan.end] = self.forward(cursor.token_ids[plan.start : plan.end], kv)
            group.num_computed_tokens = plan.end
            if keeps:
                seconds = 1.0 * (plan.end - plan.start)  # whatever is on disk is sooner read
                self.tiers.on_prefill(cursor, kv, (plan.start, plan.end), seconds)
                self.check()
        return logits

    def forward(self, token_ids: Sequence[int], kv: list[Any]) -> mx.array:
        assert isinstance(self.model, LoadedModel)
        if self.model.is_at_start(kv):
            self.model.quantise(kv)
        with mx.stream(self.model.stream):
            logits = self.model.model(mx.array(list(token_ids))[None], cache=kv)
            mx.eval(logits, [cache.state for cache in kv])
        return logits

    def answer(
        self, cursor: CacheCursor, kv: list[Any], output_ids: Sequence[int]
    ) -> list[mx.array]:
        """Decode: have the model say exactly these tokens and keep it all; the logits."""
        fed = [cursor.token_ids[-1], *output_ids]
        logits = [self.forward([token_id], kv) for token_id in fed]
        self.tiers.on_finished(cursor, output_ids, kv)
        self.check()
        return logits

    def turn(
        self, token_ids: Sequence[int], output_ids: Sequence[int], **fields: Any
    ) -> CacheCursor:
        """A whole request."""
        cursor = self.cursor(token_ids, **fields)
        kv, start = self.take_up(cursor)
        self.compute(cursor, kv, start)
        self.answer(cursor, kv, output_ids)
        return cursor

    def check(self) -> None:
        self.tiers.memory.check()

    def slot_of(self, token_ids: Sequence[int], number: int) -> Path:
        """The file of a block of these tokens."""
        assert self.root is not None
        name = self.chain.block_hashes(token_ids)[number]
        (path,) = self.root.rglob(f"{name.hex()}.safetensors")
        return path


def have_said(model: LoadedModel, root: Path) -> None:
    """One conversation of a prompt and its answer on disk."""
    session = Session(model, root)
    session.turn(FIRST, SAID)
    session.close()


@functools.lru_cache(maxsize=32)
def _plain_logits(model: parts.Caches, token_ids: tuple[int, ...]) -> mx.array:
    """What the model says after a prompt where there is no cache: each time the same."""
    return last_logits(Session(model), [*token_ids])


def last_logits(
    session: Session, token_ids: list[int], cursor: CacheCursor | None = None
) -> mx.array:
    """What the model says after a prompt; without a cursor nothing known is used."""
    cursor = cursor or session.cursor(token_ids, mode="off")
    kv, start = session.take_up(cursor)
    session.compute(cursor, kv, start)
    return session.forward(token_ids[-1:], kv)


def check_right(session: Session, token_ids: list[int]) -> CacheCursor:
    """A prompt is answered as without any cache; its cursor."""
    cursor = session.cursor(token_ids)
    said = last_logits(session, token_ids, cursor)
    expected = _plain_logits(session.model, tuple(token_ids))
    assert mx.allclose(said, expected, rtol=1e-4, atol=1e-5)
    session.check()
    return cursor


def reused(cursor: CacheCursor) -> tuple[int, str, MissReason | None]:
    return cursor.use.num_tokens, cursor.use.tier, cursor.use.reason
