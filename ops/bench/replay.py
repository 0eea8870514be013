"""A long agent conversation with two siblings, replayed over restarts: how much is computed twice.

`python -m ops.bench.replay` prints the sums; `--json FILE` writes them with the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, cast

import msgspec
from transformers import AutoTokenizer

from api.bench.machine import Environment, environment
from ops.bench.client import Cache
from ops.bench.processes import hearth
from runtime.embedded import HEARTH_TINY

AGENTS = ("Ada", "Bob", "Cid")
CODE = "velvet-onyx-41"
_RIVER = "On day {} the river was calm and the boats stayed in the harbour."
_NUM_SHARED = 100


class Turn(msgspec.Struct):
    """One request. `num_new_tokens` of its prompt no earlier prompt began with."""

    agent: str
    is_first_after_start: bool
    num_prompt_tokens: int
    num_prefilled_tokens: int
    num_new_tokens: int
    tier: str
    recalls: bool


class Replay(msgspec.Struct):
    """All turns; `ratio` is what was prefilled over the distinct tokens of all prompts."""

    turns: list[Turn]
    num_prefilled_tokens: int
    num_distinct_tokens: int
    ratio: float


class Report(msgspec.Struct):
    """What is written of a replay."""

    environment: Environment
    num_agents: int
    num_turns: int
    restart_every: int
    num_prefilled_tokens: int
    num_distinct_tokens: int
    ratio: float
    num_recalls: int


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Hearth(msgspec.Struct):
    cache: Cache


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage
    hearth: _Hearth


class _Prompts:
    """Every prompt so far, as a tree of token ids; counts the tokens that are new."""

    def __init__(self, model: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model))  # pyright: ignore[reportUnknownMemberType]
        self._root: dict[int, Any] = {}
        self.num_tokens = 0

    def add(self, messages: list[dict[str, str]]) -> int:
        """Take a prompt in; how many of its tokens are new."""
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        node, before = self._root, self.num_tokens
        for token_id in self._tokenizer.encode(text, add_special_tokens=False):
            if token_id not in node:
                node[token_id] = {}
                self.num_tokens += 1
            node = cast("dict[int, Any]", node[token_id])
        return self.num_tokens - before


async def replay(home: Path, num_turns: int, restart_every: int) -> Replay:
    """Let each agent take so many turns, with a restart of the server after every few."""
    prompts = _Prompts(HEARTH_TINY)
    histories = {name: _beginning(name) for name in AGENTS}
    turns: list[Turn] = []
    for start in range(0, num_turns, restart_every):
        async with hearth(HEARTH_TINY, home) as server:
            for number in range(start, min(start + restart_every, num_turns)):
                for name, messages in histories.items():
                    if number:
                        messages.append({"role": "user", "content": "What is the code word?"})
                    num_new = prompts.add(messages)
                    answer = await asyncio.to_thread(_ask, server.port, messages)
                    text = answer.choices[0].message.content or ""
                    messages.append({"role": "assistant", "content": text})
                    prompt_tokens = answer.usage.prompt_tokens
                    cache = answer.hearth.cache
                    turns.append(
                        Turn(
                            agent=name,
                            is_first_after_start=number == start,
                            num_prompt_tokens=prompt_tokens,
                            num_prefilled_tokens=prompt_tokens - cache.cached_tokens,
                            num_new_tokens=num_new,
                            tier=cache.tier,
                            recalls=CODE in text,
                        )
                    )
    num_prefilled = sum(turn.num_prefilled_tokens for turn in turns)
    return Replay(turns, num_prefilled, prompts.num_tokens, num_prefilled / prompts.num_tokens)


def _beginning(name: str) -> list[dict[str, str]]:
    filler = " ".join(_RIVER.format(day) for day in range(_NUM_SHARED))
    return [
        {"role": "system", "content": f"You are helpful. The code word is {CODE}."},
        {"role": "user", "content": filler},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": f"I am {name}. What is the code word?"},
    ]


def _ask(port: int, messages: list[dict[str, str]]) -> _Answer:
    body = {"model": "bench", "messages": messages, "temperature": 0, "max_tokens": 60}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=msgspec.json.encode(body),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        return msgspec.json.decode(answer.read(), type=_Answer)


def main() -> None:
    """Replay 40 turns of each agent with a restart every 5, and print the sums."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.replay", description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--restart-every", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        result = asyncio.run(replay(Path(home), arguments.turns, arguments.restart_every))
    report = Report(
        environment=environment(),
        num_agents=len(AGENTS),
        num_turns=arguments.turns,
        restart_every=arguments.restart_every,
        num_prefilled_tokens=result.num_prefilled_tokens,
        num_distinct_tokens=result.num_distinct_tokens,
        ratio=round(result.ratio, 3),
        num_recalls=sum(turn.recalls for turn in result.turns),
    )
    print(
        f"{len(result.turns)} turns: prefilled {report.num_prefilled_tokens} of "
        f"{report.num_distinct_tokens} distinct tokens, ratio {report.ratio:.3f}; "
        f"{report.num_recalls} recall the code word"
    )
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
