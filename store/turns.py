"""Generated turns of a conversation, as its head keeps them beside its tokens.

Who comes back with a conversation is read the very tokens that were generated, however its client
writes them. A turn is found by what names the conversation up to its end, or to its question. Its
tokens are those of the head; of what the head lacks, as the last token of an answer, it has a copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, NamedTuple

import msgspec

from store.block_names import num_common

DIGEST_BYTES = 16
_TOKEN_BYTES = 4
_MOST_REST = 256
"""A head that lacks more tokens of a turn does not have it: it ends before."""


_MOST_BYTES = 8 << 20
"""What takes more, as very many sets of tools do, is not kept: no file has so large a front."""


class Turn(msgspec.Struct, frozen=True, dict=True):
    """A generated turn: the tokens from `start`, where its parent turn ends, to its own end.

    `key` names the conversation up to it, `parent` is its parent's `id`. `ends` are positions at
    which messages end, `prefix_end` where tools and system prompt do. `thoughts` names what was
    thought before the answer. Asked with tools, it has these packed in `tools`, unless they are
    its parent's, and `bare` names the conversation up to it whatever its tools are. `asked` names
    the conversation up to its question, and the answer begins at token `said_at`. An answer that
    was cut inside of thoughts or of a call has no key: only what comes before may be gone on from.
    A `summary` is no turn, but what stands for several; it is kept as they are, under its own key.
    """

    key: bytes
    parent: bytes
    start: int
    token_ids: bytes
    ends: tuple[int, ...] = ()
    prefix_end: int = 0
    thoughts: bytes = b""
    bare: bytes = b""
    tools: bytes = b""
    summary: str = ""
    asked: bytes = b""
    said_at: int = 0

    @cached_property
    def id(self) -> bytes:
        """Names this turn among all that may have the same key: by all of its tokens."""
        hashed = blake2b(self.key + self.parent, digest_size=DIGEST_BYTES)
        hashed.update(self.start.to_bytes(8) + self.token_ids)
        return hashed.digest()

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids) // _TOKEN_BYTES


class Said(NamedTuple):
    """What a head says of its conversation: turns of ours in a row, from its first token on.

    `beginning` names how one without a session id began, up to the first answer. `summary` stands
    for what its client says before the first of these turns.
    """

    turns: tuple[Turn, ...] = ()
    beginning: bytes = b""
    summary: Turn | None = None


NOTHING_SAID = Said()

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Mark(msgspec.Struct, frozen=True, array_like=True):
    """A turn within a head: its first `num_tokens` are the head's, `rest` are the others."""

    key: bytes
    num_tokens: _Count
    rest: bytes
    ends: tuple[int, ...]
    prefix_end: _Count
    thoughts: bytes
    bare: bytes
    tools: bytes
    asked: bytes
    said_at: _Count


class _Summary(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    token_ids: bytes
    text: str


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    marks: tuple[_Mark, ...]
    beginning: bytes
    summary: _Summary | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Packed).decode


def packed(said: Said, token_ids: Sequence[int]) -> bytes:
    """What a head of these tokens keeps of that, as far as it goes; nothing where it is nothing."""
    own, marks = array("I", token_ids), [*_marks(said.turns, array("I", token_ids))]
    summary = None
    if said.summary is not None:
        summary = _Summary(said.summary.key, said.summary.token_ids, said.summary.summary)
    if not (own and (marks or said.beginning or summary)):
        return b""
    data = _encode(_Packed(tuple(marks), said.beginning, summary))
    return data if len(data) <= _MOST_BYTES else b""


def _marks(turns: Iterable[Turn], own: array[int]) -> Iterator[_Mark]:
    for one in turns:
        token_ids = array("I", one.token_ids)
        num_same = num_common(own[one.start : one.end], token_ids)
        rest = token_ids[num_same:]
        if not num_same or len(rest) > _MOST_REST:
            return
        yield _Mark(
            one.key,
            num_same,
            rest.tobytes(),
            one.ends,
            one.prefix_end,
            one.thoughts,
            one.bare,
            one.tools,
            one.asked,
            one.said_at,
        )


def unpacked(data: bytes, token_ids: Sequence[int]) -> Said:
    """What a head of these tokens keeps; nothing of what cannot be read."""
    if (kept := _read(data)) is None:
        return NOTHING_SAID
    turns: list[Turn] = []
    start, parent = 0, b""
    for mark in kept.marks:
        own = array("I", token_ids[start : start + mark.num_tokens])
        if len(own) < mark.num_tokens or len(mark.rest) % _TOKEN_BYTES:
            break
        turn = Turn(
            mark.key,
            parent,
            start,
            own.tobytes() + mark.rest,
            mark.ends,
            mark.prefix_end,
            mark.thoughts,
            mark.bare,
            mark.tools,
            "",
            mark.asked,
            mark.said_at,
        )
        turns.append(turn)
        start, parent = turn.end, turn.id
    summary = kept.summary
    if summary is not None:
        return Said(tuple(turns), kept.beginning, summary_of(*msgspec.structs.astuple(summary)))
    return Said(tuple(turns), kept.beginning)


def summary_of(key: bytes, token_ids: bytes, text: str) -> Turn:
    """A summary, as it is kept."""
    return Turn(key, b"", 0, token_ids, summary=text)


def cut(data: bytes, end: int) -> bytes:
    """What the first `end` tokens of a head keep of what it does."""
    if (kept := _read(data)) is None:
        return b""
    start, marks = 0, list[_Mark]()
    for mark in kept.marks:
        if start + mark.num_tokens > end:
            break
        marks.append(mark)
        start += mark.num_tokens + len(mark.rest) // _TOKEN_BYTES
    return _encode(_Packed(tuple(marks), kept.beginning, kept.summary))


def digests_of(data: bytes) -> list[bytes]:
    """By what a head is found: what names its conversation at each of its turns."""
    if (kept := _read(data)) is None:
        return []
    named = [name for one in kept.marks for name in (one.key, one.bare, one.asked)]
    if kept.summary is not None:
        named.append(kept.summary.key)
    return [*dict.fromkeys(one for one in named if len(one) == DIGEST_BYTES)]


def num_turns(data: bytes) -> int:
    """How many turns a head keeps."""
    return len(kept.marks) if (kept := _read(data)) is not None else 0


_encode_row = msgspec.msgpack.Encoder().encode
_decode_row = msgspec.msgpack.Decoder(tuple[Turn, ...]).decode


def pack_row(turns: tuple[Turn, ...]) -> bytes:
    """Turns in a row with all their tokens; nothing without any."""
    return _encode_row(turns) if turns else b""


def unpack_row(data: bytes) -> tuple[Turn, ...]:
    """What `pack_row` was given. Raises msgspec.MsgspecError."""
    return _decode_row(data) if data else ()


def _read(data: bytes) -> _Packed | None:
    try:
        return _decode(data) if data else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
