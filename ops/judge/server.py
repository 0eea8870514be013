"""A server of Hearth that is asked, restarted and killed, and always finds its home again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import httpx
import msgspec

from ops.bench.processes import Hearth, hearth, workers_of
from ops.judge.compare import Scored

_PATIENCE_S = 3600.0
"""The judge may run beside other work: a slow machine is no finding."""
_NUM_TOP = 5


class _Top(msgspec.Struct):
    token: str
    logprob: float


class _Entry(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[_Top] = []


class _Entries(msgspec.Struct):
    content: list[_Entry] | None = None


class _Lists(msgspec.Struct):
    """The older form, of completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class Function(msgspec.Struct):
    name: str = ""
    arguments: str = ""


class Call(msgspec.Struct):
    function: Function
    id: str = ""
    index: int = 0


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[Call] = []


class _Choice(msgspec.Struct):
    message: _Message | None = None
    delta: _Message | None = None
    text: str = ""
    logprobs: dict[str, object] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details = msgspec.field(default_factory=_Details)


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class Said(msgspec.Struct):
    """An answer. `pieces` are what a stream of it brought, in turn."""

    text: str
    calls: list[Call]
    finish: str
    scores: list[Scored | None]
    num_prompt: int
    num_cached: int
    pieces: list[str] = []

    @property
    def tokens(self) -> list[Scored]:
        """The scores of the answer's tokens."""
        return [score for score in self.scores if score is not None]

    @property
    def same(self) -> tuple[str, list[tuple[str, str]], str]:
        """What two equal answers have in common; ids of calls are drawn."""
        calls = [(call.function.name, call.function.arguments) for call in self.calls]
        return self.text, calls, self.finish


class Server:
    """`hearth serve` with one model; its port changes whenever it starts again."""

    def __init__(self, model: Path, home: Path) -> None:
        self._model = model
        self._home = home
        self._running: Hearth | None = None
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        self._home.mkdir(parents=True, exist_ok=True)
        serving = hearth(
            self._model,
            self._home,
            models_dirs=[str(self._model.parent)],
            wedge_timeout_s=_PATIENCE_S,
            load_timeout_s=_PATIENCE_S,
            request_deadline_s=_PATIENCE_S,
        )
        self._running = await self._stack.enter_async_context(serving)

    async def stop(self) -> None:
        """End it as an operator does."""
        await self._stack.aclose()
        self._running = None

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(self, *reason: object) -> None:
        await self.stop()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def kill(self) -> None:
        """`kill -9` of the server and of its workers, and a new start."""
        assert self._running is not None
        workers = [one.pid for one in workers_of(self._running.pid)]
        for pid in (self._running.pid, *workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.restart()

    async def kill_worker(self) -> None:
        """`kill -9` of its workers; the server goes on."""
        assert self._running is not None
        for one in workers_of(self._running.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)

    async def chat(self, body: Mapping[str, object], *, stream: bool = False) -> Said:
        """Answer messages, greedily."""
        told: dict[str, object] = {"logprobs": True, "top_logprobs": _NUM_TOP, "temperature": 0}
        return await self._ask("/v1/chat/completions", {**told, **body}, stream=stream)

    async def complete(self, body: Mapping[str, object], *, stream: bool = False) -> Said:
        """Continue a text, greedily."""
        told: dict[str, object] = {"logprobs": _NUM_TOP, "temperature": 0}
        return await self._ask("/v1/completions", {**told, **body}, stream=stream)

    async def _ask(self, path: str, body: Mapping[str, object], *, stream: bool) -> Said:
        assert self._running is not None
        url = f"http://127.0.0.1:{self._running.port}{path}"
        async with httpx.AsyncClient(timeout=_PATIENCE_S, trust_env=False) as client:
            wishes = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            answer = await client.post(url, json={**body, **wishes})
        events = answer.text.split("\n\n")
        if answer.status_code != 200 or (stream and "data: [DONE]" not in events):
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[-2000:]}")
        lines = (
            [one[6:] for one in events if one.startswith("data: {")] if stream else [answer.text]
        )
        return said([msgspec.json.decode(line, type=_Answer) for line in lines])


def said(events: list[_Answer]) -> Said:
    """One answer out of its events, or out of the one that has all of it."""
    whole = Said("", [], "", [], 0, 0)
    for event in events:
        if event.usage is not None:
            whole.num_prompt = event.usage.prompt_tokens
            whole.num_cached = event.usage.prompt_tokens_details.cached_tokens
        for choice in event.choices:
            message = choice.message or choice.delta or _Message()
            piece = (message.content or "") + choice.text
            if piece:
                whole.pieces.append(piece)
            whole.finish = choice.finish_reason or whole.finish
            whole.scores += _scores(choice.logprobs)
            _add_calls(whole.calls, message.tool_calls)
    whole.text = "".join(whole.pieces)
    return whole


def _add_calls(calls: list[Call], pieces: list[Call]) -> None:
    for place, piece in enumerate(pieces):
        number = piece.index or place
        if number == len(calls):
            calls.append(Call(Function(), piece.id, number))
        calls[number].function.name += piece.function.name
        calls[number].function.arguments += piece.function.arguments


def _scores(given: dict[str, object] | None) -> list[Scored | None]:
    if given is None:
        return []
    if "content" in given:
        entries = msgspec.convert(given, _Entries).content or []
        return [
            Scored(one.token, one.logprob, [(top.token, top.logprob) for top in one.top_logprobs])
            for one in entries
        ]
    lists = msgspec.convert(given, _Lists)
    found: list[Scored | None] = []
    for token, logprob, top in zip(
        lists.tokens, lists.token_logprobs, lists.top_logprobs, strict=True
    ):
        if logprob is None:
            found.append(None)
            continue
        ranked = sorted((top or {}).items(), key=lambda pair: -pair[1])
        found.append(Scored(token, logprob, ranked))
    return found


def message_of(answer: Said) -> dict[str, object]:
    """The answer as a client gives it back."""
    message: dict[str, object] = {"role": "assistant", "content": answer.text}
    if answer.calls:
        calls = [
            {"id": call.id, "type": "function", "function": msgspec.to_builtins(call.function)}
            for call in answer.calls
        ]
        message["tool_calls"] = calls
    return cast("dict[str, object]", json.loads(json.dumps(message)))
