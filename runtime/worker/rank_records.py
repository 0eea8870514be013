"""What rank 0 tells the other ranks of a model, and they answer: records in length-prefixed frames.

Every call that computes with the model, or that changes which KV is kept, is one record; the
others do the same with their shards, in the same order.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec

from runtime.kv.trail import Trail
from runtime.types import CacheMode, GenerateRequest
from runtime.wire import Forget, HotBudget, Load
from store.types import TtlClass

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 28


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a prompt hangs: what of its trail does not depend on the rank."""

    token_ids: list[int]
    block_hashes: list[bytes]
    root: bytes
    mode: CacheMode
    ttl_class: TtlClass
    ttl_s: float | None
    session_id: str | None
    prefix_end: int
    boundaries: tuple[int, ...]
    passing: frozenset[int]
    keeps: tuple[tuple[int, float], ...]

    @staticmethod
    def of(trail: Trail) -> Place:
        return msgspec.convert(trail, Place, from_attributes=True)

    def trail(self, limit: int | None = None) -> Trail:
        """A trail of one's own that takes up `limit` tokens at most."""
        return Trail(**msgspec.structs.asdict(self), limit=limit)


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first record: join the others and load your shard of this model."""

    load: Load


class Restore(msgspec.Struct, frozen=True, tag=True):
    """Fill new layer caches `kv` with at most `limit` tokens; answer with `Restored`."""

    kv: int
    place: Place
    limit: int


class Prefill(msgspec.Struct, frozen=True, tag=True):
    kv: int
    token_ids: list[int]


class Keep(msgspec.Struct, frozen=True, tag=True):
    """The slice `span` was computed in so many seconds."""

    kv: int
    span: tuple[int, int]
    seconds: float


class Finish(msgspec.Struct, frozen=True, tag=True):
    """A sequence ended with these caches."""

    kv: int
    place: Place
    output_ids: list[int]


class Pin(msgspec.Struct, frozen=True, tag=True):
    kv: int
    place: Place
    source: str


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that begins to decode; `number` names it from now on."""

    number: int
    index: int
    ends_at_eos: bool


class Insert(msgspec.Struct, frozen=True, tag=True):
    kv: int
    request: GenerateRequest
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    rows: list[Row]


class Take(msgspec.Struct, frozen=True, tag=True):
    """The sequence `row` leaves its batch; its layer caches are called `kv`."""

    row: int
    kv: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """One decode step of every lane."""


class Said(msgspec.Struct, frozen=True, tag=True):
    """What rank 0 has after a step: rows with their tokens; caches of the rows that ended."""

    tokens: list[tuple[int, int]]
    ended: list[tuple[int, int]]


class Free(msgspec.Struct, frozen=True, tag=True):
    """Nobody uses these layer caches any more."""

    kvs: list[int]


class News(msgspec.Struct, frozen=True, tag=True):
    """What the server said of memory."""

    news: HotBudget | Forget


Record = Begin | Restore | Prefill | Keep | Finish | Pin | Insert | Take | Step | Said | Free | News


class Joined(msgspec.Struct, frozen=True, tag=True):
    """A follower's first words; the token proves whose it is."""

    rank: int
    token: str


class Restored(msgspec.Struct, frozen=True, tag=True):
    num_tokens: int


class Broken(msgspec.Struct, frozen=True, tag=True):
    """This rank cannot go on."""

    message: str


Reply = Joined | Restored | Broken

_encode = msgspec.msgpack.Encoder().encode
_record = msgspec.msgpack.Decoder(Record)
_reply = msgspec.msgpack.Decoder(Reply)


class Channel:
    """One end of the connection between rank 0 and another rank. One thread reads."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, message: Record | Reply) -> None:
        """Raises OSError when the other end is gone."""
        payload = _encode(message)
        with self._lock:
            self._sock.sendall(_LENGTH.pack(len(payload)) + payload)

    def records(self) -> Iterator[Record]:
        """What rank 0 says, until it is gone. Raises msgspec.DecodeError."""
        return map(_record.decode, self._frames())

    def replies(self) -> Iterator[Reply]:
        """What a follower says, until it is gone. Raises msgspec.DecodeError."""
        return map(_reply.decode, self._frames())

    def close(self) -> None:
        """End it for both sides, also while another thread reads."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _frames(self) -> Iterator[bytes]:
        while (head := self._read(_LENGTH.size)) is not None:
            (size,) = _LENGTH.unpack(head)
            if size > MAX_FRAME_BYTES or (payload := self._read(size)) is None:
                return
            yield payload

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            try:
                piece = self._sock.recv(min(size - len(data), 1 << 18))
            except OSError:
                return None
            if not piece:
                return None
            data += piece
        return bytes(data)
