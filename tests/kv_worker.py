"""A worker's KV with real caches, files and threads, and the server's part of it with real heads.

There is no model: the KV of a token is a number that depends on all tokens up to it.
"""

from __future__ import annotations

import queue
import threading
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from migrations.run import upgrade
from runtime.kv import parts
from runtime.kv.cursor import CacheCursor
from runtime.kv.deletions import Deletions
from runtime.kv.reader import FilesRead, OnDisk, Reader
from runtime.kv.state import KvState
from runtime.kv.tiers import Disk, Tiers, folders
from runtime.kv.writer import AllowedBytes, Writer, Written
from runtime.kv_messages import (
    Allow,
    Allowance,
    Damaged,
    Drop,
    Ended,
    Kept,
    KvReport,
    Opened,
    Trouble,
)
from store.block_names import HashChain
from store.errors import SlotMissing
from store.heads import Heads, TurnedAway, Whom
from store.index import Index
from store.keyed_names import Asker, conversation_key
from store.opening import open_database
from store.slots import Slots
from tests.waiting import PATIENCE_S

BLOCK = 4
SECRET, MODEL = b"secret", b"m" * 16
CHAIN = HashChain(SECRET, MODEL, block_size=BLOCK)


class Caches:
    """What the tiers need of a loaded model."""

    kv_start = 0

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        self._make = make
        self.stream = mx.default_stream(mx.cpu)

    def new_kv(self, num_tokens: int = 0) -> list[Any]:
        return self._make()


PLAIN = Caches(lambda: [KVCache(), KVCache()])
STATEFUL = Caches(lambda: [ArraysCache(1), KVCache()])


def numbers(token_ids: Sequence[int]) -> list[int]:
    """The KV of each token."""
    found: list[int] = []
    last = b""
    for token_id in token_ids:
        last = blake2b(last + token_id.to_bytes(4, "little"), digest_size=16).digest()
        found.append(int.from_bytes(last[:2], "little") + 1)
    return found


def compute(kv: Sequence[Any], token_ids: Sequence[int], start: int, end: int) -> None:
    """Append the tokens `[start, end)` to caches that hold those before."""
    those = numbers(token_ids[:end])[start:]
    rows = mx.array(those, dtype=mx.float32).reshape(1, 1, -1, 1)
    for layer in kv:
        if isinstance(layer, KVCache):
            layer.update_and_fetch(rows, -rows)
        else:
            layer[0] = mx.array([[those[-1]]], dtype=mx.float32)


def check(kv: Sequence[Any], token_ids: Sequence[int], num_tokens: int) -> None:
    """The caches hold the first tokens, and nothing else."""
    those = numbers(token_ids[:num_tokens])
    for layer in kv:
        if isinstance(layer, KVCache):
            assert layer.offset == num_tokens
            if num_tokens:
                assert layer.keys is not None
                assert layer.values is not None
                assert layer.keys[0, 0, :num_tokens, 0].tolist() == those
                assert layer.values[0, 0, :num_tokens, 0].tolist() == [-one for one in those]
        elif num_tokens:
            assert layer[0].tolist() == [[those[-1]]]
        else:
            assert layer[0] is None


class Answered(NamedTuple):
    """All tokens of a request and its answer, and what was reused."""

    token_ids: list[int]
    cursor: CacheCursor

    @property
    def num_reused(self) -> int:
        return self.cursor.use.num_tokens


class MemoryHead(NamedTuple):
    """A head that is in a worker's memory only."""

    session: str | None
    names: frozenset[bytes]


