"""`hearth version`, `key` and `completion`: what needs neither a server nor settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib.metadata import version as version_of
from pathlib import Path
from typing import cast

import msgspec

from api.cli.views import show
from runtime.config.settings import Settings
from runtime.keys import digest_of, new_key

_PATHS = frozenset({"home", "config", "models_dir", "kv_dir", "log_file"})


class Version(msgspec.Struct):
    """What `hearth version --json` prints."""

    version: str


class NewKey(msgspec.Struct):
    """A key for a client, and what stands for it in `[api_keys]`."""

    key: str
    digest: str


def version(_: Settings, arguments: argparse.Namespace) -> int:
    """Print it."""
    found = Version(version_of("hearth"))
    return show(found, f"hearth {found.version}", as_json=arguments.as_json)


def key(_: Settings, arguments: argparse.Namespace) -> int:
    """Make a key; it is kept nowhere."""
    new = new_key()
    made = NewKey(new, digest_of(new))
    text = f"""\
key for the client, shown only now: {made.key}
line for hearth.toml, [api_keys]:   NAME = "{made.digest}\""""
    return show(made, text, as_json=arguments.as_json)


def completion(_: Settings, arguments: argparse.Namespace) -> int:
    """Print the shell's script. Files are completed wherever a path is wanted."""
    import shtab  # noqa: PLC0415 - a tenth of a second

    from api.cli.commands import parser  # noqa: PLC0415 - it is what knows this module

    top = parser()
    for action in _actions(top):
        if action.type is Path or action.dest in _PATHS:
            action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdout.write(shtab.complete(top, shell=arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All of them, those of subcommands among them."""
    for action in parser._actions:  # noqa: SLF001
        yield action
        if isinstance(action.choices, dict):
            for sub in cast("dict[str, argparse.ArgumentParser]", action.choices).values():
                yield from _actions(sub)
