"""`make judge`: run the checks, keep what each found, and write docs/judge.md of all."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from importlib import metadata
from pathlib import Path

import msgspec

from ops.judge.bench import Amount, Bench
from ops.judge.beside_mlx_lm import greedy_texts, perplexities
from ops.judge.models import SOURCES, Judged, made
from ops.judge.outcome import Outcome
from ops.judge.reference import reference
from ops.judge.report import Report, page
from ops.judge.server import Server
from ops.judge.shapes import pieces, structured
from ops.judge.talks import conversations, windows
from runtime.version import VERSION

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".judge"
LOCK = ROOT / "requirements-judge.lock"
PAGE = ROOT / "docs" / "judge.md"

CHECKS: dict[str, Callable[[Bench], Awaitable[Outcome]]] = {
    "greedy": greedy_texts,
    "perplexity": perplexities,
    "conversation": conversations,
    "window": windows,
    "pieces": pieces,
    "schemas": structured,
}


class Found(msgspec.Struct):
    """One outcome as it is kept, with what it was found with."""

    versions: dict[str, str]
    amount: Amount
    outcome: Outcome


def arguments() -> argparse.Namespace:
    whole = Amount()
    parser = argparse.ArgumentParser(prog="python -m ops.judge", description=__doc__)
    parser.add_argument("--model", choices=[one.name for one in SOURCES], help="only this one")
    told = "only this one, or these; of the others the page has what was found before"
    parser.add_argument("--check", choices=CHECKS, action="append", help=told)
    parser.add_argument("--prompts", type=int, default=whole.num_prompts)
    parser.add_argument("--longest", type=int, default=whole.longest, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=whole.num_tokens, help="in an answer")
    parser.add_argument("--schemas", type=int, default=whole.num_schemas)
    parser.add_argument("--turns", type=int, default=whole.num_turns)
    return parser.parse_args()


async def main() -> int:
    asked = arguments()
    amount = Amount(asked.prompts, asked.longest, asked.tokens, asked.schemas, asked.turns)
    models = made(FOLDER / "packages", FOLDER / "models")
    for model in models:
        if asked.model in (None, model.name):
            await _judge(model, amount, asked.check or list(CHECKS))
    report = _report(models)
    PAGE.write_text(page(report, LOCK.read_text("utf-8")), "utf-8")
    outcomes = [one for ones in report.outcomes.values() for one in ones]
    num_unexplained = sum(one.num_unexplained for one in outcomes)
    print(f"{PAGE}: {num_unexplained} divergences are not explained")
    return 1 if num_unexplained else 0


async def _judge(model: Judged, amount: Amount, checks: list[str]) -> None:
    with tempfile.TemporaryDirectory() as home:
        async with reference(model.folder) as beside, Server(model.folder, Path(home)) as calm:
            bench = Bench(model, beside, calm, amount)
            for check in checks:
                begun_s = time.monotonic()
                outcome = await CHECKS[check](bench)
                at = _kept(model, check)
                at.parent.mkdir(exist_ok=True)
                at.write_bytes(msgspec.json.encode(Found(_versions(), amount, outcome)))
                _tell(model, outcome, time.monotonic() - begun_s)


def _tell(model: Judged, outcome: Outcome, took_s: float) -> None:
    for one in outcome.divergences:
        print(f"  {'' if one.is_explained else '? '}{one.where}: {one.reason}")
    told = f"{outcome.num_equal} of {outcome.num} equal"
    print(f"{model.name}: {outcome.check}: {told} ({took_s:.0f} s)", flush=True)


def _kept(model: Judged, check: str) -> Path:
    return FOLDER / "found" / f"{model.name}-{check}.json"


def _report(models: list[Judged]) -> Report:
    """Of all that was found with these versions, in this run or before."""
    versions = _versions()
    report = Report(versions, {}, {})
    for model in models:
        for check in CHECKS:
            at = _kept(model, check)
            if not at.exists():
                continue
            found = msgspec.json.decode(at.read_bytes(), type=Found)
            if found.versions == versions:
                report.amounts[f"{model.title}, {found.outcome.check}"] = found.amount
                report.outcomes.setdefault(model.title, []).append(found.outcome)
    return report


def _versions() -> dict[str, str]:
    names = ("mlx", "mlx-lm", "transformers", "tokenizers", "llguidance", "jsonschema", "gguf")
    return {"Hearth": VERSION} | {name: metadata.version(name) for name in names}


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