class KvWorker:
    """One worker and its server. Without `root` there is no disk."""

    def __init__(
        self,
        model: parts.Caches = PLAIN,
        root: Path | None = None,
        *,
        hot_bytes: int = 1 << 20,
        slice_tokens: int = 3,
        chain: HashChain = CHAIN,
    ) -> None:
        self.root = root
        self.chain = chain
        self.slice_tokens = slice_tokens
        self.number = 0
        self.inbox: queue.SimpleQueue[OnDisk | FilesRead | Written | KvReport] = queue.SimpleQueue()
        self.memory_heads: dict[str, MemoryHead] = {}
        self.deleted: list[tuple[int, str]] = []
        """With their numbers."""
        self.num_open = 0
        self.damaged: list[bytes] = []
        self.num_ended = 0
        self.state = KvState.of(model, chain, hot_bytes)
        self.writer: Writer | None = None
        self.heads: Heads | None = None
        disk = self._disk(root) if root is not None else None
        self.tiers = Tiers(self.state, disk, Deletions(), self.inbox.put, checks=True)
        self.tiers.hear(Opened(model_hash=MODEL, secret=SECRET))
        self.state.model_hash = MODEL

    def _disk(self, root: Path) -> Disk:
        slots_at, heads_at = folders(root)
        self.slots = Slots(slots_at)
        root.mkdir(parents=True, exist_ok=True)
        self.database = database = open_database(root / "index.db", upgrade)
        now_s, index = database.clock.now_s, Index(database)
        self.heads = Heads(heads_at, self.slots, lambda _: self.chain, now_s, index)
        self.allowed = AllowedBytes(self._allow)
        self.reader = Reader(self.slots, heads_at, self.inbox.put, self.chain.block_size)
        writer = self.writer = Writer(
            self.slots, heads_at, 1 << 30, self.inbox.put, self.inbox.put, self.allowed
        )
        self.writing = threading.Thread(target=writer.run, name="writer", daemon=True)
        self.writing.start()
        return Disk(self.reader, writer, SECRET)

    def _allow(self, asked: Allow) -> None:
        threading.Thread(
            target=self.allowed.hear, args=(Allowance(num_bytes=asked.num_bytes),)
        ).start()

    # The server's part

    def handle(self, news: OnDisk | FilesRead | Written | KvReport) -> None:
        match news:
            case OnDisk() | FilesRead() | Written():
                self.tiers.hear(news)
            case Ended(path=None):
                self._told(news)
            case Ended():
                self._staged(news)
            case Damaged(names=names):
                self.damaged += names
            case Trouble(reason=reason):
                raise AssertionError(reason)
            case _:
                pass

    def _told(self, ended: Ended) -> None:
        token_ids = array("I", ended.token_ids)
        names = names_of(token_ids, ended.ends, self.chain.root_of(ended.tenant), self.chain)
        head = MemoryHead(ended.asker.session_id, names)
        deleted = [session for number, session in self.deleted if number > ended.received]
        if head.session in deleted:
            self.tiers.hear(Drop(number=0, names=tuple(names - self.names_in_use())))
            return
        self.memory_heads[ended.head_id] = head
        self.num_ended += 1

    def _staged(self, ended: Ended) -> None:
        assert self.heads is not None
        assert ended.path is not None
        try:
            published = self.heads.publish(Path(ended.path), ended.received, ended.ends)
        except SlotMissing:
            self.tiers.hear(Kept(head_id=ended.head_id, is_kept=False))
            return
        if isinstance(published, TurnedAway):
            self.tiers.hear(Kept(head_id=ended.head_id, is_kept=False))
            names = {one.name for one in published.gone} - self.names_in_use()
            self.tiers.hear(Drop(number=0, names=tuple(names)))
            return
        self.num_ended += 1
        lacking = tuple(one.name for one in published.lacking)
        self.tiers.hear(Kept(head_id=ended.head_id, is_kept=True, lacking=lacking))

    def names_in_use(self) -> set[bytes]:
        return {name for one in self.memory_heads.values() for name in one.names}

    def delete(self, session: str) -> None:
        """Delete a session."""
        self.settle()
        self.number += 1
        names: set[bytes] = set()
        for head_id in [i for i, one in self.memory_heads.items() if one.session == session]:
            names |= self.memory_heads.pop(head_id).names
        self.deleted.append((self.number, session))
        if self.heads is not None:
            key = conversation_key(SECRET, session)
            names |= {one.name for one in self.heads.delete(Whom(session=key))}
        names -= self.names_in_use()
        self.tiers.hear(Drop(number=self.number, names=tuple(names)))

    def settle(self) -> None:
        """All that was told is answered, and written but for ends."""
        while True:
            is_busy = self.writer is not None and self.writer.is_busy
            try:
                self.handle(self.inbox.get(timeout=0.01 if is_busy else 0.0))
            except queue.Empty:
                if not is_busy:
                    return

    def close(self) -> None:
        """Stop as a server stops: everything is written."""
        if self.writer is not None:
            while self.tiers.awaits_answers:
                self.handle(self.inbox.get(timeout=PATIENCE_S))
            self.writer.close()
            self.writing.join(PATIENCE_S)
            assert not self.writing.is_alive()
            self.reader.close()
        self.settle()
        if self.heads is not None:
            self.database.close()

    # A client's part

    def ask(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        session: str | None = None,
        **fields: Any,
    ) -> Answered:
        """One request from its arrival to the end of its answer; what is taken up is compared."""
        one = Request(self, prompt, answer, session, **fields)
        one.go_on(len(prompt))
        return one.finish()


