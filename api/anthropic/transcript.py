"""Anthropic's turns as the runtime's messages: one turn may become several, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec

from api.anthropic.breakpoints import Breakpoints
from api.anthropic.schemas import (
    KINDS,
    Block,
    CacheControl,
    CompactionBlock,
    Content,
    DocumentBlock,
    ImageBlock,
    InputMessage,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
    block_at,
    document_content,
    picture_at,
    search_result_text,
)
from api.anthropic.signature import reasoning_in
from api.anthropic.tool_changes import ToolChanges
from api.http.expansion import Expansion
from api.http.past import STRICT, Turn, tell
from api.http.refusal import refuse
from runtime.prompt.compaction import summary_message
from runtime.prompt.past import line_for
from runtime.types import Breakpoint, Image, Message, Role, ToolCall


@dataclass(slots=True)
class _Said:
    """A run of blocks that becomes one message; `between` is what joins its texts."""

    between: str = "\n"
    texts: list[str] = field(default_factory=list[str])
    reasonings: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    images: list[Image] = field(default_factory=list[Image])
    loaded_tools: list[str] = field(default_factory=list[str])
    breakpoints: list[Breakpoint] = field(default_factory=list[Breakpoint])
    length: int = 0
    """Of all texts, joined."""

    def say(self, text: str) -> None:
        """Some more text."""
        self.length += len(text) + (len(self.between) if self.texts else 0)
        self.texts.append(text)

    def message(self, role: Role) -> Message:
        return Message(
            role=role,
            text=self.between.join(self.texts),
            reasoning="\n".join(self.reasonings) or None,
            tool_calls=tuple(self.calls),
            images=tuple(self.images),
            loaded_tools=tuple(self.loaded_tools),
            breakpoints=tuple(self.breakpoints),
        )


class Transcript:
    """Give it the system prompt and every turn in their order; `messages` is what they became.

    `ignored` names what was left out because it says nothing to a model.
    """

    def __init__(
        self, breakpoints: Breakpoints, expansion: Expansion, changes: ToolChanges | None = None
    ) -> None:
        self.messages: list[Message] = []
        self.ignored: list[str] = []
        self.num_compacted = 0
        """Messages that are not read, as a summary stands for them."""
        self._num_system = 0
        self._breakpoints = breakpoints
        self._expansion = expansion
        self._changes = changes or ToolChanges()

    def add_system(self, content: Content | None, path: str, turn: Turn = STRICT) -> None:
        """A system prompt, a message for each of its blocks.

        Raises:
            InvalidRequest: a block does not belong there.
        """
        for block, at in self._blocks(content, path, turn):
            said = _Said()
            self._say(said, block, at, turn)
            message = said.message("system")
            if message.text or message.images or message.loaded_tools:
                self.messages.append(message)
        if path == "system":
            self._num_system = len(self.messages)

    def add_changes(self, content: Content | None, path: str, turn: Turn) -> None:
        """Of a system message that is not read any more the changes of tools that it makes."""
        for block, at in self._blocks(content, path, turn):
            if isinstance(block, ToolAdditionBlock | ToolRemovalBlock):
                said = _Said()
                self._say(said, block, at, turn)
                message = said.message("system")
                if message.text or message.loaded_tools:
                    self.messages.append(message)

    def _load(self, said: _Said, name: str, path: str) -> None:
        self._expansion.count(self._changes.size_of(name), path)
        said.loaded_tools.append(name)

    def add(self, message: InputMessage, path: str, turn: Turn) -> None:
        """One message.

        Raises:
            InvalidRequest: its role is unknown, or a block does not belong into it, and it is the
                newest input.
        """
        content = message.content
        match message.role:
            case "assistant":
                self._add_assistant(content, f"{path}.content", turn)
            case "system" | "developer":
                self.add_system(content, f"{path}.content", turn)
            case role:
                if role != "user":
                    turn.read(lambda: _refuse_role(role, f"{path}.role"), None)
                self._add_user(content, f"{path}.content", turn)

    def _add_user(self, content: Content | None, path: str, turn: Turn) -> None:
        said, is_said = _Said(), False
        results = 0
        for block, at in self._blocks(content, path, turn):
            if isinstance(block, CompactionBlock):
                if self._compact(block, at, turn):
                    said, is_said = _Said(), False
                results += 1
            elif isinstance(block, ToolResultBlock):
                if is_said:
                    self.messages.append(said.message("user"))
                said, is_said = _Said(), False
                self.messages.append(self._result(block, at, turn.result()))
                results += 1
            else:
                self._say(said, block, at, turn)
                is_said = True
        if is_said or not results:
            self.messages.append(said.message("user"))

    def _result(self, block: ToolResultBlock, path: str, turn: Turn) -> Message:
        said = _Said()
        for inner, at in self._blocks(block.content, f"{path}.content", turn):
            self._say(said, inner, at, turn)
        self._meet(block.cache_control, path, said, turn)
        return msgspec.structs.replace(
            said.message("tool"), tool_call_id=block.tool_use_id, is_error=bool(block.is_error)
        )

    def _add_assistant(self, content: Content | None, path: str, turn: Turn) -> None:
        # What a model wrote in pieces is one text, as it was when it wrote it.
        said, is_empty = _Said(between=""), False
        for block, at in self._blocks(content, path, turn):
            is_empty = isinstance(block, CompactionBlock)
            match block:
                case CompactionBlock():
                    if self._compact(block, at, turn):
                        said = _Said(between="")
                case ThinkingBlock():
                    self._think(said, block, at)
                case ToolUseBlock():
                    said.calls.append(_call(block, at, turn))
                    self._meet(block.cache_control, at, said, turn)
                case _:
                    self._say(said, block, at, turn)
        if not is_empty or said != _Said(between=""):
            self.messages.append(said.message("assistant"))

    def _compact(self, block: CompactionBlock, path: str, turn: Turn) -> bool:
        """A summary stands for all messages before it; whether there is one."""
        if block.content is None:
            self.ignored.append(f"{path} (a compaction without content)")
            return False
        if not block.content:
            turn.read(lambda: _refuse_empty(f"{path}.content"), None)
            return False
        self.num_compacted += len(self.messages) - self._num_system
        control = block.cache_control
        keep_s = turn.read(lambda: self._breakpoints.keep_s(control, path), None)
        summary = summary_message(block.content)
        if keep_s is not None:
            summary = summary.kept(keep_s)
        self.messages[self._num_system :] = [summary]
        for change, at in self._blocks(block.tool_changes, f"{path}.tool_changes", turn):
            if isinstance(change, ToolAdditionBlock | ToolRemovalBlock):
                self._say(_Said(), change, at, turn)
            else:
                turn.read(lambda at=at: _refuse_no_change(at), None)
        said = _Said()
        text, loaded = self._changes.restated()
        for name in loaded:
            self._load(said, name, path)
        if text:
            said.say(text)
        if text or loaded:
            self.messages.append(said.message("system"))
        return True

    def _think(self, said: _Said, block: ThinkingBlock, path: str) -> None:
        signed = None
        if block.signature:
            signed = reasoning_in(block.signature, self._expansion, f"{path}.signature")
        if reasoning := signed or block.thinking:
            said.reasonings.append(reasoning)
        elif block.signature:
            self.ignored.append(f"{path}.signature")

    def _say(self, said: _Said, block: Block, path: str, turn: Turn) -> None:
        match block:
            case TextBlock(text=text):
                said.say(text)
            case ImageBlock():
                lost = Image(at=said.length, field=path)
                said.images.append(turn.read(lambda: picture_at(block, said.length, path), lost))
            case DocumentBlock():
                self._read(said, block, path, turn)
            case SearchResultBlock():
                said.say(search_result_text(block))
            case ToolReferenceBlock(tool_name=name):
                self._load(said, name, path)
            case ToolAdditionBlock():
                if name := turn.read(lambda: self._changes.add(block, path), ""):
                    self._load(said, name, path)
            case ToolRemovalBlock():
                if told := turn.read(lambda: self._changes.remove(block, path), ""):
                    said.say(told)
            case _:
                name = next(name for name, kind in KINDS.items() if isinstance(block, kind))
                turn.read(lambda: _refuse_place(name, path), None)
                said.say(line_for(name))
                return
        self._meet(block.cache_control, path, said, turn)

    def _read(self, said: _Said, block: DocumentBlock, path: str, turn: Turn) -> None:
        content = turn.read(lambda: document_content(block, path), line_for("document"))
        for part in (block.title, block.context):
            if part:
                said.say(part)
        for inner, at in self._blocks(content, f"{path}.source.content", turn):
            if isinstance(inner, TextBlock | ImageBlock):
                self._say(said, inner, at, turn)
            else:
                turn.read(lambda at=at: _refuse_in_document(at), None)
                said.say(line_for("block"))

    def _meet(self, control: CacheControl | None, path: str, said: _Said, turn: Turn) -> None:
        turn.read(lambda: self._breakpoints.meet(control, path, said), None)

    def _blocks(
        self, content: Content | None, path: str, turn: Turn
    ) -> Sequence[tuple[Block, str]]:
        """The blocks of a content and their paths; a text is one block of text."""
        if content is None or isinstance(content, str):
            return [(TextBlock(content), path)] if content else []
        found: list[tuple[Block, str]] = []
        for i, raw in enumerate(content):
            at = f"{path}[{i}]"
            block = block_at(raw, at, turn)
            if isinstance(block, str):
                tell(self.ignored, f"{at} ({block[:64]})")
            else:
                found.append((block, at))
        return found


def _call(block: ToolUseBlock, path: str, turn: Turn) -> ToolCall:
    arguments = bytes(block.input).decode(errors="replace")
    if arguments == "null":
        arguments = "{}"
    if not arguments.startswith("{"):
        turn.read(lambda: _refuse_arguments(f"{path}.input"), None)
        if arguments.startswith('"'):
            arguments = turn.arguments(msgspec.json.decode(block.input, type=str), f"{path}.input")
    return ToolCall(id=block.id, name=block.name, arguments=arguments)


def _refuse_no_change(path: str) -> NoReturn:
    refuse(path, "is no change of tools: leave it out.")


def _refuse_role(role: str, path: str) -> NoReturn:
    refuse(path, f"is {role[:64]!r}, which is not a known role: use user, assistant or system.")


def _refuse_empty(path: str) -> NoReturn:
    refuse(path, "must not be empty: send the block as it was given.")


def _refuse_place(name: str, path: str) -> NoReturn:
    refuse(path, f"is a {name} block, which has no meaning there: leave it out.")


def _refuse_in_document(path: str) -> NoReturn:
    refuse(path, "is in a document, which holds text and images: leave it out.")


def _refuse_arguments(path: str) -> NoReturn:
    refuse(path, "must be an object: the arguments of the call.")
