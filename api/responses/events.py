"""The output of a response while it is made: chunks in, items and their stream events out.

The same writer makes answers that are not streamed, so both say the same.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from typing_extensions import override

from api.openai.fields import Body
from api.openai.frame import token_entry
from api.openai.freeform import INPUT
from api.openai.schemas import TokenEntry
from api.responses.client_calls import ID_KINDS, client_call, is_patch_known
from api.responses.client_tools import ClientKind
from api.responses.compaction import new_compaction_id, sealed_summary
from api.responses.items import Item, seal
from api.responses.json_texts import JsonTexts, Path, TextPiece
from api.responses.output import (
    ItemStatus,
    OutputCall,
    OutputCompaction,
    OutputCustomCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    SummaryText,
)
from api.responses.tools import ToolNames, ToolRef
from runtime.errors import NoSummary
from runtime.types import (
    Chunk,
    Finished,
    ReasoningDelta,
    TextDelta,
    TextWasReasoning,
    ToolCallDelta,
)


class ItemEvent(Body):
    type: str
    output_index: int
    item: OutputItem


class PieceEvent(Body):
    """An event inside an item; of the indices and values only those of its type are there."""

    type: str
    item_id: str | UnsetType
    output_index: int
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | SummaryText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    command_index: int | UnsetType = UNSET
    command: str | UnsetType = UNSET
    diff: str | UnsetType = UNSET
    logprobs: list[TokenEntry] | UnsetType = UNSET


Event = ItemEvent | PieceEvent

_COMMAND = "response.shell_call_command"
_DIFF = "response.apply_patch_call_operation_diff"


class Shape(NamedTuple):
    """What the request wants of its output beside the text."""

    names: ToolNames
    has_summary: bool = False
    is_sealed: bool = False


class ItemWriter(Protocol):
    """Makes items and their events of the chunks of an answer's one choice."""

    items: list[OutputItem]
    finished: Finished | None

    def add(self, chunk: Chunk) -> list[Event]: ...


class _OpenItem(Protocol):
    """An item that is being written; until it `is_known`, nothing is told of it."""

    @property
    def is_known(self) -> bool: ...
    def item(self, status: ItemStatus) -> OutputItem: ...
    def opening(self, at: int) -> list[PieceEvent]: ...
    def add(self, chunk: Chunk, at: int) -> list[PieceEvent]: ...
    def closing(self, at: int) -> list[PieceEvent]: ...
    def takes(self, chunk: Chunk) -> bool: ...


