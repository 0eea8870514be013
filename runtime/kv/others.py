"""The other ranks of a model that several processes compute: each has its part of every file.

What is read or written here they read or write as well, each on its own disk, under the same names.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from store.slots import BlockKey, SlotAbout


class Has(NamedTuple):
    """Whether there is a slot of a name, and a file of states."""

    slot: bool
    state: bool


class Span(NamedTuple):
    """What a file of KV is of: so many tokens from `start` on, or the state behind them."""

    start: int
    num_tokens: int
    is_state: bool


class OtherRanks(Protocol):
    """All ranks but this one, for any thread; each call waits for all of them."""

    @property
    def are_away(self) -> bool:
        """Some have a disk that the server does not see."""
        ...

    def have(self, model: bytes, names: Sequence[bytes], /) -> list[Has]:
        """What all of them have, by names."""
        ...

    def read(self, key: BlockKey, span: Span, /) -> Callable[[], object]:
        """Have all of them read their parts; what is returned waits for that, and gives their share
        of the run.

        Raises (when it is called):
            StoreError: one of them cannot; a damaged file is gone.
        """
        ...

    def write(self, about: SlotAbout, token_ids: array[int] | None, share: object, /) -> None:
        """Have all of them write their parts of a run as a slot, or without tokens as states.

        Raises:
            StoreFull, StoreFailed: one of them could not.
        """
        ...

    def sync(self, model: bytes, /) -> None:
        """Make durable what they wrote. Raises StoreFull, StoreFailed."""
        ...

    def remove(self, model: bytes, names: Collection[bytes], /) -> None:
        """Have nothing of these names; nobody waits for that."""
        ...

    def names_of(self, model: bytes, /) -> set[bytes]:
        """Of what any of them has something."""
        ...


class Alone:
    """There are no other ranks: this one has all of the model."""

    are_away = False

    def have(self, _: bytes, names: Sequence[bytes]) -> list[Has]:
        return [Has(slot=True, state=True)] * len(names)

    def read(self, *_: object) -> Callable[[], object]:
        return lambda: None

    def write(self, *_: object) -> None:
        pass

    def sync(self, *_: object) -> None:
        pass

    def remove(self, *_: object) -> None:
        pass

    def names_of(self, *_: object) -> set[bytes]:
        return set()


ALONE = Alone()
