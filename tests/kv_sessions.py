"""One model with real tiers over a real store, driven as the engine does, in this process."""

from __future__ import annotations

import functools
import queue
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from runtime.kv.cursor import CacheCursor
from runtime.kv.reader import SlotRead, SlotReader
from runtime.kv.state import Caches, TierState
from runtime.kv.tiers import Tiers
from runtime.kv.writer import SlotWriter, WriteFailed, WriteJob
from runtime.ranks import KvForm
from runtime.slot_events import Forget, KnownSlot, KvReport, SlotQueued, SlotsLeft
from runtime.types import GenerateRequest, MissReason, ModelSpec, TokenPrompt
from runtime.worker import model as models
from runtime.worker.model import LoadedModel
from runtime.worker.scheduler import Scheduler
from runtime.worker.sequence import SequenceGroup
from store import slots
from store.block_names import HashChain
from store.slots import StagedSlot
from store.types import SlotHeader
from tests.waiting import PATIENCE_S

BLOCK_TOKENS = 16
SLICE_TOKENS = 32
_REQUEST = GenerateRequest(request_id="r", model="m", prompt=TokenPrompt(token_ids=()))


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


def known(header: SlotHeader, **changes: Any) -> KnownSlot:
    """What the server says of a slot with this header."""
    fields: dict[str, Any] = {"tier": "warm", "disk_bytes": 4096, "last_used_s": 1.0, "hits": 0.0}
    fields["parent"] = None
    fields |= {
        name: getattr(header, name)
        for name in KnownSlot.__struct_fields__
        if name in SlotHeader.__struct_fields__
    }
    return KnownSlot(**fields | changes)


class Session:
    """`root` is None without a disk. Slices of 32 tokens."""

    def __init__(
        self,
        model: Caches,
        root: Path | None = None,
        *,
        hot_bytes: int = 1 << 30,
        block_size: int = BLOCK_TOKENS,
        secret: bytes = b"secret",
    ) -> None:
        self.model = model
        self.root = root
        self.chain = HashChain(secret, b"model", block_size=block_size)
        self.news: queue.SimpleQueue[SlotRead | WriteFailed] = queue.SimpleQueue()
        self.reports: list[KvReport] = []
        self.noted: list[SlotQueued | SlotsLeft] = []
        self.written: list[tuple[WriteJob, StagedSlot]] = []
        self._num_staged = threading.Semaphore(0)
        self.writer: SlotWriter | None = None
        self.reader: SlotReader | None = None
        if root is not None:
            self.writer = SlotWriter(root, 1 << 30, self._on_staged, self.news.put, num_threads=1)
            self.writer.set_idle(is_idle=True)
            self._writing = threading.Thread(target=self.writer.run, daemon=True)
            self._writing.start()
            self.reader = SlotReader(root, self.news.put)
        self.tier_state = TierState.of(model, self.chain, b"model", hot_bytes)
        self.tiers = Tiers(self.tier_state, self.writer, self.reader, self._on_report)
        self._grid = Scheduler(max_batch=1, max_slice=SLICE_TOKENS, block_s=1.0)

    def cursor(self, token_ids: Sequence[int], **fields: Any) -> CacheCursor:
        cursor = CacheCursor(token_ids=list(token_ids), **fields)
        cursor.rename(self.tier_state.chain)
        return cursor

    def take_up(self, cursor: CacheCursor) -> tuple[list[Any], int]:
        """Layer caches with what is known of a prompt, read from disk if need be."""
        self.tiers.begin(cursor)
        while cursor.is_waiting:
            self.hear()
        kv, num_tokens = self.tiers.restore(cursor)
        self.check()
        return kv, num_tokens

    def hear(self) -> None:
        """Wait for one piece of news and take it in."""
        one = self.news.get(timeout=PATIENCE_S)
        if isinstance(one, SlotRead):
            self.tiers.hear(one)
        else:
            self.tiers.on_write_failed(one)

    def forget(self, news: Forget) -> None:
        """As a worker does: who hears of a deletion first adds it."""
        self.tier_state.deletions.add(news)
        self.tiers.hear(news)

    def compute(
        self, cursor: CacheCursor, kv: list[Any], start: int, *, keeps: bool = True
    ) -> dict[int, mx.array]:
        """Prefill all but the last token slice by slice; the logits by where their slice ends.

        What is known behind a lost piece is taken up as by the engine.
        """
        group = SequenceGroup(
            request=_REQUEST,
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
                self.tiers.on_prefill(cursor, kv, (plan.start, plan.end), 0.001)
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

    def _on_report(self, report: KvReport) -> None:
        if isinstance(report, SlotQueued | SlotsLeft):
            self.noted.append(report)
        else:
            self.reports.append(report)

    def _on_staged(self, job: WriteJob, staged: StagedSlot) -> None:
        self.written.append((job, staged))
        self._num_staged.release()

    def wait_until_written(self) -> None:
        """Wait until every run that is not in memory only is staged."""
        runs = [run for run in self.tiers.hot.tree if self.tiers.hot[run].is_written]
        unsaved = [run for run in runs if not self.tiers.hot[run].is_saved]
        while len(self.written) < len(unsaved):
            assert self._num_staged.acquire(timeout=PATIENCE_S)

    def check(self) -> None:
        self.tiers.hot.integrity_check()

    def finish(self) -> list[tuple[WriteJob, StagedSlot]]:
        """Write what is queued and close the writer; all that was staged."""
        assert self.writer is not None
        self.writer.close()
        self._writing.join(PATIENCE_S)
        return self.written

    def close(self) -> None:
        """Leave no thread."""
        self.finish()
        assert self.reader is not None
        self.reader.close()

    def publish(self) -> list[KnownSlot]:
        """Finish and publish; what the index then knows."""
        written = self.finish()
        slots.publish_all([staged for _, staged in written])
        return [known(job.header, parent=job.parent) for job, _ in written]


class Stored:
    """One conversation of a prompt and its answer on disk: a slot of each."""

    def __init__(self, model: LoadedModel, root: Path) -> None:
        self.model, self.root = model, root
        session = Session(model, root)
        session.turn(FIRST, SAID)
        self.known = session.publish()
        self.prompt, self.answer = self.known

    def session(self, **fields: Any) -> Session:
        session = Session(self.model, self.root, **fields)
        session.tiers.learn(self.known)
        return session


@functools.lru_cache(maxsize=32)
def _plain_logits(model: Caches, token_ids: tuple[int, ...]) -> mx.array:
    """What the model says after a prompt where there is no cache: each time the same."""
    return last_logits(Session(model), [*token_ids])


def last_logits(
    session: Session, token_ids: list[int], cursor: CacheCursor | None = None
) -> mx.array:
    """What the model says after a prompt; without a trail nothing known is used."""
    cursor = cursor or session.cursor(token_ids, mode="off")
    kv, start = session.take_up(cursor)
    session.compute(cursor, kv, start)
    return session.forward(token_ids[-1:], kv)


def check_right(session: Session, token_ids: list[int]) -> CacheCursor:
    """A prompt is answered as without any cache; its trail."""
    cursor = session.cursor(token_ids)
    said = last_logits(session, token_ids, cursor)
    expected = _plain_logits(session.model, tuple(token_ids))
    assert mx.allclose(said, expected, rtol=1e-4, atol=1e-5)
    session.check()
    return cursor


def reused(cursor: CacheCursor) -> tuple[int, str, MissReason | None]:
    return cursor.use.num_tokens, cursor.use.tier, cursor.use.reason