class OutputWriter:
    """Give it every chunk of the answer's one choice; `items` are those that are closed."""

    def __init__(self, shape: Shape, items: list[OutputItem] | None = None) -> None:
        self.items: list[OutputItem] = [] if items is None else items
        self.finished: Finished | None = None
        self._shape = shape
        self._open: _OpenItem | None = None
        self._is_told = False

    def add(self, chunk: Chunk) -> list[Event]:
        """What is to be told of a chunk, in order."""
        match chunk:
            case Finished():
                self.finished = chunk
                return self._close("incomplete" if chunk.reason == "length" else "completed")
            case TextDelta() | ReasoningDelta() if not chunk.text:
                return []
            case TextDelta() | ReasoningDelta() | ToolCallDelta():
                return self._write(chunk)
            case _:
                return []

    def _write(self, chunk: TextDelta | ReasoningDelta | ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if self._open is None or not self._open.takes(chunk):
            events += self._close("completed")
            self._open = self._opened(chunk)
        at = len(self.items)
        told = self._open.add(chunk, at)
        if self._open.is_known:
            events += self._added(self._open, at)
        return [*events, *told]

    def _added(self, item: _OpenItem, at: int) -> list[Event]:
        """What is told first of an item, once."""
        if self._is_told:
            return []
        self._is_told = True
        added = ItemEvent("response.output_item.added", at, item.item("in_progress"))
        return [added, *item.opening(at)]

    def _opened(self, chunk: TextDelta | ReasoningDelta | ToolCallDelta) -> _OpenItem:
        match chunk:
            case TextDelta():
                return _Message()
            case ReasoningDelta():
                return _Summary(self._shape) if self._shape.has_summary else _Thoughts(self._shape)
            case ToolCallDelta():
                ref = self._shape.names.ref(chunk.name or "")
                call_id = chunk.id or _new_id("call")
                return _kind_of_call(ref)(ref, call_id)

    def _close(self, status: ItemStatus) -> list[Event]:
        if self._open is None:
            return []
        at = len(self.items)
        item = self._open.item(status)
        events = [*self._added(self._open, at), *self._open.closing(at)]
        events.append(ItemEvent("response.output_item.done", at, item))
        self.items.append(item)
        self._open = None
        self._is_told = False
        return events


class SummaryWriter:
    """The same for a summary: whatever is thought beside it, one compaction item is told."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self.finished: Finished | None = None
        self._id = new_compaction_id()
        self._texts: list[str] = []
        self._is_open = False

    @property
    def summary(self) -> str:
        return "".join(self._texts).strip()

    def add(self, chunk: Chunk) -> list[Event]:
        """What is to be told of a chunk, in order.

        Raises:
            NoSummary: the answer is over and says nothing.
        """
        match chunk:
            case TextDelta(text=text) if text:
                self._texts.append(text)
                if self._is_open or not text.strip():
                    return []
                self._is_open = True
                return self._opening()
            case TextWasReasoning():
                self._texts.clear()
                return []
            case Finished():
                self.finished = chunk
                if not self.summary:
                    raise NoSummary
                item = OutputCompaction(self._id, sealed_summary(self.summary))
                self.items.append(item)
                return [ItemEvent("response.output_item.done", 0, item)]
            case _:
                return []

    def _opening(self) -> list[Event]:
        item = OutputCompaction(self._id, "")
        added = ItemEvent("response.output_item.added", 0, item)
        return [added, PieceEvent("response.compaction.compacting", self._id, 0)]


class SummaryThenAnswerWriter:
    """A summary, where there is one, and behind it the answer that goes on from it."""

    def __init__(self, shape: Shape) -> None:
        self._summary = SummaryWriter()
        self._answer = OutputWriter(shape, self._summary.items)
        self.items = self._summary.items
        self.finished: Finished | None = None

    def add(self, chunk: Chunk) -> list[Event]:
        """What is to be told of a chunk, in order."""
        if self._summary.finished is None:
            with suppress(NoSummary):  # then the answer goes on from the whole conversation
                return self._summary.add(chunk)
            return []
        events = self._answer.add(chunk)
        self.finished = self._answer.finished
        return events


def raw_items(writer: ItemWriter) -> list[msgspec.Raw]:
    """The closed items as they stand in the response."""
    return [written_item(item).raw for item in writer.items]


def written_item(item: OutputItem) -> Item:
    """An item of the answer as the next request brings it."""
    return Item(msgspec.Raw(msgspec.json.encode(item)), "output")


def _kind_of_call(ref: ToolRef) -> type[_Call]:
    match ref.client:
        case None:
            return _CustomCall if ref.is_custom else _Call
        case "shell":
            return _ShellCall
        case "apply_patch":
            return _PatchCall
        case _:
            return _ClientCall


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


class _Message:
    """The answer's text."""

    is_known = True

    def __init__(self) -> None:
        self._id = _new_id("msg")
        self._texts: list[str] = []
        self._logprobs: list[TokenEntry] = []

    def takes(self, chunk: Chunk) -> bool:
        return isinstance(chunk, TextDelta)

    def item(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(self._id, status, [] if status == "in_progress" else [self._part()])

    def opening(self, at: int) -> list[PieceEvent]:
        kind = "response.content_part.added"
        return [PieceEvent(kind, self._id, at, content_index=0, part=OutputText(""))]

    def add(self, chunk: Chunk, at: int) -> list[PieceEvent]:
        assert isinstance(chunk, TextDelta)
        logprobs = [token_entry(entry) for entry in chunk.logprobs]
        self._texts.append(chunk.text)
        self._logprobs += logprobs
        kind = "response.output_text.delta"
        delta = PieceEvent(kind, self._id, at, content_index=0, delta=chunk.text, logprobs=logprobs)
        return [delta]

    def closing(self, at: int) -> list[PieceEvent]:
        part = self._part()
        kind, end = "response.output_text.done", "response.content_part.done"
        done = PieceEvent(
            kind, self._id, at, content_index=0, text=part.text, logprobs=part.logprobs
        )
        return [done, PieceEvent(end, self._id, at, content_index=0, part=part)]

    def _part(self) -> OutputText:
        return OutputText("".join(self._texts), list(self._logprobs))


class _Thoughts:
    """What the model thinks, as it is."""

    is_known = True

    def __init__(self, shape: Shape) -> None:
        self._id = _new_id("rs")
        self._texts: list[str] = []
        self._is_sealed = shape.is_sealed

    def takes(self, chunk: Chunk) -> bool:
        return isinstance(chunk, ReasoningDelta)

    def item(self, status: ItemStatus) -> OutputReasoning:
        is_open = status == "in_progress"
        content = [] if is_open else [ReasoningText("".join(self._texts))]
        return OutputReasoning(self._id, status, [], content, self._sealed(status))

    def opening(self, at: int) -> list[PieceEvent]:
        kind = "response.content_part.added"
        return [PieceEvent(kind, self._id, at, content_index=0, part=ReasoningText(""))]

    def add(self, chunk: Chunk, at: int) -> list[PieceEvent]:
        assert isinstance(chunk, ReasoningDelta)
        self._texts.append(chunk.text)
        kind = "response.reasoning_text.delta"
        return [PieceEvent(kind, self._id, at, content_index=0, delta=chunk.text)]

    def closing(self, at: int) -> list[PieceEvent]:
        text = "".join(self._texts)
        kind, end = "response.reasoning_text.done", "response.content_part.done"
        done = PieceEvent(kind, self._id, at, content_index=0, text=text)
        return [done, PieceEvent(end, self._id, at, content_index=0, part=ReasoningText(text))]

    def _sealed(self, status: ItemStatus) -> str | UnsetType:
        is_told = self._is_sealed and status != "in_progress"
        return seal("".join(self._texts)) if is_told else UNSET


class _Summary(_Thoughts):
    """The same for a client that asks for a summary. Nothing is summed up, it has every word; and
    only it is streamed, as clients that know both show both.
    """

    @override
    def item(self, status: ItemStatus) -> OutputReasoning:
        item = super().item(status)
        if status != "in_progress":
            item.summary = [SummaryText("".join(self._texts))]
        return item

    @override
    def opening(self, at: int) -> list[PieceEvent]:
        kind = "response.reasoning_summary_part.added"
        return [PieceEvent(kind, self._id, at, summary_index=0, part=SummaryText(""))]

    @override
    def add(self, chunk: Chunk, at: int) -> list[PieceEvent]:
        assert isinstance(chunk, ReasoningDelta)
        self._texts.append(chunk.text)
        kind = "response.reasoning_summary_text.delta"
        return [PieceEvent(kind, self._id, at, summary_index=0, delta=chunk.text)]

    @override
    def closing(self, at: int) -> list[PieceEvent]:
        text = "".join(self._texts)
        kind, end = "response.reasoning_summary_text.done", "response.reasoning_summary_part.done"
        done = PieceEvent(kind, self._id, at, summary_index=0, text=text)
        return [done, PieceEvent(end, self._id, at, summary_index=0, part=SummaryText(text))]


class _Call(_OpenItem):
    """The call of a function."""

    id_kind = "fc"

    @property
    @override
    def is_known(self) -> bool:
        return True

    def __init__(self, ref: ToolRef, call_id: str) -> None:
        self._id = _new_id(self.id_kind)
        self._ref = ref
        self._call_id = call_id
        self._pieces: list[str] = []

    @override
    def takes(self, chunk: Chunk) -> bool:
        return isinstance(chunk, ToolCallDelta) and chunk.id is None

    @override
    def item(self, status: ItemStatus) -> OutputItem:
        ref = self._ref
        arguments = "" if status == "in_progress" else "".join(self._pieces)
        space = ref.namespace or UNSET
        return OutputCall(self._id, status, self._call_id, ref.name, arguments, space)

    @override
    def opening(self, at: int) -> list[PieceEvent]:
        return []

    @override
    def add(self, chunk: Chunk, at: int) -> list[PieceEvent]:
        assert isinstance(chunk, ToolCallDelta)
        if not chunk.arguments:
            return []
        self._pieces.append(chunk.arguments)
        kind = "response.function_call_arguments.delta"
        return [PieceEvent(kind, self._id, at, delta=chunk.arguments)]

    @override
    def closing(self, at: int) -> list[PieceEvent]:
        kind, arguments = "response.function_call_arguments.done", "".join(self._pieces)
        return [PieceEvent(kind, self._id, at, arguments=arguments, name=self._ref.name)]


class _ReadCall(_Call):
    """A call that is told by what the texts in its arguments say, as far as they are known."""

    def __init__(self, ref: ToolRef, call_id: str) -> None:
        super().__init__(ref, call_id)
        self._texts = JsonTexts()

    @override
    def add(self, chunk: Chunk, at: int) -> list[PieceEvent]:
        assert isinstance(chunk, ToolCallDelta)
        self._pieces.append(chunk.arguments)
        pieces = self._texts.read(chunk.arguments)
        return [event for piece in pieces for event in self._told(piece, at)]

    @override
    def closing(self, at: int) -> list[PieceEvent]:
        return []

    def _told(self, piece: TextPiece, at: int) -> list[PieceEvent]:
        del piece, at
        return []


class _CustomCall(_ReadCall):
    """The call of a custom tool. Where the model wrote something else than its one argument, all
    of that is the text.
    """

    id_kind = "ctc"

    @override
    def item(self, status: ItemStatus) -> OutputItem:
        ref = self._ref
        text = "" if status == "in_progress" else self._text()
        space = ref.namespace or UNSET
        return OutputCustomCall(self._id, status, self._call_id, ref.name, text, space)

    @override
    def closing(self, at: int) -> list[PieceEvent]:
        text = self._text()
        is_told = self._texts.text(INPUT) is not None
        told = [] if is_told else self._delta(text, at)
        kind = "response.custom_tool_call_input.done"
        return [*told, PieceEvent(kind, self._id, at, input=text)]

    @override
    def _told(self, piece: TextPiece, at: int) -> list[PieceEvent]:
        return self._delta(piece.text, at) if piece.path == (INPUT,) else []

    def _delta(self, text: str, at: int) -> list[PieceEvent]:
        kind = "response.custom_tool_call_input.delta"
        return [PieceEvent(kind, self._id, at, delta=text)] if text else []

    def _text(self) -> str:
        text = self._texts.text(INPUT)
        return "".join(self._pieces) if text is None else text


class _ClientCall(_ReadCall):
    """The call of a tool that the client runs; the item is known when its arguments are."""

    def __init__(self, ref: ToolRef, call_id: str) -> None:
        super().__init__(ref, call_id)
        assert ref.client is not None
        self._kind: ClientKind = ref.client
        self._id = _new_id(ID_KINDS[ref.client])

    @override
    def item(self, status: ItemStatus) -> OutputItem:
        arguments = "".join(self._pieces)
        return client_call(self._kind, self._id, status, self._call_id, arguments, self._texts)


class _ShellCall(_ClientCall):
    """Commands, each told as it is written. Their events do not name the item."""

    def __init__(self, ref: ToolRef, call_id: str) -> None:
        super().__init__(ref, call_id)
        self._numbers: dict[Path, int] = {}

    @override
    def _told(self, piece: TextPiece, at: int) -> list[PieceEvent]:
        path, kind = piece.path, _COMMAND
        if path[:1] != ("commands",) or len(path) != 2:
            return []
        if path not in self._numbers:
            number = self._numbers[path] = len(self._numbers)
            return [PieceEvent(f"{kind}.added", UNSET, at, command_index=number, command="")]
        number = self._numbers[path]
        if piece.is_end:
            whole = self._texts.text(*path) or ""
            return [PieceEvent(f"{kind}.done", UNSET, at, command_index=number, command=whole)]
        return [PieceEvent(f"{kind}.delta", UNSET, at, command_index=number, delta=piece.text)]


class _PatchCall(_ClientCall):
    """A change of one file, which is told once the file is known."""

    def __init__(self, ref: ToolRef, call_id: str) -> None:
        super().__init__(ref, call_id)
        self._streams: bool | None = None
        """The diff is told as it is written, as the file was known when that began."""

    @property
    @override
    def is_known(self) -> bool:
        return is_patch_known(self._texts)

    @override
    def _told(self, piece: TextPiece, at: int) -> list[PieceEvent]:
        if piece.path != ("diff",):
            return []
        if self._streams is None:
            self._streams = self._has_diff
        if not self._streams:
            return []
        return self._end(at) if piece.is_end else self._delta(piece.text, at)

    @override
    def closing(self, at: int) -> list[PieceEvent]:
        if self._streams or not (self._has_diff and self._texts.is_whole("diff")):
            return []
        return [*self._delta(self._texts.text("diff") or "", at), *self._end(at)]

    @property
    def _has_diff(self) -> bool:
        return self.is_known and self._texts.text("type") != "delete_file"

    def _delta(self, text: str, at: int) -> list[PieceEvent]:
        return [PieceEvent(f"{_DIFF}.delta", self._id, at, delta=text)] if text else []

    def _end(self, at: int) -> list[PieceEvent]:
        return [PieceEvent(f"{_DIFF}.done", self._id, at, diff=self._texts.text("diff") or "")]
