"""`hearth chat`: a small conversation that shows, per turn, what was reused and from where."""

from __future__ import annotations

import argparse
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TextIO

import msgspec

from api.cli.client import ServerLink
from api.cli.errors import NoServer
from api.cli.views import count, show, took
from runtime.config.settings import Settings
from runtime.errors import HearthError

_END = b"data: [DONE]"


class Cache(msgspec.Struct):
    """What a turn reused."""

    tier: str = "none"
    cached_tokens: int = 0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    reason: str | None = None


class _Hearth(msgspec.Struct):
    cache: Cache


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    hearth: _Hearth | None = None
    error: _Error | None = None


_COMMANDS = "/new begins anew, Ctrl-C stops an answer, /bye leaves; a space before / sends a line."


class ChatTurn(msgspec.Struct):
    """One answer and what it took, as `--json` prints it."""

    text: str = ""
    reasoning: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cache: Cache = msgspec.field(default_factory=Cache)
    is_stopped: bool = False


_decoder = msgspec.json.Decoder(_Event)


def chat(settings: Settings, arguments: argparse.Namespace) -> int:
    """Answer the given message, or every line that is typed, in one conversation."""
    fields = {"max_tokens": arguments.max_tokens}
    if arguments.think is not None:
        fields["enable_thinking"] = arguments.think
    if arguments.model is not None:
        fields["model"] = arguments.model
    link = ServerLink(settings)
    talk = ChatSession(link, fields)
    if arguments.message:
        out = None if arguments.as_json else sys.stdout
        turn = talk.say(" ".join(arguments.message), out)
        return show(turn, summary(turn), as_json=arguments.as_json)
    link.get("/health/live", object)  # before anybody types for nothing
    for line in _typed():
        if line.strip() == "/new":
            talk.begin()
        elif is_command(line):
            sys.stderr.write(f"hearth: there is no {line.split()[0]}; {_COMMANDS}\n")
        else:
            _answer(talk, line, as_json=arguments.as_json)
    return 0


def is_command(line: str) -> bool:
    """Whether a line was meant for us and not for the model: `/word` alone or with words after it.

    A path such as `/etc/hosts` is none; nor is what begins with a space.
    """
    return re.fullmatch(r"/[A-Za-z?]+(\s.*)?", line) is not None


def _answer(talk: ChatSession, line: str, *, as_json: bool) -> None:
    """One turn. Whoever types is told of a refusal and goes on; a program's pipe ends with it."""
    try:
        turn = talk.say(line, None if as_json else sys.stdout)
    except NoServer:
        raise
    except HearthError as error:
        if not sys.stdin.isatty():
            raise
        sys.stderr.write(f"hearth: {error.message}\n")
        return
    said = summary(turn)
    show(turn, said if as_json else _dimmed(said, sys.stdout), as_json=as_json)


class ChatSession:
    """Turns that follow one another; the server knows them by a session id."""

    def __init__(self, link: ServerLink, fields: Mapping[str, object]) -> None:
        self._link = link
        self._fields: dict[str, object] = {
            **fields,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._messages: list[dict[str, str]] = []
        self.begin()

    def begin(self) -> None:
        """Begin anew, in a conversation of its own."""
        self._messages = []
        self._fields["session_id"] = f"chat-{secrets.token_hex(8)}"

    def say(self, text: str, out: TextIO | None) -> ChatTurn:
        """Send a message; the answer is written to `out` while it comes.

        A keyboard interrupt stops the answer, of which what came is kept.

        Raises:
            HearthError: it was refused or failed; the conversation is as it was before.
        """
        asked = [*self._messages, {"role": "user", "content": text}]
        turn = ChatTurn()
        with self._link.stream("POST", "/v1/chat/completions", self._body(asked)) as lines:
            try:
                for line in lines:
                    if line.startswith(b"data: {"):
                        _take(turn, _decoder.decode(line[6:]), out)
            except KeyboardInterrupt:
                turn.is_stopped = True
        if out is not None:
            out.write("\n")
        answer = {"role": "assistant", "content": turn.text}
        if turn.reasoning:
            answer["reasoning_content"] = turn.reasoning
        self._messages = [*asked, answer]
        return turn

    def _body(self, messages: Sequence[Mapping[str, str]]) -> dict[str, object]:
        return {**self._fields, "messages": messages}


def summary(turn: ChatTurn) -> str:
    """One line about a turn: what was reused, from where, and why no more."""
    if turn.is_stopped:
        return "[stopped]"
    cache = turn.cache
    new = turn.prompt_tokens - cache.cached_tokens
    came = (
        f"{count(cache.cached_tokens)} of {count(turn.prompt_tokens)} tokens reused ({cache.tier})"
    )
    times = f"restore {took(cache.restore_ms)}, prefill {took(cache.prefill_ms)} for {count(new)}"
    reason = f", {cache.reason}" if cache.reason else ""
    return f"[{came}; {times}{reason}; {count(turn.output_tokens)} tokens out]"


def _take(turn: ChatTurn, event: _Event, out: TextIO | None) -> None:
    if event.error is not None:
        raise HearthError(event.error.message)
    for choice in event.choices:
        thought, said = choice.delta.reasoning_content, choice.delta.content
        if out is not None and said and turn.reasoning and not turn.text:
            out.write("\n\n")
        turn.reasoning += thought or ""
        turn.text += said or ""
        if out is not None and (thought or said):
            out.write(_dimmed(thought, out) if thought else said or "")
            out.flush()
    if event.hearth is not None:
        turn.cache = event.hearth.cache
    if event.usage is not None:
        turn.prompt_tokens = event.usage.prompt_tokens
        turn.output_tokens = event.usage.completion_tokens


def _dimmed(text: str, out: TextIO) -> str:
    return f"\x1b[2m{text}\x1b[0m" if out.isatty() else text


def _typed() -> Iterator[str]:
    """Lines until the end of the input, or a word of farewell. On a terminal they can be edited."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import_module("readline")  # it lends input() its keys
        sys.stderr.write(f"{_COMMANDS}\n")
    while True:
        try:
            line = input("> ") if is_terminal else sys.stdin.readline()
        except EOFError:
            sys.stdout.write("\n")
            return
        if (not line and not is_terminal) or line.strip() in ("/bye", "/exit", "/quit"):
            return
        if line.strip():
            yield line.rstrip("\n")
