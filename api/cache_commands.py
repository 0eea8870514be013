"""The command line of `hearth cache`; it imports nothing that takes time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def add_commands(
    parser: argparse.ArgumentParser, add_settings: Callable[[argparse.ArgumentParser], None]
) -> None:
    """The subcommands of `hearth cache`; `add_settings` adds the flags for the settings."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = commands.add_parser("ls", help="what is kept, the latest used first")
    listing.add_argument("--model", dest="of_model", metavar="MODEL", help="only of this model")
    showing = commands.add_parser("show", help="one conversation and its slots")
    showing.add_argument("conversation", help="as for rm")
    pinning = commands.add_parser("pin", help="keep a conversation and what it becomes")
    pinning.add_argument("conversation", help="as for rm")
    pinning.add_argument(
        "--ahead", dest="of_model", metavar="MODEL", help="also before anything of it is on disk"
    )
    unpinning = commands.add_parser("unpin", help="let it leave again when its time is over")
    unpinning.add_argument("conversation", help="as for rm")
    removing = commands.add_parser("rm", help="delete for good, on disk and in memory")
    removing.add_argument(
        "conversation", nargs="?", help="a session id, or the beginning of an id that ls shows"
    )
    removing.add_argument(
        "--model",
        dest="of_model",
        metavar="MODEL",
        help="everything that was asked by this name",
    )
    removing.add_argument("--all", action="store_true", dest="everything", help="everything")
    removing.add_argument(
        "--yes", action="store_true", dest="is_sure", help="do not ask, for --all"
    )
    stats = commands.add_parser("stats", help="sums by model and tier, and counters")
    verify = commands.add_parser("verify", help="read everything; what is damaged goes")
    collecting = commands.add_parser(
        "gc", help="expire, merge and evict now what is due; the server does it now and then"
    )
    exporting = commands.add_parser("export", help="write a prompt-cache file of mlx-lm")
    exporting.add_argument("conversation", nargs="?", help="as for rm")
    exporting.add_argument("--slot", help="the chain that ends in this slot")
    exporting.add_argument("file", type=Path, help="the file to write")
    importing = commands.add_parser("import", help="take in a prompt-cache file of mlx-lm")
    importing.add_argument("file", type=Path, help="the file to read")
    importing.add_argument(
        "--model", dest="of_model", metavar="MODEL", required=True, help="the model it is of"
    )
    importing.add_argument("--prompt-file", type=Path, help="the text that was cached")
    importing.add_argument("--tokens", type=Path, help="the token ids that were cached, as JSON")
    own = (showing, pinning, unpinning, collecting)
    for command in (listing, removing, stats, verify, exporting, importing, *own):
        command.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
        add_settings(command)
