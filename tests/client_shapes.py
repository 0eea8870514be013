"""Conversations in the shape of real agent clients: our own text, their structure and habits.

Each client has its own way to give an answer back: without thinking, arguments spelled anew, other
ids, results in the order of completion, reminders, dates and telemetry in the early prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import partial
from itertools import count

import msgspec

from runtime.types import ChatPrompt, Message, Thinking, Tool, ToolCall

NEEDLE = "velvet-onyx-41"
TOOLS = tuple(
    Tool(
        name=name,
        description=f"{name.title()} something in the workspace, and say what was found there.",
        parameters=json.dumps(
            {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}
        ),
    )
    for name in ("look", "read", "write", "shell")
)
DEFERRED = Tool(name="fetch", description="Fetch a page.", is_deferred=True)
TASK = "The quick brown fox jumps over the lazy dog; fix it while the kettle hums on the hearth."


@dataclass
class Said:
    """What the server said in one turn, as a client received it."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list[ToolCall])


@dataclass(frozen=True)
class Shape:
    """A client. `opening` gives its first messages, `echo` how it gives an answer back."""

    client: str
    opening: Callable[[str, date], list[Message]]
    echo: Callable[[Said, int], Message]
    tools: tuple[Tool, ...] = TOOLS
    keep_s: float | None = None
    swaps_results: bool = False


LAST_OF_ITS_DAY = 8
"""After this turn the date that clients write into their prompts is another one."""


class Conversation:
    """One session of a client, turn by turn."""

    def __init__(self, shape: Shape, directory: str = "/home/ada/project") -> None:
        self.shape = shape
        self.day = date(2026, 11, 21)
        self.directory = directory
        self.later: list[Message] = []
        self.num_turns = 0

    @property
    def session_id(self) -> str:
        return f"{self.shape.client}:{self.directory}"

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self.shape.opening(self.directory, self.day), *self.later)

    def prompt(self) -> ChatPrompt:
        messages = list(self.messages)
        if self.shape.keep_s is not None:
            messages[-1] = messages[-1].kept(self.shape.keep_s)
        return ChatPrompt(
            messages=tuple(messages), tools=self.shape.tools, thinking=Thinking(is_enabled=True)
        )

    def answered(self, said: Said) -> None:
        """Take an answer up and go on: with the tool's result, or with another question."""
        number = self.num_turns
        self.num_turns += 1
        echo = self.shape.echo(said, number)
        self.later.append(echo)
        results = [
            Message(
                role="tool",
                text=f"Chunk ID: {number:06x}\nWall time: 0.0{number} seconds\n"
                f"line {number} of the file says: rain falls on the hearth",
                tool_call_id=call.id,
                name=call.name,
                is_error=number % 7 == 3,
            )
            for call in echo.tool_calls
        ]
        self.later += results[::-1] if self.shape.swaps_results else results
        if not results:
            self.later.append(Message(role="user", text=f"Go on with step {number + 1}."))
        if number == LAST_OF_ITS_DAY:
            self.day += timedelta(days=1)


def _arguments(call: ToolCall, *, spaced: bool) -> str:
    separators = (", ", ": ") if spaced else (",", ":")
    return json.dumps(json.loads(call.arguments), separators=separators)


def _renamed(said: Said, number: int, *, spaced: bool) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(
            id=f"toolu_{number:04}_{i}", name=call.name, arguments=_arguments(call, spaced=spaced)
        )
        for i, call in enumerate(said.calls)
    )


def _instructions(directory: str) -> str:
    rules = "\n".join(f"{i}. Say what was done, then go on to what is next." for i in range(12))
    return f"You are an agent.\n{rules}\nWorking directory: {directory}\n"


def _claude_opening(directory: str, day: date) -> list[Message]:
    billing = "x-anthropic-billing-header: cc_version=2.1.329.ec4; cc_entrypoint=sdk-cli;"
    return [
        Message(role="system", text=billing),
        Message(role="system", text=_instructions(directory)).kept(3600.0),
        Message(
            role="user",
            text="<system-reminder>\nAs you answer, use this context: the code word is "
            f"{NEEDLE}.\n</system-reminder>\n{TASK}",
        ),
        Message(role="system", text=f"Tools may be searched.\nToday's date is {day:%Y-%m-%d}."),
    ]


def _claude_echo(said: Said, number: int) -> Message:
    return Message(
        role="assistant",
        text=f"{said.text.strip()}\n",
        tool_calls=_renamed(said, number, spaced=True),
    )


