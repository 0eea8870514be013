"""Message threads: turns that are kept, so that the next request sends only what is new.

They are stored as responses are. The first turn of a thread has its system prompt and tools before
its messages; of every turn its own messages are kept, then the answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar, cast

import msgspec
import structlog

from api.anthropic.schemas import (
    AnthropicBody,
    Content,
    ContentAnswer,
    CountRequest,
    InputMessage,
    ThreadField,
    ToolDefinition,
)
from api.http.body import LARGE_BYTES, apart
from api.http.chains import Chains, Owner
from api.http.expansion import Expansion, may_expand
from api.http.refusal import refuse
from runtime.errors import StoreUnavailable, ThreadNotFound, ThreadUnsupported
from runtime.keys import owned
from store.history.response_rows import ItemRow, ResponseRow

log = structlog.stdlib.get_logger("hearth.threads")

R = TypeVar("R", bound=CountRequest)

KIND = "msg_"
_HOLD_BLOCKS = ("content", "source")
_NOTHING = b"{}"


class _Beginning(AnthropicBody):
    """The system prompt and tools of the request that created a thread."""

    system: Content | None = None
    tools: list[ToolDefinition] | None = None


class Resumed(NamedTuple, Generic[R]):
    """A request with all that its thread remembers before its own messages."""

    whole: R
    num_stored: int = 0
    """Messages that were not sent with it."""
    num_bytes: int = 0
    """They take as long to read as a body of so many bytes."""


class Threads:
    """The threads of a server; ids of turns are those of their answers."""

    def __init__(self, chains: Chains) -> None:
        self._chains = chains
        self.comparisons = chains.comparisons

    async def resumed(self, data: R, tenant: str, expansion: Expansion) -> Resumed[R]:
        """The request with what its thread remembers before its messages.

        Raises:
            InvalidRequest: a field does not go with a thread, or what it stands for is too much.
            ThreadNotFound: the turn that it continues is not stored, or not all before it is.
            ThreadUnsupported: nothing can be stored or read now; who sends all of it is answered.
        """
        if data.thread is None:
            return Resumed(data)
        check(data.thread, data)
        try:
            if data.thread.type == "create":
                await self._chains.history.read(lambda _: None)
                return Resumed(data)
            previous_id = owned(tenant, data.thread.previous_message_id or "")
            path = "thread.previous_message_id"
            chain = await self._chains.past(previous_id, KIND, expansion, path)
        except StoreUnavailable as error:
            raise ThreadUnsupported(error.message) from error
        if chain.missing is not None or not chain.items:
            raise ThreadNotFound(data.thread.previous_message_id or "", self._chains.history.note)
        bodies = [row.body for row in chain.items]
        weight = sum(LARGE_BYTES if may_expand(body) else len(body) for body in bodies)
        whole = await apart(weight, lambda: _whole(data, bodies))
        return Resumed(whole, len(bodies) - 1, weight)

    async def keep(
        self,
        message_id: str,
        data: CountRequest,
        answer: Sequence[ContentAnswer],
        asker: Owner,
    ) -> bool:
        """Store a turn of a thread; `data` is the request as it was sent. False where it cannot be
        stored: the next request is told that the thread is not found, and its client sends all.
        """
        assert data.thread is not None
        previous_id = data.thread.previous_message_id if data.thread.type == "continue" else None
        row = ResponseRow(
            id=owned(asker.tenant, message_id),
            previous_id=owned(asker.tenant, previous_id) if previous_id is not None else None,
            body=_NOTHING,
            created_s=time.time(),
            session=asker.session,
        )
        try:
            items = await apart(LARGE_BYTES, lambda: _items(data, answer))
            await self._chains.keep(row, items, asker.received)
        except StoreUnavailable as error:
            log.warning("thread_not_stored", reason=error.message)
            return False
        return True

    async def remove(self, tenant: str, message_id: str) -> None:
        """Delete the whole thread that a message is in; no byte of it is left.

        Raises:
            ThreadNotFound: it is not stored.
            StoreUnavailable: it could not be deleted.
        """
        if not await self._chains.remove(owned(tenant, message_id), KIND, is_whole_chain=True):
            raise ThreadNotFound(message_id, self._chains.history.note, "message_id")


def check(thread: ThreadField, data: CountRequest) -> None:
    """Raises InvalidRequest where the field is malformed, or others do not go with it."""
    if thread.type not in ("create", "continue"):
        refuse("thread.type", f"is {thread.type[:64]!r}: use 'create' or 'continue'.")
    if thread.type == "create":
        if thread.previous_message_id is not None:
            refuse("thread.previous_message_id", "goes with 'continue' only: leave it out.")
        return
    if not thread.previous_message_id:
        refuse("thread.previous_message_id", "is missing: give the id of the answer to go on from.")
    for name, value in (("system", data.system), ("tools", data.tools)):
        if value is not None:
            refuse(
                name,
                "is kept from the request that created the thread: leave it out, or send the whole "
                'conversation with `thread: {"type": "create"}` to change it.',
            )


def _whole(data: R, bodies: Sequence[bytes]) -> R:
    beginning = msgspec.json.decode(bodies[0], type=_Beginning)
    past = [msgspec.json.decode(body, type=InputMessage) for body in bodies[1:]]
    return msgspec.structs.replace(
        data,
        system=beginning.system,
        tools=beginning.tools,
        messages=[*past, *data.messages],
    )


def _items(data: CountRequest, answer: Sequence[ContentAnswer]) -> list[ItemRow]:
    encode = msgspec.json.encode
    given = [encode(_unmarked(msgspec.json.decode(encode(one)))) for one in data.messages]
    if data.thread is not None and data.thread.type == "create":
        given.insert(0, encode(_Beginning(data.system, data.tools)))
    rows = [ItemRow("", body, is_output=False) for body in given]
    if answer:  # an answer without anything is none: the turn before it is gone on with
        body = encode({"role": "assistant", "content": answer})
        rows.append(ItemRow("", body, is_output=True))
    return rows


def _unmarked(value: object) -> object:
    """Without `cache_control`, which was for its own turn: a request takes only a few of them."""
    if isinstance(value, list):
        return [_unmarked(one) for one in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    return {
        name: _unmarked(one) if name in _HOLD_BLOCKS else one
        for name, one in cast("dict[str, object]", value).items()
        if name != "cache_control"
    }
