"""`python -m ops.bench peers`: `hearth bench`, its report in `docs/bench`, its table in README.

The recipes and everything that measures are in `api/bench`, because users have no `ops`.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from api.bench.command import measure, write
from api.bench.report import markdown, table
from api.cli.arguments import add_bench_arguments

_ROOT = Path(__file__).resolve().parents[3]
REPORT = _ROOT / "docs" / "bench"
README = _ROOT / "README.md"
BEGIN, END = "<!-- bench: python -m ops.bench peers -->", "<!-- /bench -->"


def main(words: Sequence[str]) -> None:
    """Measure as `hearth bench` does; by default in `docs/bench` and README."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench peers", description=__doc__)
    add_bench_arguments(parser)
    parser.set_defaults(out=REPORT)
    arguments = parser.parse_args(words)
    report = measure(arguments, shlex.join(["python", "-m", "ops.bench", "peers", *words]))
    print(table(report))
    write(report, arguments.out)
    if arguments.out == REPORT:
        README.write_text(with_table(README.read_text("utf-8"), markdown(report)), "utf-8")


def with_table(text: str, lines: str) -> str:
    """The text with these lines between the marks. Raises ValueError without the marks."""
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"there is no place for the table: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{lines}\n{END}{after}"
