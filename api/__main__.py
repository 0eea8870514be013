"""The command line: `hearth serve`, `pull`, `cache`, `doctor`, `version`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from api.cache_commands import add_commands
from runtime.errors import HearthError, SettingsError
from runtime.settings import Settings, load_settings

if TYPE_CHECKING:
    from api.app import House

_HELP = {
    "home": "directory of everything Hearth keeps (default ~/.hearth)",
    "host": "address to listen on (default 127.0.0.1, this machine only)",
    "port": "port to listen on (default 8420, 0 takes any free one)",
    "models_dir": "directory whose subdirectories are models",
    "default_model": "model for requests that name none",
    "preload": "models to load at boot, separated by commas (default: the default model)",
    "log_level": "debug, info, warning or error",
    "log_format": "console or json",
}
_TABLES = ("aliases", "api_keys", "models")
_FLAGS = ("config", *(name for name in Settings.__struct_fields__ if name not in _TABLES))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. 2 means that the settings cannot be used."""
    parsed = _parser().parse_args(argv)
    arguments = {name: vars(parsed).get(name) for name in (*_FLAGS, "repo")}
    command = parsed.command
    if command == "version":
        sys.stdout.write(f"hearth {version('hearth')}\n")
        return 0
    if command == "key":
        return _make_key()
    repo = arguments.pop("repo")
    flags = {name: value for name, value in arguments.items() if value is not None}
    try:
        return _pull(repo) if repo is not None else _run(parsed, load_settings(flags, os.environ))
    except HearthError as error:
        sys.stderr.write(f"hearth: {error.message}\n")
        return 2 if isinstance(error, SettingsError) else 1
    except KeyboardInterrupt:
        return 130


# Each command imports what it needs: together that takes longer than most of them run.


def _make_key() -> int:
    from runtime.keys import digest_of, new_key  # noqa: PLC0415

    key = new_key()
    print(f"key for the client, shown only now: {key}")
    print(f'line for hearth.toml, [api_keys]:   NAME = "{digest_of(key)}"')
    return 0


def _pull(repo: str) -> int:
    from runtime.downloads import pull  # noqa: PLC0415

    sys.stdout.write(f"{pull(repo, is_allowed=True)}\n")
    return 0


def _run(parsed: argparse.Namespace, settings: Settings) -> int:
    if parsed.command == "cache":
        from api.cache_cli import run  # noqa: PLC0415

        return run(settings, parsed)
    if parsed.command == "doctor":
        from api.doctor import report  # noqa: PLC0415

        return report(settings)
    from api.serve import serve  # noqa: PLC0415

    return serve(settings, lambda: _build(settings))


def _build(settings: Settings) -> House:
    from api.app import build_house  # noqa: PLC0415

    return build_house(settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hearth", description="A local server for LLMs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve models over HTTP")
    pull = commands.add_parser("pull", help="download a model into the Hugging Face cache")
    pull.add_argument("repo", metavar="REPO", help="such as mlx-community/Qwen3-4B-4bit")
    doctor = commands.add_parser("doctor", help="look for what is wrong with the setup")
    cache = commands.add_parser("cache", help="look at what was kept of conversations, delete it")
    add_commands(cache, _add_settings)
    commands.add_parser("key", help="make an API key and the digest that stands for it")
    commands.add_parser("version", help="print the version")
    for command in (serve, doctor):
        _add_settings(command)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="default: hearth.toml in home")
    for name in Settings.__struct_fields__:
        if name not in _TABLES:
            flag = "--" + name.replace("_", "-")
            parser.add_argument(flag, dest=name, metavar="VALUE", help=_HELP.get(name))


if __name__ == "__main__":
    sys.exit(main())
