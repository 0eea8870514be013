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
        help="a built-in recipe, a recipe file (.toml), or the URL of a running server",
    )
    sub.add_argument(
        "--model",
        default=str(HEARTH_TINY),
        help="a model directory, or a name that the servers know",
    )
    sub.add_argument(
        "--second", help="a second model to swap to (default: the same one under another name)"
    )
    sub.add_argument(
        "--tokens", type=tokens_of, default=4096, help="length of the long prompts, such as 16k"
    )
    sub.add_argument("--streams", type=int, default=4, help="how many requests run at once")
    sub.add_argument("--rounds", type=int, default=3, help="how often each server is measured")
    sub.add_argument(
        "--baseline",
        help=f"what others are compared with (default: {BASELINE}, or the last)",
    )
    sub.add_argument("--venvs", type=Path, help="directory into which --install installs servers")
    sub.add_argument("--install", action="store_true", help="install the servers that are missing")
    sub.add_argument("--out", type=Path, help="directory for report.json and report.html")
