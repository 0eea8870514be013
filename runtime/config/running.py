"""Where the server of a home listens, which it leaves there for the operator's own programs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from runtime.config.settings import Settings
from runtime.keys import write_private

FILE = "server.url"
_SAID = frozenset({"--host", "--port", "HEARTH_HOST", "HEARTH_PORT"})


def write_url(home: Path, url: str) -> None:
    """Say that the server of `home` can be had at `url`. Raises OSError."""
    write_private(home / FILE, f"{url}\n")


def remove_url(home: Path) -> None:
    """Say that the server is gone. Raises OSError."""
    (home / FILE).unlink(missing_ok=True)


def read_url(home: Path) -> str | None:
    """Where the server of `home` is, or was when it was killed; None where nothing says so."""
    try:
        return (home / FILE).read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def at_running(settings: Settings, given: Collection[str] = ()) -> Settings:
    """The settings with the address at which the server of their home listens.

    Whoever says one means it: `given` are the flags and variables that set something.
    """
    url = read_url(settings.home)
    if url is None or not _SAID.isdisjoint(given):
        return settings
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return settings
    if host is None or port is None:
        return settings
    return msgspec.structs.replace(settings, host=host, port=port)
