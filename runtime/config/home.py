"""Whose the home is: one server at a time owns it, and no other writes anything there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import structlog

from runtime.config.running import read_url, remove_url, write_url
from runtime.errors import HomeTaken
from runtime.keys import new_key, write_admin_token
from store import ownership
from store.errors import StoreError, StoreLocked

LOCK = "server.lock"

_log = structlog.stdlib.get_logger("hearth.home")


class Home:
    """The directory of one server, from `take` until `close` or the end of the process.

    `lock` is None where nothing can be written, so that there is nothing to own.
    """

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def take(cls, path: Path) -> Home:
        """Make the directory if it is missing and own it; nothing else is written.

        Raises:
            HomeTaken: another server owns it, or may.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            return cls(path, ownership.hold(path / LOCK))
        except StoreLocked as error:
            where = f" at {url}" if (url := read_url(path)) else ""
            raise HomeTaken(path, f"Another server runs there{where}") from error
        except (OSError, StoreError) as error:
            if os.path.lexists(path / LOCK):
                raise HomeTaken(path, f"Another server may run there ({error})") from error
            _log.warning("home_cannot_be_written", home=str(path), reason=str(error))
            return cls(path, None)

    def new_admin_token(self) -> str:
        """A key for the operator's own programs, left for them in home if that can be written."""
        if self._lock is None:
            return new_key()
        try:
            return write_admin_token(self.path)
        except OSError as error:
            _log.warning("no_admin_token", home=str(self.path), reason=error.strerror)
            return new_key()

    def listens_at(self, url: str) -> None:
        """Leave there where the server is to be had, whatever the settings say."""
        if self._lock is None:
            return
        try:
            write_url(self.path, url)
        except OSError as error:
            _log.warning("no_server_url", home=str(self.path), reason=error.strerror)

    def listens_no_more(self) -> None:
        """Nobody is to be sent there any longer."""
        if self._lock is not None:
            with suppress(OSError):
                remove_url(self.path)

    def close(self) -> None:
        """Let another server own it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