class Request:
    """One that is computed slice by slice, while others are."""

    def __init__(
        self,
        worker: KvWorker,
        prompt: Sequence[int],
        answer: Sequence[int],
        session: str | None = None,
        **fields: Any,
    ) -> None:
        self.worker, self.tiers = worker, worker.tiers
        self.prompt, self.answer, self.session = list(prompt), answer, session
        self.cursor = cursor = CacheCursor(
            token_ids=list(prompt),
            asker=Asker("m", session),
            after_deletion=worker.number,
            **fields,
        )
        worker.num_open += 1
        self.tiers.set_idle(is_idle=False)
        self.tiers.begin(cursor)
        while cursor.is_waiting:
            worker.handle(worker.inbox.get(timeout=PATIENCE_S))
        self.kv, self.at = self.tiers.restore(cursor)
        check(self.kv, prompt, self.at)

    def go_on(self, num_slices: int) -> None:
        """Compute so many slices of the prompt, if there are as many."""
        last = len(self.prompt) - 1
        for _ in range(num_slices):
            if self.at >= last:
                return
            stops = (b for b in self.cursor.boundaries if b > self.at)
            end = min([self.at + self.worker.slice_tokens, last, *stops])
            compute(self.kv, self.prompt, self.at, end)
            self.tiers.on_prefill(self.cursor, self.kv, (self.at, end), 1.0 * (end - self.at))
            self.at = end
            if self.at < last and self.tiers.knows_more(self.cursor, self.at):
                self.kv, self.at = self.tiers.restore(self.cursor, num_had=self.at)
                check(self.kv, self.prompt, self.at)

    def finish(self) -> Answered:
        """Compute the rest and all of the answer."""
        self.go_on(len(self.prompt))
        said = [*self.prompt, *self.answer]
        compute(self.kv, said, len(self.prompt) - 1, len(said))
        self.tiers.on_finished(self.cursor, self.answer, self.kv)
        self.tiers.note_durable(self.cursor)
        self.tiers.release(self.cursor)
        self.worker.num_open -= 1
        self.tiers.set_idle(is_idle=not self.worker.num_open)
        return Answered(said, self.cursor)

    def leave(self) -> None:
        """Its client has gone."""
        self.tiers.on_interrupted(self.cursor, self.kv, self.at)
        self.tiers.release(self.cursor)
        self.worker.num_open -= 1
        self.tiers.set_idle(is_idle=not self.worker.num_open)


def names_of(
    token_ids: Sequence[int], ends: Sequence[int], root: bytes = b"", chain: HashChain = CHAIN
) -> frozenset[bytes]:
    """Those of its blocks, and of the ends at these positions."""
    cursor = CacheCursor(token_ids=token_ids, root=root)
    cursor.block_hashes = chain.block_hashes(token_ids, root=root)
    return frozenset({*cursor.block_hashes, *(cursor.name_at(chain, end) for end in ends)})
