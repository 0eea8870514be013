"""`make eval-tiny`: held-out tries against the shipped model, asked over HTTP of real servers.

Greedy answers count only when they are right to the letter. ARGS="--tries 20" is a quick look.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
from tokenizers import Tokenizer

from api.bench.machine import Environment, environment
from api.openai.schemas import ChatCompletion
from ops.bench.processes import hearth
from ops.studies.tiny_model import smalltalk, trials
from runtime.embedded import HEARTH_TINY

DISTANCES = (500, 2000, 8000)
TARGET = 0.95
MAX_ANSWER_TOKENS = 320
LONGEST_THOUGHT_TOKENS = 80
SHOWN_MISSES = 5
OPEN_REQUESTS = 2
Json = dict[str, object]


class Row(msgspec.Struct):
    """One figure: how many of the tries were right."""

    name: str
    right: int
    tries: int
    share: float
    median_prompt_tokens: int
    parts: dict[str, str]
    seconds: float


class Thinking(msgspec.Struct):
    """How often the reasoning was there when asked for, and only then."""

    on_and_brief: int = 0
    on: int = 0
    off_and_absent: int = 0
    off: int = 0


class Report(msgspec.Struct):
    """What eval.json holds."""

    model_sha256: str
    model_bytes: int
    seed: int
    tries: int
    servers: int
    rows: list[Row]
    thinking: Thinking
    environment: Environment


@dataclass
class Outcome:
    """One try: whether it was right, which part of its row it belongs to, and what was said."""

    right: bool
    part: str
    prompt_tokens: int
    said: str
    wanted: str


@dataclass
class Asker:
    """Sends chat requests, several at a time, and keeps count of the thinking."""

    places: asyncio.Queue[httpx.AsyncClient] = field(
        default_factory=asyncio.Queue[httpx.AsyncClient]
    )
    thinking: Thinking = field(default_factory=Thinking)

    async def ask(
        self, messages: Sequence[Json], tools: list[Json] | None, thinking: bool
    ) -> ChatCompletion:
        """The greedy answer."""
        body: Json = {"messages": messages, "temperature": 0, "max_tokens": MAX_ANSWER_TOKENS}
        body |= {"enable_thinking": thinking, "tools": tools}
        client = await self.places.get()
        try:
            answer = await client.post("/v1/chat/completions", json=body)
        finally:
            self.places.put_nowait(client)
        answer.raise_for_status()
        reply = msgspec.json.decode(answer.content, type=ChatCompletion)
        self._count_thinking(reply, thinking)
        return reply

    def _count_thinking(self, reply: ChatCompletion, thinking: bool) -> None:
        message = reply.choices[0].message
        num_tokens = reply.usage.completion_tokens_details.reasoning_tokens
        has_marker = "think>" in (message.content or "")
        if thinking:
            self.thinking.on += 1
            is_brief = bool(message.reasoning_content) and num_tokens <= LONGEST_THOUGHT_TOKENS
            self.thinking.on_and_brief += is_brief and not has_marker
        else:
            self.thinking.off += 1
            self.thinking.off_and_absent += not message.reasoning_content and not has_marker


async def try_answer(asker: Asker, trial: trials.Trial) -> Outcome:
    """The last turn of the trial, asked for and compared."""
    messages = trials.openai_messages(trial.dialogue)
    wanted = str(messages[trial.first]["content"])
    thinking = trial.dialogue.messages[trial.first].thinking
    reply = await asker.ask(messages[: trial.first], trials.openai_tools(trial.dialogue), thinking)
    said = reply.choices[0].message.content or ""
    return Outcome(said == wanted, trial.part, reply.usage.prompt_tokens, said, wanted)


async def try_tool(asker: Asker, trial: trials.Trial) -> Outcome:
    """The call, then the answer from the tool's result: both must be right."""
    messages = trials.openai_messages(trial.dialogue)
    tools = trials.openai_tools(trial.dialogue)
    turn = trial.dialogue.messages[trial.first]
    reply = await asker.ask(messages[: trial.first], tools, turn.thinking)
    choice = reply.choices[0]
    made = choice.message.tool_calls or []
    functions = [call.function for call in made if call.function]
    calls = [(one.name, json.loads(one.arguments)) for one in functions]
    prompt_tokens = reply.usage.prompt_tokens
    if calls != turn.calls or choice.finish_reason != "tool_calls":
        said = f"{choice.message.content or ''}{calls}"
        return Outcome(False, "call", prompt_tokens, said, str(turn.calls))
    reply = await asker.ask(messages[:-1], tools, turn.thinking)
    said = reply.choices[0].message.content or ""
    wanted = str(messages[-1]["content"])
    return Outcome(said == wanted, "answer", prompt_tokens, said, wanted)


