"""What a compaction costs a conversation: `python -m ops.bench.compaction`.

hearth-tiny that never ends by itself, so that a summary has the length of one; Responses, greedy.
Every other request is given one token to answer with, so its time is that to the first token.
Ratios are those of one round, in one server; `cold` is the very request of `first` with the cache
off. Writes `compaction.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from api.bench.machine import Environment, environment
from ops.bench.processes import Hearth, hearth
from runtime.embedded import HEARTH_TINY

_REPORT = Path(__file__).parent / "compaction.json"
_NUM_TURNS = 5
_TURN_SENTENCES = 14
_RULES = 40
_SUMMARY_TOKENS = 256


class Round(msgspec.Struct):
    """Milliseconds to the first token, and cached tokens of how many.

    `hot` is a turn before the compaction, `summary` the request for the summary, `first` the turn
    after it once it was prepared, `at_once` one that is sent as soon as the summary is there;
    `summary_alone` is a summary beside which nothing is prepared, and `unprepared` what follows it.
    """

    times_ms: dict[str, float]
    cached: dict[str, tuple[int, int]]


class Figures(msgspec.Struct):
    environment: Environment
    rounds: list[Round]
    medians_ms: dict[str, float]
    over_hot: dict[str, float]


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


class Session:
    """One conversation, and what its requests took."""

    def __init__(self, server: Hearth, seed: str) -> None:
        self._server = server
        self._seed = seed
        rules = " ".join(f"Rule {n} of {seed}: be kind to boat {n}." for n in range(_RULES))
        self.history: list[Any] = [said("developer", rules)]
        self.made = Round({}, {})

    def say(self, number: int) -> None:
        """Another turn of the user's, and what the model answered before."""
        words = " ".join(f"{self._seed} {number}.{n}: a kettle." for n in range(_TURN_SENTENCES))
        self.history += [said("user", words), said("assistant", f"Noted {number}. " * 40)]

    async def ask(self, name: str | None, *more: Any, **fields: Any) -> Any:
        """An answer; its time is kept under the name."""
        body = {
            "model": "bench",
            "input": [*self.history, *more],
            "max_output_tokens": 1,
            "temperature": 0,
            "store": False,
            "session_id": self._seed,
        } | fields
        start = time.perf_counter()
        answer = await asyncio.to_thread(_posted, self._server.port, json.dumps(body).encode())
        if name is not None:
            usage = answer["usage"]
            self.made.times_ms[name] = round((time.perf_counter() - start) * 1000, 2)
            cached = usage["input_tokens_details"]["cached_tokens"]
            self.made.cached[name] = cached, usage["input_tokens"]
        return answer

    async def compact(self, name: str | None = None) -> Any:
        """The history becomes what a client keeps after a compaction."""
        answer = await self.ask(
            name, {"type": "compaction_trigger"}, max_output_tokens=_SUMMARY_TOKENS
        )
        self.history = [one for one in self.history if one["role"] != "assistant"]
        self.history += answer["output"]
        return answer

    async def prepared(self, answer: Any) -> None:
        """Until what follows is computed ahead."""
        path = f"/v1/prewarm/{answer['hearth']['compaction']['prewarm']}"
        await asyncio.to_thread(_wait_for, self._server.port, path)


def _posted(port: int, body: bytes) -> Any:
    url, headers = f"http://127.0.0.1:{port}/v1/responses", {"content-type": "application/json"}
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310
        return json.loads(answer.read())


def _got(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return json.loads(answer.read())


def _wait_for(port: int, path: str) -> None:
    while _got(port, path)["status"] in ("waiting", "queued", "running"):
        time.sleep(0.02)


async def begun(server: Hearth, seed: str) -> Session:
    """A conversation of some turns."""
    session = Session(server, seed)
    for number in range(_NUM_TURNS):
        session.say(number)
    await session.ask(None, said("user", "Go on."))
    return session


async def one_round(ahead: Hearth, without: Hearth, seed: str) -> Round:
    """The same compaction three times: prepared, asked at once, and with nothing prepared."""
    session = await begun(ahead, f"{seed} boat")
    await session.ask("hot", said("user", "Go on. And say how far it is."))
    await session.prepared(await session.compact("summary"))
    question = said("user", "And now? Say what is next.")
    await session.ask("first", question)
    await session.ask("hot_after", question, said("user", "Go on. And say how far it is."))
    await session.ask("cold", question, cache_mode="off")
    hurried = await begun(ahead, f"{seed} lamp")
    await hurried.compact()
    await hurried.ask("at_once", question)
    unprepared = await begun(without, f"{seed} door")
    await unprepared.compact("summary_alone")
    await unprepared.ask("unprepared", question)
    session.made.times_ms |= hurried.made.times_ms | unprepared.made.times_ms
    session.made.cached |= hurried.made.cached | unprepared.made.cached
    return session.made


def endless(folder: Path) -> Path:
    """hearth-tiny with an end token that it never says."""
    shutil.copytree(HEARTH_TINY, folder)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text()) | {"eos_token_id": 0}
        (folder / name).write_text(json.dumps(config))
    tokenizer = folder / "tokenizer_config.json"
    config = json.loads(tokenizer.read_text()) | {"eos_token": "<|endoftext|>"}
    tokenizer.write_text(json.dumps(config))
    return folder


async def measure(rounds: int) -> Figures:
    """So many rounds after one that warms up."""
    began = environment()
    made: list[Round] = []
    with tempfile.TemporaryDirectory() as folder:
        model, one, other = endless(Path(folder) / "bench"), Path(folder) / "1", Path(folder) / "2"
        for home in (one, other):
            home.mkdir(mode=0o700)
        async with (
            hearth(model, one, spare_worker=False) as ahead,
            hearth(model, other, spare_worker=False, prewarm=False) as without,
        ):
            for number in range(rounds + 1):
                found = await one_round(ahead, without, f"round {number}")
                made += [found] * bool(number)

    def over_hot(name: str) -> float:
        ratios = [one.times_ms[name] / one.times_ms["hot"] for one in made]
        return round(statistics.median(ratios), 2)

    medians = {
        name: round(statistics.median(one.times_ms[name] for one in made), 2)
        for name in made[0].times_ms
    }
    names = ("first", "at_once", "unprepared", "cold")
    return Figures(began, made, medians, {name: over_hot(name) for name in names})


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.rounds))
    for name, ms in figures.medians_ms.items():
        cached, total = figures.rounds[-1].cached[name]
        print(f"{ms:9.1f} ms   {cached:6} of {total:6} cached   {name}")
    for name, ratio in figures.over_hot.items():
        print(f"{ratio:6.2f} x hot   {name}")
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


if __name__ == "__main__":
    main()
