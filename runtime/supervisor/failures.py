"""What follows from a crash, decided purely: how long to hold back, when to give up, whom to blame.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from runtime.types import Struct

BACKOFF_S = (0.0, 1.0, 5.0, 15.0, 60.0, 300.0)
"""Nothing is known to be wrong with the model after the first crash in a while; streams wait."""
_EXPLAINED_S = 1.0
JITTER = 0.2
HEALTHY_S = 600.0
CRASH_LIMIT = 3
CRASH_WINDOW_S = 300.0
BREAKER_S = 600.0
UNLOADABLE_S = 60.0
"""Every attempt may cost another model its place, so even a hasty client gets one a minute."""
MACHINE_S = 5.0
"""So long requests are told what the machine lacks before a process is tried again."""

LOST_LIMIT = 3
"""So many processes in a row that others ended before one was ready are not replaced by a further
one: whatever ended them will end that too.
"""

POISON_S = 600.0
POISON_DEATHS = 2
FURTHER_TOKENS = 32
"""A worker that is lost on a request after so many more tokens than the one before it was lost of
something else: whatever kills does so at the same place. What is on its way to the server when a
worker dies is less.
"""
MAX_SUSPECTS = 1024


class Verdict(Struct, frozen=True):
    """Not again for `hold_s` seconds; `is_final` says that requests need not wait for it."""

    hold_s: float
    is_final: bool


class CrashHistory:
    """The crashes of one model, and what follows from the next one."""

    def __init__(self) -> None:
        self._crashes_s: list[float] = []
        self._num_steps = self._num_lost = 0
        self._is_on_trial = False

    def came_up(self) -> None:
        """A process is ready."""
        self._num_lost = 0

    def crashed(
        self, now_s: float, healthy_s: float, jitter: float, *, is_explained: bool = False
    ) -> Verdict:
        """The process was lost after being healthy for `healthy_s`; `jitter` is from 0 to 1.

        One that a request explains which a process was lost of before says nothing of the model.
        """
        if is_explained:
            return _replaced(jitter)
        if healthy_s >= HEALTHY_S:
            self.forgive()
        recent = [at_s for at_s in self._crashes_s if now_s - at_s < CRASH_WINDOW_S]
        self._crashes_s = [*recent, now_s]
        if self._is_on_trial or len(self._crashes_s) >= CRASH_LIMIT:
            self._is_on_trial = True
            return Verdict(hold_s=BREAKER_S, is_final=True)
        step_s = BACKOFF_S[min(self._num_steps, len(BACKOFF_S) - 1)]
        self._num_steps += 1
        return Verdict(hold_s=step_s * (1 + JITTER * jitter), is_final=False)

    def lost_to_others(self, jitter: float) -> Verdict:
        """Somebody or something else ended the process: requests wait for the next one, unless
        `LOST_LIMIT` of them were ended and none came up.
        """
        self._num_lost += 1
        if self._num_lost == LOST_LIMIT:
            self._num_lost = 0
            return self.machine_lacks()
        return _replaced(jitter)

    def machine_lacks(self) -> Verdict:
        """No process can be had now, whatever the model."""
        return Verdict(hold_s=MACHINE_S, is_final=True)

    def unloadable(self) -> Verdict:
        """The model cannot be loaded as it is."""
        return Verdict(hold_s=UNLOADABLE_S, is_final=True)

    def forgive(self) -> None:
        """Begin anew: it was healthy for long, or the operator says so."""
        self._crashes_s = []
        self._num_steps = 0
        self._is_on_trial = False


def _replaced(jitter: float) -> Verdict:
    """Nothing speaks against the next process."""
    return Verdict(hold_s=_EXPLAINED_S * (1 + JITTER * jitter), is_final=False)


class Blame(Struct, frozen=True):
    """A request by its content, and how many workers it is held to have killed so far, the last
    of them `num_said` tokens into its answer at most.

    With `is_alone` nothing runs beside it: so it is found out whether it does kill.
    """

    digest: bytes
    num_deaths: int
    until_s: float
    num_said: int = 0
    is_alone: bool = False


class Quarantine:
    """Requests by content that workers died of.

    Everything that a dead worker computed for becomes suspect, and the caller lets suspects in one
    after the other. When one dies that computed for more than one request there is no telling: the
    suspects among them run alone from then on. Convicted is only what a worker computed for alone
    when it died, and was suspect before; unless it got so much further in its answer than then
    that it was something else.
    """

    def __init__(self) -> None:
        self._blamed: dict[bytes, Blame] = {}

    @property
    def is_empty(self) -> bool:
        return not self._blamed

    def died(
        self,
        digests: Iterable[bytes],
        now_s: float,
        num_said: Mapping[bytes, int] = MappingProxyType({}),
    ) -> bool:
        """A worker died while it computed for these; whether one of them was suspect already.

        `num_said` are the tokens of their answers that had come by then.
        """
        self._forget(now_s)
        present = list(dict.fromkeys(digests))
        suspects = [self._blamed[digest] for digest in present if digest in self._blamed]
        for known in suspects:
            said = num_said.get(known.digest, 0)
            is_same = said <= known.num_said + FURTHER_TOKENS
            num_deaths = known.num_deaths + (len(present) == 1 and is_same)
            said = max(said, known.num_said)
            self._blame(Blame(known.digest, num_deaths, now_s + POISON_S, said, is_alone=True))
        for digest in present:
            if digest not in self._blamed:
                self._blame(Blame(digest, 1, now_s + POISON_S, num_said.get(digest, 0)))
        return bool(suspects)

    def acquit(self, digest: Callable[[], bytes]) -> None:
        """It ran to its end, and the worker lives."""
        if self._blamed:
            self._blamed.pop(digest(), None)

    def runs_alone(self, digest: Callable[[], bytes], now_s: float) -> bool:
        """Whether nothing may run beside it."""
        self._forget(now_s)
        blame = self._blamed.get(digest()) if self._blamed else None
        return blame is not None and blame.is_alone

    def is_suspect(self, digest: Callable[[], bytes], now_s: float) -> bool:
        """Whether a worker died of it lately; `digest` is only called when that can be."""
        self._forget(now_s)
        return bool(self._blamed) and digest() in self._blamed

    def convicted_until_s(self, digest: Callable[[], bytes], now_s: float) -> float | None:
        """Until when it is not served again; None when it may be."""
        self._forget(now_s)
        blame = self._blamed.get(digest()) if self._blamed else None
        if blame is None or blame.num_deaths < POISON_DEATHS:
            return None
        return blame.until_s

    def _blame(self, blame: Blame) -> None:
        self._blamed.pop(blame.digest, None)  # the latest stand last
        self._blamed[blame.digest] = blame
        while len(self._blamed) > MAX_SUSPECTS:
            del self._blamed[next(iter(self._blamed))]

    def _forget(self, now_s: float) -> None:
        if self._blamed and next(iter(self._blamed.values())).until_s <= now_s:
            self._blamed = {d: one for d, one in self._blamed.items() if one.until_s > now_s}
