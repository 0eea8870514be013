"""Anthropic's turns as the runtime's messages: one turn may become several, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from api.anthropic.breakpoints import Breakpoints
from api.anthropic.schemas import (
    KINDS,
    UNREADABLE,
    Block,
    CompactionBlock,
    Content,
    DocumentBlock,
    ImageBlock,
    InputMessage,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    block_at,
    document_content,
    picture_at,
    search_result_text,
)
from api.anthropic.signature import reasoning_in
from api.http.expansion import Expansion
from api.http.refusal import refuse
from runtime.prompt.compaction import summary_message
from runtime.types import Breakpoint, Image, Message, Role, Tool, ToolCall


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
        self, breakpoints: Breakpoints, expansion: Expansion, tools: Sequence[Tool] = ()
    ) -> None:
        self.messages: list[Message] = []
        self.ignored: list[str] = []
        self.num_compacted = 0
        """Messages that are not read, as a summary stands for them."""
        self._num_system = 0
        self._breakpoints = breakpoints
        self._expansion = expansion
        self._tool_sizes = {
            tool.name: len(tool.name) + len(tool.description or "") + len(tool.parameters)
            for tool in tools
        }

    def add_system(self, content: Content | None, path: str) -> None:
        """A system prompt, a message for each of its blocks.

        Raises:
            InvalidRequest: a block does not belong there.
        """
        for block, at in self._blocks(content, path):
            said = _Said()
            self._say(said, block, at)
            message = said.message("system")
            if message.text or message.images:
                self.messages.append(message)
        if path == "system":
            self._num_system = len(self.messages)

    def add(self, turn: InputMessage, path: str) -> None:
        """One turn.

        Raises:
            InvalidRequest: its role is unknown, or a block does not belong into it.
        """
        match turn.role:
            case "user":
                self._add_user(turn.content, f"{path}.content")
            case "assistant":
                self._add_assistant(turn.content, f"{path}.content")
            case "system" | "developer":
                self.add_system(turn.content, f"{path}.content")
            case _:
                refuse(
                    f"{path}.role",
                    f"is {turn.role[:64]!r}, which is not a known role: use user, assistant or "
                    "system.",
                )

    def _add_user(self, content: Content | None, path: str) -> None:
        said, is_said = _Said(), False
        results = 0
        for block, at in self._blocks(content, path):
            if isinstance(block, CompactionBlock):
                if self._compact(block, at):
                    said, is_said = _Said(), False
                results += 1
            elif isinstance(block, ToolResultBlock):
                if is_said:
                    self.messages.append(said.message("user"))
                said, is_said = _Said(), False
                self.messages.append(self._result(block, at))
                results += 1
            else:
                self._say(said, block, at)
                is_said = True
        if is_said or not results:
            self.messages.append(said.message("user"))

    def _result(self, block: ToolResultBlock, path: str) -> Message:
        said = _Said()
        for inner, at in self._blocks(block.content, f"{path}.content"):
            self._say(said, inner, at)
        self._breakpoints.meet(block.cache_control, path, said)
        return msgspec.structs.replace(
            said.message("tool"), tool_call_id=block.tool_use_id, is_error=bool(block.is_error)
        )

    def _add_assistant(self, content: Content | None, path: str) -> None:
        # What a model wrote in pieces is one text, as it was when it wrote it.
        said, is_empty = _Said(between=""), False
        for block, at in self._blocks(content, path):
            is_empty = isinstance(block, CompactionBlock)
            match block:
                case CompactionBlock():
                    if self._compact(block, at):
                        said = _Said(between="")
                case ThinkingBlock():
                    self._think(said, block, at)
                case ToolUseBlock():
                    said.calls.append(_call(block, at))
                    self._breakpoints.meet(block.cache_control, at, said)
                case _:
                    self._say(said, block, at)
        if not is_empty or said != _Said(between=""):
            self.messages.append(said.message("assistant"))

    def _compact(self, block: CompactionBlock, path: str) -> bool:
        """A summary stands for all messages before it; whether there is one."""
        if block.content is None:
            self.ignored.append(f"{path} (a compaction without content)")
            return False
        if not block.content:
            refuse(f"{path}.content", "must not be empty: send the block as it was given.")
        self.num_compacted += len(self.messages) - self._num_system
        keep_s = self._breakpoints.keep_s(block.cache_control, path)
        summary = summary_message(block.content)
        if keep_s is not None:
            summary = summary.kept(keep_s)
        self.messages[self._num_system :] = [summary]
        return True

    def _think(self, said: _Said, block: ThinkingBlock, path: str) -> None:
        signed = None
        if block.signature:
            signed = reasoning_in(block.signature, self._expansion, f"{path}.signature")
        if reasoning := signed or block.thinking:
            said.reasonings.append(reasoning)
        elif block.signature:
            self.ignored.append(f"{path}.signature")

    def _say(self, said: _Said, block: Block, path: str) -> None:
        match block:
            case TextBlock(text=text):
                said.say(text)
            case ImageBlock():
                said.images.append(picture_at(block, said.length, path))
            case DocumentBlock():
                self._read(said, block, path)
            case SearchResultBlock():
                said.say(search_result_text(block))
            case ToolReferenceBlock(tool_name=name):
                self._expansion.count(self._tool_sizes.get(name, 0), path)
                said.loaded_tools.append(name)
            case _:
                name = next(name for name, kind in KINDS.items() if isinstance(block, kind))
                refuse(path, f"is a {name} block, which has no meaning there: leave it out.")
        self._breakpoints.meet(block.cache_control, path, said)

    def _read(self, said: _Said, block: DocumentBlock, path: str) -> None:
        for part in (block.title, block.context):
            if part:
                said.say(part)
        content = document_content(block, path)
        for inner, at in self._blocks(content, f"{path}.source.content"):
            if not isinstance(inner, TextBlock | ImageBlock):
                refuse(at, "is in a document, which holds text and images: leave it out.")
            self._say(said, inner, at)

    def _blocks(self, content: Content | None, path: str) -> Sequence[tuple[Block, str]]:
        """The blocks of a content and their paths; a text is one block of text."""
        if content is None or isinstance(content, str):
            return [(TextBlock(content), path)] if content else []
        found: list[tuple[Block, str]] = []
        for i, raw in enumerate(content):
            at = f"{path}[{i}]"
            block = block_at(raw, at)
            if isinstance(block, str) and block not in UNREADABLE:
                refuse(
                    at,
                    f"is a block of type {block[:64]!r}, which is not read here: leave it out, or "
                    "send what it says as text.",
                )
            if isinstance(block, str):
                self.ignored.append(f"{at} ({block[:64]})")
            else:
                found.append((block, at))
        return found


def _call(block: ToolUseBlock, path: str) -> ToolCall:
    arguments = bytes(block.input).decode(errors="replace")
    if arguments == "null":
        arguments = "{}"
    if not arguments.startswith("{"):
        refuse(f"{path}.input", "must be an object: the arguments of the call.")
    return ToolCall(id=block.id, name=block.name, arguments=arguments)
