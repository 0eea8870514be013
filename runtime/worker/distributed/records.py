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

from runtime.kv.others import Span
from runtime.kv.pack import Which
from runtime.kv.parts import Span as Cutting
from runtime.types import GenerateRequest
from runtime.wire import Load
from store.slots import BlockKey

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 28


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first record: join the others and load your shard of this model."""

    load: Load


class NewKv(msgspec.Struct, frozen=True, tag=True):
    """Empty layer caches, to be called `kv`."""

    kv: int


class Cut(msgspec.Struct, frozen=True, tag=True):
    """Keep these spans of the layer caches `kv` as runs of these numbers."""

    kv: int
    spans: list[Cutting]
    runs: list[int]


class Dress(msgspec.Struct, frozen=True, tag=True):
    """Call `run` what `of` is with the state of `state_of`, or with None without its state."""

    run: int
    of: int
    state_of: int | None = None


class Assemble(msgspec.Struct, frozen=True, tag=True):
    """Fill the layer caches `kv` with these runs, each up to its number of tokens."""

    kv: int
    pieces: list[tuple[int, int]]
    num_room: int


class Have(msgspec.Struct, frozen=True, tag=True):
    """Which of these names have you files of? Answer for each with a byte in `Answer.found`."""

    ask: int
    model: bytes
    names: list[bytes]


class HaveAny(msgspec.Struct, frozen=True, tag=True):
    """Of which names of a model have you files? They are answered one after the other."""

    ask: int
    model: bytes


class Read(msgspec.Struct, frozen=True, tag=True):
    """Load your part of a slot, or of a file of states, as `run`; `Answer` says whether."""

    ask: int
    run: int
    key: BlockKey
    span: Span


class Write(msgspec.Struct, frozen=True, tag=True):
    """Write `which` of your part of a run that begins at `start` as a slot of these tokens, or
    without any as states; `Answer` says whether.
    """

    ask: int
    run: int
    which: Which
    start: int
    key: BlockKey
    token_ids: list[int] | None
    recompute_ms: float


class Sync(msgspec.Struct, frozen=True, tag=True):
    """Make durable what you wrote of a model; `Answer` says whether."""

    ask: int
    model: bytes


class Remove(msgspec.Struct, frozen=True, tag=True):
    """Have no files of these names. Nobody waits for that."""

    model: bytes
    names: list[bytes]


class GiveBack(msgspec.Struct, frozen=True, tag=True):
    """What was freed is not needed again soon."""


class Prefill(msgspec.Struct, frozen=True, tag=True):
    kv: int
    token_ids: list[int]


class Score(msgspec.Struct, frozen=True, tag=True):
    """Prefill, and compute the logits as well, which takes all ranks."""

    kv: int
    token_ids: list[int]
    following: list[int]
    num_top: int


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that begins to decode; `number` names it from now on.

    `said` are the tokens of its answer up to now: they count towards its longest length, its draws
    and its penalties where it is taken up again.
    """

    number: int
    index: int
    ends_at_eos: bool
    said: list[int]


class Insert(msgspec.Struct, frozen=True, tag=True):
    kv: int
    request: GenerateRequest
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    rows: list[Row]
    takes: bool


class Take(msgspec.Struct, frozen=True, tag=True):
    """The sequence `row` leaves its batch; its layer caches are called `kv`."""

    row: int
    kv: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """One decode step of every batch."""


class Said(msgspec.Struct, frozen=True, tag=True):
    """What rank 0 has after a step: rows with their tokens; caches of the rows that ended."""

    tokens: list[tuple[int, int]]
    ended: list[tuple[int, int]]


class Free(msgspec.Struct, frozen=True, tag=True):
    """Nobody uses these layer caches and runs any more."""

    numbers: list[int]


Computed = (
    Begin
    | NewKv
    | Prefill
    | Score
    | Insert
    | Take
    | Step
    | Said
    | Cut
    | Dress
    | Assemble
    | Write
    | GiveBack
    | Free
)
"""What is done in the order in which it is told."""

DiskRecord = Have | HaveAny | Read | Sync | Remove
"""What does not wait for what is computed."""

Record = Computed | DiskRecord

Question = Have | HaveAny | Read | Write | Sync
"""What is answered; who asks it of all leaves `ask` to `Followers`."""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """A follower's first words; the token proves whose it is."""

    rank: int
    token: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The shard is loaded; what its layer caches are like."""

    needs_state: bool
    unsupported: str | None


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What was asked under this number is done, with what was found, or why not: a reason of
    `store.errors`, and words.
    """

    ask: int
    failure: str | None = None
    message: str = ""
    found: bytes = b""


class Broken(msgspec.Struct, frozen=True, tag=True):
    """This rank cannot go on."""

    message: str


Reply = Joined | Loaded | Answer | Broken

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
