"""The command line of `hearth cache`; it imports nothing that takes time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

_CONVERSATION = "a session id, or the first characters of an id that ls shows"


def add_commands(
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
