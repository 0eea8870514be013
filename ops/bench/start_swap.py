"""Start, swap, back, and models in turn: `python -m ops.bench.start_swap --before CHECKOUT`.

The scenarios `start`, `swap` and `back` of `hearth bench`, without its others, and two models that
are asked in turn without a pause; of this server, of the one of another checkout and of
`mlx_lm.server`, in turn. Writes `start_swap.json`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path

import msgspec

from api.bench.ask import Target, ask
from api.bench.machine import Environment, environment
from api.bench.peers import Peer, lay_out
from api.bench.recipes import Recipe, find
from api.bench.scenarios import ANSWER_TOKENS, SETTLE_S
from api.bench.texts import CHARACTERS_PER_TOKEN, conversation, short_question
from runtime.embedded import HEARTH_TINY

BASELINE = "mlx-lm"
NUM_TURNS = 6
_REPORT = Path(__file__).parent / "start_swap.json"
_POLL_S = 0.005
_PATIENCE_S = 120.0
_SAYS_WHERE = (b"Hearth is ready at ", b"Starting httpd at ")


class Times(msgspec.Struct):
    """Milliseconds. `live` is until the server listens, `line` until it says where, and `start`
    until its first answer, all from the command; the others are until the first token. `turn` is a
    question to either model in turn, as soon as the other has answered.
    """

    live_ms: float
    line_ms: float
    start_ms: float
    swap_ms: float
    back_ms: float
    turn_ms: float


class Server(msgspec.Struct):
    """One server: medians over the rounds, and how often as fast as `mlx_lm.server`."""

    name: str
    medians: Times
    times_as_fast: Times


class Report(msgspec.Struct):
    """One run."""

    environment: Environment
    rounds: int
    num_tokens: int
    servers: list[Server]


def recipe_before(checkout: Path) -> Recipe:
    """The recipe of Hearth, for the code of another checkout."""
    recipe = find("hearth")
    interpreter, *rest = recipe.start
    return msgspec.structs.replace(
        recipe,
        name="before",
        start=(interpreter, "-P", *rest),
        env=recipe.env | {"PYTHONPATH": str(checkout)},
    )


def one_round(peer: Peer, num_tokens: int, number: int) -> Times:
    """All of it with one life of a server."""
    begun_s = time.perf_counter()
    try:
        with ThreadPoolExecutor(2) as beside:
            live_s, line_s = [beside.submit(one, peer, begun_s) for one in (_look, _read)]
            start_s = peer.start()
        second = peer.second
        assert second is not None
        talk = conversation(int(num_tokens * CHARACTERS_PER_TOKEN), 1000 + number)
        said = ask(peer.target, talk.first.messages, ANSWER_TOKENS).text
        time.sleep(SETTLE_S)
        swap_ms = _ttft_ms(second, 10 * number)
        time.sleep(SETTLE_S)
        turn = talk.first.then(said, talk.code)
        back_ms = ask(peer.target, turn.messages, ANSWER_TOKENS).ttft_ms
        both = (second, peer.target)
        turns_ms = [_ttft_ms(both[one % 2], 10 * number + one) for one in range(NUM_TURNS)]
    finally:
        peer.stop()
    return Times(
        live_ms=live_s.result() * 1000,
        line_ms=line_s.result() * 1000,
        start_ms=start_s * 1000,
        swap_ms=swap_ms,
        back_ms=back_ms,
        turn_ms=statistics.median(turns_ms),
    )


def _read(peer: Peer, begun_s: float) -> float:
    """Until it prints where it is, or for long; seconds."""
    while time.perf_counter() - begun_s < _PATIENCE_S:
        if peer.log.exists() and any(one in peer.log.read_bytes() for one in _SAYS_WHERE):
            break
        time.sleep(_POLL_S)
    return time.perf_counter() - begun_s


def _look(peer: Peer, begun_s: float) -> float:
    """Until whatever listens there gives any answer at all, or for long; seconds."""
    while time.perf_counter() - begun_s < _PATIENCE_S:
        address = peer.target.url.removesuffix("/v1") + "/health/live"
        try:
            urllib.request.urlopen(address, timeout=5).close()  # noqa: S310
            break
        except urllib.error.HTTPError as refusal:
            refusal.close()
            break
        except (OSError, HTTPException):  # it has no port yet, or nobody listens
            time.sleep(_POLL_S)
    return time.perf_counter() - begun_s


def _ttft_ms(target: Target, seed: int) -> float:
    return ask(target, short_question(seed).messages, ANSWER_TOKENS).ttft_ms


def measure(recipes: Sequence[Recipe], model: Path, rounds: int, num_tokens: int) -> Report:
    """All servers in turn, the other way round each time."""
    before = environment()
    found: dict[str, list[Times]] = {recipe.name: [] for recipe in recipes}
    with tempfile.TemporaryDirectory() as folder:
        models = lay_out(Path(folder), str(model), None)
        for number in range(rounds):
            for recipe in recipes[:: -1 if number % 2 else 1]:
                home = Path(folder) / f"{recipe.name}-{number}"
                times = one_round(Peer(recipe, models, home, Path(folder)), num_tokens, number)
                print(recipe.name, msgspec.json.encode(times).decode(), flush=True)
                found[recipe.name].append(times)
    medians = {name: _middle(times) for name, times in found.items()}
    base = medians[BASELINE]
    servers = [Server(name, one, _over(base, one)) for name, one in medians.items()]
    return Report(before, rounds, num_tokens, servers)


def _middle(times: Sequence[Times]) -> Times:
    """The median of every field."""
    columns = zip(*map(msgspec.structs.astuple, times), strict=True)
    return Times(*(round(statistics.median(column), 1) for column in columns))


def _over(base: Times, one: Times) -> Times:
    """How often `one` fits into `base`, field by field."""
    pairs = zip(msgspec.structs.astuple(base), msgspec.structs.astuple(one), strict=True)
    return Times(*(round(slow / fast, 2) for slow, fast in pairs))


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.start_swap", description=__doc__)
    parser.add_argument("--before", type=Path, help="a checkout of what it is compared with")
    parser.add_argument("--model", type=Path, default=HEARTH_TINY, help="and a copy of it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024, help="length of the conversation")
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    recipes = [find("hearth"), find(BASELINE)]
    if arguments.before is not None:
        recipes.insert(1, recipe_before(arguments.before.absolute()))
    report = measure(recipes, arguments.model, arguments.rounds, arguments.tokens)
    for server in report.servers:
        print(server.name, msgspec.structs.asdict(server.medians), server.times_as_fast)
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
