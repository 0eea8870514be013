"""The command line's front door: reads it, does one command, turns errors into exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from api.cli.commands import COMMANDS, TABLES, parser
from api.cli.connection import NoServer
from runtime.errors import HearthError, SettingsError
from runtime.settings import Settings, load_settings

_FLAGS = ("config", *(name for name in Settings.__struct_fields__ if name not in TABLES))
_BY_NAME = {command.name: command for command in COMMANDS}
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code, as `api.cli` lists them."""
    arguments = parser().parse_args(argv)
    try:
        return _run(arguments)
    except HearthError as error:
        sys.stderr.write(f"hearth: {error.message}\n")
        if isinstance(error, SettingsError):
            return 2
        return 3 if isinstance(error, NoServer) else 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader, head for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


# Each command imports what it needs: together that takes longer than most of them run.


def _run(arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "version":
            sys.stdout.write(f"hearth {version('hearth')}\n")
        case "key":
            _make_key()
        case "completion":
            import shtab  # noqa: PLC0415

            sys.stdout.write(shtab.complete(parser(), shell=arguments.shell))
        case "pull":
            from runtime.downloads import pull  # noqa: PLC0415

            sys.stdout.write(f"{pull(arguments.repo, is_allowed=True)}\n")
        case name:
            given = {flag: vars(arguments).get(flag) for flag in _FLAGS}
            flags = {flag: value for flag, value in given.items() if value is not None}
            return _BY_NAME[name].run(load_settings(flags, os.environ), arguments)
    return 0


def _make_key() -> None:
    from runtime.keys import digest_of, new_key  # noqa: PLC0415

    key = new_key()
    sys.stdout.write(f"key for the client, shown only now: {key}\n")
    sys.stdout.write(f'line for hearth.toml, [api_keys]:   NAME = "{digest_of(key)}"\n')


if __name__ == "__main__":
    sys.exit(main())
