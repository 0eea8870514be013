"""Idle caches: the layer caches of sequences that ended, for whoever goes on from one of them.

How far a prompt is known the prefix tree says. An idle cache only spares putting that together
again from its runs, which takes the longer the more turns a conversation has. It lies in memory
that neither running requests nor the hot tier want, and goes as soon as they do, or when a run
that it holds is forgotten. Belongs to the mlx thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.kv import layers
from runtime.kv.prefix_tree import Run

MAX_IDLE_CACHES = 64

Path = Sequence[tuple[Run, int]]
"""Runs that follow each other from the first token on, each with the position where it is left."""


@dataclass(eq=False, slots=True)
class IdleCache:
    """Layer caches that hold the tokens of these runs, and room behind them."""

    path: Path
    kv: list[Any]
    num_bytes: int

    def follows(self, runs: Sequence[Run]) -> bool:
        """These are the first of its runs."""
        return bool(runs) and [run for run, _ in self.path[: len(runs)]] == list(runs)

    def holds(self, path: Path) -> bool:
        """The tokens of these runs are the first of its own: the very runs, not only equal ones."""
        number = len(path)
        if not 0 < number <= len(self.path):
            return False
        (run, left), (own, own_left) = path[-1], self.path[number - 1]
        is_same = run is own and left <= own_left
        return is_same and list(self.path[: number - 1]) == list(path[:-1])

    def is_before(self, path: Path) -> bool:
        """A sequence goes on from all of it: nobody will want less."""
        number = len(self.path)
        is_longer = len(path) >= number and path[number - 1][1] >= self.path[-1][1]
        return is_longer and [run for run, _ in path[:number]] == [run for run, _ in self.path]


class IdleCaches:
    """Those of one model, the one that ended last at the end."""

    def __init__(self) -> None:
        self._all: list[IdleCache] = []
        self._wanted: IdleCache | None = None

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_bytes(self) -> int:
        """What they take together."""
        return sum(one.num_bytes for one in self._all)

    def keep(self, path: Path, kv: list[Any]) -> None:
        """Take the caches of a sequence that ended; nobody else may change them from now on.

        They are let go at once where another sequence has a part in their arrays, or where what is
        behind some number of tokens could not be forgotten.
        """
        if path and layers.can_go_on(kv):
            self._all = [one for one in self._all if not one.is_before(path)]
            self._all.append(IdleCache(path, kv, layers.num_bytes(kv)))
            del self._all[:-MAX_IDLE_CACHES]

    def want(self, runs: Sequence[Run]) -> None:
        """What follows these runs is taken up next, in the memory that it has already."""
        self._wanted = next((one for one in reversed(self._all) if one.follows(runs)), None)

    def take(self, path: Path) -> list[Any] | None:
        """Caches with the tokens of these runs and no others, if there are some; they are gone."""
        self._wanted = None
        taken = next((one for one in reversed(self._all) if one.holds(path)), None)
        if taken is None:
            return None
        self._all.remove(taken)
        layers.shorten(taken.kv, path[-1][1])
        return taken.kv

    def fit(self, num_bytes: int) -> None:
        """There is so much memory for them, beside that of the one that is wanted."""
        if self._wanted is not None:
            num_bytes += self._wanted.num_bytes
        for one in [each for each in self._all if each is not self._wanted]:
            if self.num_bytes <= num_bytes:
                return
            self._all.remove(one)

    def let_go(self, is_known: Callable[[Run], bool]) -> None:
        """Forget those of which a run is known no more."""
        self._all = [one for one in self._all if all(is_known(run) for run, _ in one.path)]
        if self._wanted not in self._all:
            self._wanted = None