def _codex_opening(directory: str, day: date) -> list[Message]:
    context = (
        f"<environment_context>\n  <cwd>{directory}</cwd>\n"
        f"  <current_date>{day:%Y-%m-%d}</current_date>\n</environment_context>"
    )
    return [
        Message(role="system", text=_instructions("the sandbox")),
        Message(role="system", text="The sandbox is open."),
        Message(role="user", text=f"# AGENTS.md\nThe code word is {NEEDLE}.\n\n{context}"),
        Message(role="user", text=TASK),
    ]


def _codex_echo(said: Said, number: int) -> Message:
    return Message(
        role="assistant", text=said.text, reasoning=said.reasoning, tool_calls=tuple(said.calls)
    )


def _opencode_opening(directory: str, day: date) -> list[Message]:
    date_line = f"  Today's date: {day:%a %b %d %Y}"
    system = f"{_instructions(directory)}<env>\n{date_line}\n</env>\nThe code word is {NEEDLE}."
    return [Message(role="system", text=system), Message(role="user", text=TASK)]


def _opencode_echo(said: Said, number: int) -> Message:
    return Message(
        role="assistant",
        text=said.text,
        reasoning=said.reasoning,
        tool_calls=_renamed(said, number, spaced=False),
    )


def _pi_opening(directory: str, day: date) -> list[Message]:
    system = f"{_instructions(directory)}The code word is {NEEDLE}.\nCurrent date: {day:%Y-%m-%d}"
    return [Message(role="system", text=system), Message(role="user", text=TASK)]


def _clock_opening(directory: str, day: date, minutes: Iterator[int]) -> list[Message]:
    notes = "\n".join(f"Note {i}: the kettle is on the hearth." for i in range(12))
    clock = f"Current time: 11:{next(minutes) % 60:02}."
    system = f"{_instructions(directory)}{clock}\n{notes}"
    return [Message(role="system", text=system), Message(role="user", text=TASK)]


def with_clock() -> Shape:
    """A client that writes the time of day into its system prompt, at every request."""
    return Shape("openclaw", partial(_clock_opening, minutes=count()), _opencode_echo)


SHAPES = (
    Shape(
        "claude-code",
        _claude_opening,
        _claude_echo,
        tools=(*TOOLS, DEFERRED),
        keep_s=300.0,
        swaps_results=True,
    ),
    Shape("codex", _codex_opening, _codex_echo),
    Shape("opencode", _opencode_opening, _opencode_echo),
    Shape("pi", _pi_opening, _opencode_echo),
)


# Compaction: what a client asks for a summary with, and what it goes on with


def _flattened(conversation: Conversation) -> ChatPrompt:
    """The whole conversation as one text, under another system prompt and without tools."""
    said = "\n\n".join(f"[{one.role}]: {one.text}" for one in conversation.messages)
    return ChatPrompt(
        messages=(
            Message(role="system", text="You summarise conversations. Do not continue them."),
            Message(role="user", text=f"<conversation>\n{said}\n</conversation>\nSummarise it."),
        ),
        thinking=Thinking(is_enabled=True),
    )


def summary_prompt(conversation: Conversation) -> ChatPrompt:
    """The request for a summary, as the client was seen to make it."""
    client = conversation.shape.client
    if client == "pi":
        return _flattened(conversation)
    prompt = conversation.prompt()
    asked = Message(role="user", text="Create a detailed summary of the conversation so far.")
    tools = () if client == "codex" else prompt.tools
    return msgspec.structs.replace(prompt, messages=(*prompt.messages, asked), tools=tools)


def prompt_after_summary(conversation: Conversation, summary: str) -> ChatPrompt:
    """The first request after it: what the client puts in place of the conversation."""
    shape = conversation.shape
    opening = shape.opening(conversation.directory, conversation.day)
    told = Message(role="user", text=f"This session goes on from an earlier one:\n{summary}")
    if shape.client == "opencode":
        replaced = [
            *opening[:1],
            Message(role="user", text="What did we do so far?"),
            Message(role="assistant", text=summary),
            Message(role="user", text="Continue if you have next steps"),
        ]
    elif shape.client == "pi":
        replaced = [*opening[:1], told, *conversation.later[-2:]]
    else:
        replaced = [*opening, told]
    return ChatPrompt(
        messages=tuple(replaced), tools=shape.tools, thinking=Thinking(is_enabled=True)
    )