async def measure(
    name: str,
    asker: Asker,
    made: list[trials.Trial],
    attempt: Callable[[Asker, trials.Trial], Awaitable[Outcome]],
) -> Row:
    """Run the tries of one row, print it and what went wrong."""
    start = time.perf_counter()
    outcomes = await asyncio.gather(*(attempt(asker, trial) for trial in made))
    right = sum(outcome.right for outcome in outcomes)
    parts = {part: _part(outcomes, part) for part in sorted({o.part for o in outcomes if o.part})}
    row = Row(
        name=name,
        right=right,
        tries=len(outcomes),
        share=round(right / len(outcomes), 4),
        median_prompt_tokens=round(statistics.median(o.prompt_tokens for o in outcomes)),
        parts=parts,
        seconds=round(time.perf_counter() - start, 1),
    )
    shown = ", ".join(f"{part} {share}" for part, share in parts.items())
    print(
        f"{name:24} {right:4} of {row.tries:4}  {row.share:7.1%}  "
        f"{row.median_prompt_tokens:6} tokens {row.seconds:6.1f} s  {shown}",
        flush=True,
    )
    for outcome in [o for o in outcomes if not o.right][:SHOWN_MISSES]:
        print(f"    said {outcome.said[:150]!r}\n  wanted {outcome.wanted[:150]!r}", flush=True)
    return row


def _part(outcomes: list[Outcome], part: str) -> str:
    of = [outcome.right for outcome in outcomes if outcome.part == part]
    return f"{sum(of)}/{len(of)}"


def make_recall(seed: int, tries: int, distance: int) -> list[trials.Trial]:
    """Tries of one distance; every fourth thinks."""
    rng = random.Random(seed + distance)
    passages = trials.Passages(_tokenizer(), seed)
    return [trials.recall(rng, passages, distance, index % 4 == 3) for index in range(tries)]


def make_tool(seed: int, tries: int) -> list[trials.Trial]:
    """Half of them behind 300 tokens of other text; every fourth thinks."""
    rng = random.Random(seed)
    passages = trials.Passages(_tokenizer(), seed)
    return [trials.tool(rng, passages, index % 2 * 300, index % 4 == 3) for index in range(tries)]


def make_talk(with_tools: bool) -> list[trials.Trial]:
    """Every question the model was made for, word for word; every fourth thinks."""
    rng = random.Random(0)
    asked = [(q, answer) for questions, answer in smalltalk.TOPICS for q in questions.split("|")]
    return [
        trials.small_talk(rng, question, answer, with_tools, index % 4 == 3)
        for index, (question, answer) in enumerate(asked)
    ]


def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(HEARTH_TINY / "tokenizer.json"))


async def evaluate(options: argparse.Namespace) -> Report:
    """All rows, one after the other, the tries of each spread over the servers."""
    seed, tries = int(options.seed), int(options.tries)
    weights = (HEARTH_TINY / "model.safetensors").read_bytes()
    before = environment()
    rows: list[Row] = []
    asker = Asker()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(options.servers):
            server = await stack.enter_async_context(hearth(HEARTH_TINY))
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=900)
            await stack.enter_async_context(client)
            for _ in range(OPEN_REQUESTS):
                asker.places.put_nowait(client)
        for distance in DISTANCES:
            made = make_recall(seed, tries, distance)
            rows.append(await measure(f"recall at {distance}", asker, made, try_answer))
        rows.append(await measure("tool call and answer", asker, make_tool(seed, tries), try_tool))
        for name, with_tools in (("small talk", False), ("small talk, with tools", True)):
            rows.append(await measure(name, asker, make_talk(with_tools), try_answer))
    return Report(
        model_sha256=hashlib.sha256(weights).hexdigest(),
        model_bytes=len(weights),
        seed=seed,
        tries=tries,
        servers=options.servers,
        rows=rows,
        thinking=asker.thinking,
        environment=before,
    )


def main() -> int:
    """0 when every row of recall and tool calls reaches the target."""
    parser = argparse.ArgumentParser(prog="make eval-tiny", description=__doc__)
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--servers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "eval.json")
    options = parser.parse_args()
    report = asyncio.run(evaluate(options))
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    thinking = report.thinking
    print(
        f"thinking on: {thinking.on_and_brief} of {thinking.on} thought briefly; "
        f"off: {thinking.off_and_absent} of {thinking.off} did not think"
    )
    return int(any(row.share < TARGET for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
