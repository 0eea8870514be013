"""What a hot turn costs now, over what it cost in an earlier checkout.

`python -m ops.bench.hot_turn --before CHECKOUT` has the same conversation with servers of both, and
with a second server of this checkout, whose ratio to the first says how far the figures can be
trusted. A turn is asked of one server after the other. Writes `hot_turn.json`, after each round.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from api.bench.machine import Environment, environment
from ops.bench.first_token import Conversation, Protocol, Spent
from ops.bench.processes import Hearth, hearth
from ops.bench.random_models import write_slender

NUM_TOKENS = 8192
TURN_TOKENS = 50
AIM = 1.02
_CONTEXT = 32_768
_REPORT = Path(__file__).parent / "hot_turn.json"
_WARM_TURNS = 3
_PAUSE_S = 0.03
"""Between two turns; what follows an answer is the turn's as well."""

Server = Literal["before", "now", "again"]


class Turn(NamedTuple):
    """Milliseconds: until the first token, and processor time from its request to the next one."""

    ttft_ms: float
    server_cpu_ms: float
    worker_cpu_ms: float
    all_cpu_ms: float


class Ratio(msgspec.Struct):
    """Of all turns: this checkout's figure over the other one's, turn by turn.

    `low` and `high` are where the median lies with 95 % confidence, the quartiles are the turns'.
    """

    figure: str
    over: Server
    now_ms: float
    other_ms: float
    median: float
    low: float
    high: float
    quartiles: tuple[float, float]
    rounds: list[float]
    """The medians of the rounds, each with servers of its own."""


class Report(msgspec.Struct):
    """One run. `before` is the other checkout's commit."""

    environment: Environment
    model: str
    protocol: Protocol
    before: str
    num_tokens: int
    turn_tokens: int
    num_turns: int
    aim: float
    ratios: list[Ratio]


class _Asked:
    """One server's conversation, with what its turns cost."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._spent = Spent(conversation.server)
        self._ttft_ms = 0.0
        self.turns: list[Turn] = []

    async def ask(self) -> None:
        """One more turn; the one before it is over with that."""
        self.finish()
        told = await self._conversation.ask(self._conversation.num_words(TURN_TOKENS))
        if told.num_prompt_tokens - told.cache.cached_tokens > 4 * TURN_TOKENS:
            raise RuntimeError(f"the turn was not hot: {told.cache}")
        self._ttft_ms = told.ttft_s * 1000

    def finish(self) -> None:
        """Count what was spent since the last request."""
        cpu_s = self._spent.since()
        if self._ttft_ms:
            server, worker = cpu_s["server"] * 1000, cpu_s["worker"] * 1000
            self.turns.append(Turn(self._ttft_ms, server, worker, sum(cpu_s.values()) * 1000))
        self._spent = Spent(self._conversation.server)


async def one_round(
    model: Path, before: Path, arguments: argparse.Namespace, number: int
) -> dict[Server, list[Turn]]:
    """Fresh servers, and the turns of the same conversations with each of them."""
    checkouts: dict[Server, Path | None] = {"before": before, "now": None, "again": None}
    turns: dict[Server, list[Turn]] = {name: [] for name in checkouts}
    names = _in_turn([*checkouts], number)
    async with AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(
                hearth(model, checkout=checkouts[name], kv_disk=not arguments.no_disk)
            )
            for name in names
        }
        for talk in range(arguments.talks):
            seed = number * arguments.talks + talk
            asked = {
                name: await _begun(server, arguments, seed) for name, server in servers.items()
            }
            for turn in range(arguments.turns):
                for name in _in_turn(names, turn):
                    await asked[name].ask()
                    await asyncio.sleep(_PAUSE_S)
            for name in names:
                asked[name].finish()
                turns[name] += asked[name].turns
    return turns


async def _begun(server: Hearth, arguments: argparse.Namespace, seed: int) -> _Asked:
    """A conversation of that length."""
    talk = Conversation(server, "few turns", arguments.protocol, seed, answer_tokens=1)
    await talk.grow_to(arguments.tokens)
    for _ in range(_WARM_TURNS):
        await talk.ask(talk.num_words(TURN_TOKENS))
    return _Asked(talk)


def _in_turn(names: list[Server], turn: int) -> list[Server]:
    """Each is asked at each place, and behind each other one, as often as the others."""
    start = turn % len(names)
    return (names[start:] + names[:start])[:: -1 if turn // len(names) % 2 else 1]


def ratio(figure: str, over: Server, rounds: Sequence[dict[Server, list[Turn]]]) -> Ratio:
    """Of the turns of all rounds."""
    pairs = [
        [
            (mine._asdict()[figure], other._asdict()[figure])
            for mine, other in zip(those["now"], those[over], strict=True)
        ]
        for those in rounds
    ]
    of_rounds = [[mine / max(other, 1e-9) for mine, other in one] for one in pairs]
    found = sorted(value for one in of_rounds for value in one)
    aside = 1.96 * math.sqrt(len(found)) / 2
    first = max(0, math.floor(len(found) / 2 - aside))
    last = min(len(found) - 1, math.ceil(len(found) / 2 + aside))
    lower, _, upper = statistics.quantiles(found, n=4)
    mine, others = zip(*(pair for one in pairs for pair in one), strict=True)
    return Ratio(
        figure=figure,
        over=over,
        now_ms=round(statistics.median(mine), 3),
        other_ms=round(statistics.median(others), 3),
        median=round(statistics.median(found), 4),
        low=round(found[first], 4),
        high=round(found[last], 4),
        quartiles=(round(lower, 4), round(upper, 4)),
        rounds=[round(statistics.median(one), 4) for one in of_rounds],
    )


async def commit_of(checkout: Path) -> str:
    """The commit that a checkout is of."""
    command = ("git", "-C", str(checkout), "rev-parse", "--short", "HEAD")
    asked = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await asked.communicate()
    return said.decode().strip()


async def run(model: Path, arguments: argparse.Namespace) -> None:
    """All rounds; the report is written after each."""
    before = arguments.before.resolve()
    began, commit = environment(), await commit_of(before)
    rounds: list[dict[Server, list[Turn]]] = []
    for number in range(arguments.rounds):
        rounds.append(await one_round(model, before, arguments, number))
        overs: tuple[Server, ...] = ("before", "again")
        ratios = [ratio(figure, over, rounds) for over in overs for figure in Turn._fields]
        report = Report(
            environment=began,
            model=model.name,
            protocol=arguments.protocol,
            before=commit,
            num_tokens=arguments.tokens,
            turn_tokens=TURN_TOKENS,
            num_turns=sum(len(one["now"]) for one in rounds),
            aim=AIM,
            ratios=ratios,
        )
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        print(f"{report.num_turns} turns")
        for one in ratios:
            span = f"{one.low:.3f} to {one.high:.3f}"
            of = f"{one.now_ms:.2f} ms now, {one.other_ms:.2f} {one.over}"
            print(
                f"  {one.figure:14s} x{one.median:.3f} ({span}); {of}",
                flush=True,
            )


def main() -> None:
    """Parse the command line, run, print and write."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.hot_turn", description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--turns", type=int, default=42, help="of each conversation")
    parser.add_argument("--talks", type=int, default=6, help="conversations of each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--protocol", choices=["chat", "messages"], default="chat")
    parser.add_argument("--no-disk", action="store_true", help="with KV in memory only")
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_slender(Path(folder) / "slender", 1, _CONTEXT)
        asyncio.run(run(model.resolve(), arguments))


if __name__ == "__main__":
    main()
