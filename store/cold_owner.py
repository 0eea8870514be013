"""Whose a cold store is: it bears the mark of one home, and nobody else's server touches it.

The mark is made once, where there is none, and never by two; the home remembers that it was. So a
cold store without it is one that is not mounted, not an empty one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from store.cold import ColdStore
from store.disk import new_file, reported, sync_directories
from store.errors import ColdAway, ColdForeign
from store.keyed_names import keyed_hash
from store.temp_names import temp_name

RECORD = "cold.json"
TAKE = "hearth cold take"


class Mark(msgspec.Struct):
    """What a cold store says of its owner. `owner` is keyed with the secret of its home, so that a
    home that was restored from a backup is the same; the rest is for people.
    """

    owner: str
    host: str = ""
    store: str = ""


class _Record(msgspec.Struct):
    """Which cold store this home has marked."""

    where: str


class Seen(NamedTuple):
    """A cold store before it is used; `mark` is None where it has none."""

    mark: Mark | None
    is_ours: bool


class Owned(Protocol):
    """What is looked at before a cold store is used."""

    def check(self, cold: ColdStore) -> None: ...


class Claim:
    """One home's on the cold store `where`; `root` is that of its fast store.

    `has_slots` says whether the index knows of slots there: then an empty one is not believed.
    """

    def __init__(
        self, root: Path, secret: bytes, where: str, has_slots: Callable[[], bool] = lambda: False
    ) -> None:
        owner = keyed_hash(secret, "cold-owner", b"").hex() if secret else ""
        self._own = Mark(owner, socket.gethostname(), str(root))
        self._record = root / RECORD
        self._where = str(where)  # settings have a kind of their own
        self._has_slots = has_slots

    def check(self, cold: ColdStore) -> None:
        """See that it is this home's, and mark it if it is nobody's and may be new.

        Raises:
            ColdForeign: it belongs to another home.
            ColdAway: it cannot be looked at, or is not what this home has marked.
        """
        seen = self.look(cold)
        if seen.mark is None:
            cold.make_mark(msgspec.json.encode(self._own))
            seen = self.look(cold)  # whoever was first
        if seen.mark is None:
            raise ColdAway(f"{self._where} does not keep the mark of its owner")
        self._remember()

    def look(self, cold: ColdStore) -> Seen:
        """The same, and nothing is changed."""
        data = cold.mark()
        mark = _read(data) if data is not None else None
        if mark is not None and mark.owner != self._own.owner:
            raise ColdForeign(
                f"{self._where} belongs to another Hearth ({_place(mark)}): name another one in "
                f"cold_store, or stop that one for good and run: {TAKE}"
            )
        if mark is None and (self._has_marked() or self._is_missing_slots(cold)):
            raise ColdAway(
                f"{self._where} is not the cold store that this home has used: mount it, or if it "
                f"was emptied on purpose run: {TAKE}"
            )
        return Seen(mark, mark is not None)

    def take(self, cold: ColdStore) -> None:
        """Make it this home's, whoever had it. Raises StoreFailed where it cannot be marked."""
        cold.make_mark(msgspec.json.encode(self._own), replaces=True)
        self._remember()

    def _has_marked(self) -> bool:
        try:
            return msgspec.json.decode(self._record.read_bytes(), type=_Record).where == self._where
        except (OSError, msgspec.MsgspecError):
            return False

    def _is_missing_slots(self, cold: ColdStore) -> bool:
        return self._has_slots() and next(iter(cold.slots()), None) is None

    def _remember(self) -> None:
        if self._has_marked():
            return
        temporary = self._record.with_name(temp_name("0" * 32))
        with new_file(temporary, 0) as file:
            file.write(msgspec.json.encode(_Record(self._where)))
        with reported(self._record):
            temporary.rename(self._record)
        sync_directories([self._record.parent])


def _read(data: bytes) -> Mark:
    """One that cannot be read is somebody's as well."""
    try:
        return msgspec.json.decode(data, type=Mark)
    except msgspec.MsgspecError:
        return Mark("?")


def _place(mark: Mark) -> str:
    return f"{mark.store} on {mark.host}" if mark.host else "its mark does not say whose"
