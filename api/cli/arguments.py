"""The flags of `hearth cache` and `hearth bench`, which have most; importing them takes no time."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from runtime.config.units import TOKENS, number_in
from runtime.embedded import HEARTH_TINY

_CONVERSATION = "a session id, or the first characters of an id that ls shows"
BASELINE = "mlx-lm"
AGENTS = "agents"
"""The first word of `hearth bench` when it replays their traffic."""


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
    """The flags of `hearth bench` and of `hearth bench agents`."""
    sub.add_argument(
        "peers",
        nargs="*",
        default=[],
        metavar="PEER",
        help="a built-in recipe, a recipe file (.toml), or the URL of a running server; "
        f"`{AGENTS}` before them replays the traffic of many agents instead of conversations",
    )
    sub.add_argument(
        "--model",
        default=str(HEARTH_TINY),
        help="a model directory, or a name that the servers know",
    )
    sub.add_argument("--second", help="a second model to swap to (default: a copy of the first)")
    sub.add_argument("--rounds", type=_count, help="how often each server is measured")
    sub.add_argument(
        "--minutes", type=_positive, help="how long it may take: then nothing new is begun"
    )
    sub.add_argument(
        "--baseline",
        help=f"what others are compared with (default: {BASELINE}, or the last)",
    )
    sub.add_argument("--venvs", type=Path, help="directory into which --install installs servers")
    sub.add_argument("--install", action="store_true", help="install the servers that are missing")
    sub.add_argument("--out", type=Path, help="directory for the report, as JSON and as a page")
    talks = sub.add_argument_group("conversations")
    talks.add_argument(
        "--tokens", type=tokens_of, help="length of the long prompts, such as 16k (default: 4096)"
    )
    talks.add_argument("--streams", type=_count, help="how many requests run at once (default: 4)")
    talks.add_argument(
        "--random-weights",
        action="store_true",
        default=None,
        help="the weights are random: do not compare answers with what they should hold",
    )
    _add_agents_arguments(sub.add_argument_group(AGENTS))


class _Flags(Protocol):
    """A parser, or a group of flags in its help."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action: ...


def _add_agents_arguments(group: _Flags) -> None:
    group.add_argument("--sessions", type=_count, help="how many agents there are (default: 8)")
    group.add_argument("--at-once", type=_count, help="how many run at once (default: 4)")
    group.add_argument(
        "--scale", type=_positive, help="tokens, over those that were published (default: 0.02)"
    )
    group.add_argument("--turns", type=_count, help="median turns of an agent (default: 43)")
    group.add_argument(
        "--pause-scale",
        type=_not_negative,
        help="pauses for tools, over those that were published (default: 0.1)",
    )
    group.add_argument("--seed", type=int, help="another one makes other traffic (default: 1)")
    group.add_argument(
        "--restart-at", type=_share, metavar="SHARE", help="restart after this share of the turns"
    )
    group.add_argument(
        "--swap-at",
        type=_share,
        metavar="SHARE",
        help="ask the second model once, after this share of the turns",
    )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _number(text: str, what: str, is_right: Callable[[float], bool]) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or not is_right(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return number


def _positive(text: str) -> float:
    return _number(text, "a number above 0", lambda number: number > 0)


def _not_negative(text: str) -> float:
    return _number(text, "a number from 0 on", lambda number: number >= 0)


def _share(text: str) -> float:
    return _number(text, "a share between 0 and 1", lambda number: 0 < number < 1)
