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
    listing.add_argument("--model", dest="of_model", help="only of this model")
    removing = commands.add_parser("rm", help="delete for good, on disk and in memory")
    removing.add_argument(
        "conversation", nargs="?", help="a session id, or the beginning of an id that ls shows"
    )
    removing.add_argument("--model", dest="of_model", help="everything of this model")
    removing.add_argument("--all", action="store_true", dest="everything", help="everything")
    stats = commands.add_parser("stats", help="sums by model and tier, and counters")
    verify = commands.add_parser("verify", help="read everything; what is damaged goes")
    exporting = commands.add_parser("export", help="write a prompt-cache file of mlx-lm")
    exporting.add_argument("conversation", nargs="?", help="as for rm")
    exporting.add_argument("--slot", help="the chain that ends in this slot")
    exporting.add_argument("file", type=Path, help="the file to write")
    importing = commands.add_parser("import", help="take in a prompt-cache file of mlx-lm")
    importing.add_argument("file", type=Path, help="the file to read")
    importing.add_argument("--model", dest="of_model", required=True, help="the model it is of")
    importing.add_argument("--prompt-file", type=Path, help="the text that was cached")
    importing.add_argument("--tokens", type=Path, help="the token ids that were cached, as JSON")
    for command in (listing, removing, stats, verify, exporting, importing):
        command.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
        add_settings(command)
