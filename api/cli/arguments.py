"""The flags of `hearth cache` and `hearth bench`, which have most; importing them takes no time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from runtime.config.units import TOKENS, number_in
from runtime.embedded import HEARTH_TINY

_CONVERSATION = "a session id, or the first characters of an id that ls shows"
BASELINE = "mlx-lm"


def tokens_of(text: str) -> int:
    """A number of tokens on the command line: `4096`, `32k`, with the units of the configuration.

    Raises:
        argparse.ArgumentTypeError: it is no number of tokens.
    """
    number = int(text) if text.isascii() and text.isdigit() else number_in(text, TOKENS)
    if not isinstance(number, int) or number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not {TOKENS.name} such as 4096 or 32k")
    return number


def add_cache_commands(
    parser: argparse.ArgumentParser, add_settings: Callable[[argparse.ArgumentParser], None]
) -> None:
    """The subcommands of `hearth cache`; `add_settings` adds the flags for the settings."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = commands.add_parser("ls", help="list conversations, the latest used first")
    listing.add_argument("--model", dest="of_model", metavar="MODEL", help="only of this model")
    showing = commands.add_parser("show", help="show a conversation and its slot files")
    showing.add_argument("conversation", help=_CONVERSATION)
    pinning = commands.add_parser("pin", help="keep a conversation, also as it grows")
    pinning.add_argument("conversation", help=_CONVERSATION)
    pinning.add_argument(
        "--ahead",
        dest="of_model",
        metavar="MODEL",
        help="its model, if nothing of it is on disk yet",
    )
    unpinning = commands.add_parser("unpin", help="let a pinned conversation expire again")
    unpinning.add_argument("conversation", help=_CONVERSATION)
    removing = commands.add_parser("rm", help="delete conversations, on disk and in memory")
    removing.add_argument("conversation", nargs="?", help=_CONVERSATION)
    removing.add_argument(
        "--model", dest="of_model", metavar="MODEL", help="all conversations with this model"
    )
    removing.add_argument("--all", action="store_true", dest="everything", help="all conversations")
    removing.add_argument(
        "--yes", action="store_true", dest="is_sure", help="with --all: do not ask first"
    )
    stats = commands.add_parser("stats", help="totals by model and tier, and counters")
    verify = commands.add_parser("verify", help="read every byte, and set damaged files aside")
    collecting = commands.add_parser(
        "gc", help="clean up now: expire, merge and evict (the server also does it by itself)"
    )
    exporting = commands.add_parser("export", help="write a prompt-cache file of mlx-lm")
    exporting.add_argument("conversation", nargs="?", help=_CONVERSATION)
    exporting.add_argument("--slot", help="what ends in this slot, instead of a conversation")
    exporting.add_argument("file", type=Path, help="the file to write")
    importing = commands.add_parser("import", help="read a prompt-cache file of mlx-lm")
    importing.add_argument("file", type=Path, help="the file to read")
    importing.add_argument(
        "--model", dest="of_model", metavar="MODEL", required=True, help="the model it is for"
    )
    importing.add_argument("--prompt-file", type=Path, help="file with the text that was cached")
    importing.add_argument("--tokens", type=Path, help="file with the cached token ids, as JSON")
    own = (showing, pinning, unpinning, collecting)
    for command in (listing, removing, stats, verify, exporting, importing, *own):
        command.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
        add_settings(command)


def add_bench_arguments(sub: argparse.ArgumentParser) -> None:
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
