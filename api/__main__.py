"""The command line's front door: reads it, does one command, turns errors into exit codes."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from api.cli.commands import COMMANDS, TABLES, TO_SERVERS, WITHOUT_SETTINGS, parser
from api.cli.errors import Misused, NoServer
from runtime.config.running import at_running
from runtime.config.settings import Settings, given_outside, load_settings
from runtime.errors import HearthError, SettingsError

_FLAGS = ("config", *(name for name in Settings.__struct_fields__ if name not in TABLES))
_BY_NAME = {command.name: command for command in COMMANDS}
_INTERRUPTED = 130


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and leave with its exit code."""
    code = main(argv)
    cold = sys.modules.get("store.cold")
    if cold is not None and cold.ColdBucket.is_used:
        # A thread of the object store's that wants Python while that ends aborts the process.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code, as `api.cli` lists them."""
    commands = parser()
    arguments = commands.parse_args(argv)
    if arguments.command is None:
        commands.print_help()
        return 0
    try:
        return _run(arguments)
    except HearthError as error:
        sys.stderr.write(f"hearth: {error.message}\n")
        if isinstance(error, SettingsError | Misused):
            return 2
        return 3 if isinstance(error, NoServer) else 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader, head for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: argparse.Namespace) -> int:
    command = _BY_NAME[arguments.command]
    if command.name in WITHOUT_SETTINGS:  # it works also where those that there are do not
        return command.run(Settings(home=Path()), arguments)
    given = {flag: vars(arguments).get(flag) for flag in _FLAGS}
    flags = {flag: value for flag, value in given.items() if value is not None}
    try:
        settings = load_settings(flags, os.environ)
    except SettingsError as error:
        if command.name != "doctor":
            raise
        arguments.config_trouble = error.message
        home = flags.get("home") or os.environ.get("HEARTH_HOME") or Path.home() / ".hearth"
        settings = Settings(home=Path(home).absolute())
    config = flags.get("config") or os.environ.get("HEARTH_CONFIG")
    arguments.config = Path(config).expanduser().absolute() if config else None
    arguments.given = given_outside(flags, os.environ)
    if command.name in TO_SERVERS:
        settings = at_running(settings, arguments.given)
    return command.run(settings, arguments)


if __name__ == "__main__":
    run()
