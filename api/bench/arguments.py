"""The flags of `hearth bench`, apart from what measures: every command line is built with them."""

from __future__ import annotations

import argparse
from pathlib import Path

from api.counts import tokens_of
from runtime.embedded import HEARTH_TINY

BASELINE = "mlx-lm"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """The flags of `hearth bench`."""
    sub.add_argument(
        "peers",
        nargs="*",
        default=["hearth", BASELINE],
        metavar="PEER",
        help="a recipe of Hearth's; a recipe file (.toml); or the URL of a server that runs",
    )
    sub.add_argument(
        "--model", default=str(HEARTH_TINY), help="a directory, or what servers call it"
    )
    sub.add_argument("--second", help="another model to swap to (default: the same, renamed)")
    sub.add_argument(
        "--tokens", type=tokens_of, default=4096, help="length of the long prompts, such as 16k"
    )
    sub.add_argument("--streams", type=int, default=4, help="how many run at once")
    sub.add_argument("--rounds", type=int, default=3)
    sub.add_argument("--baseline", help=f"whom ratios are to (default: {BASELINE}, or the last)")
    sub.add_argument("--venvs", type=Path, help="where recipes install their servers")
    sub.add_argument("--install", action="store_true", help="install what is not there yet")
    sub.add_argument("--out", type=Path, help="folder for report.json and report.html")
