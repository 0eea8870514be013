"""What follows from a crash, decided purely: how long to hold back, when to give up, whom to blame.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from runtime.types import Struct

BACKOFF_S = (1.0, 5.0, 15.0, 60.0, 300.0)
JITTER = 0.2
HEALTHY_S = 600.0
CRASH_LIMIT = 3
CRASH_WINDOW_S = 300.0
BREAKER_S = 600.0
UNLOADABLE_S = 60.0
"""Every attempt may cost another model its place, so even a hasty client gets one a minute."""

POISON_S = 600.0
POISON_DEATHS = 2
MAX_SUSPECTS = 1024


class Verdict(Struct, frozen=True):
    """Not again for `hold_s` seconds; `is_final` says that requests need not wait for it."""

    hold_s: float
    is_final: bool


class CrashHistory:
    """The crashes of one model, and what follows from the next one."""

    def __init__(self) -> None:
        self._crashes_s: list[float] = []
        self._num_steps = 0
        self._is_on_trial = False

    def crashed(self, now_s: float, healthy_s: float, jitter: float) -> Verdict:
        """The process was lost after being healthy for `healthy_s`; `jitter` is from 0 to 1."""
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

    def unloadable(self) -> Verdict:
        """The model cannot be loaded as it is."""
        return Verdict(hold_s=UNLOADABLE_S, is_final=True)

    def forgive(self) -> None:
        """Begin anew: it was healthy for long, or the operator says so."""
        self._crashes_s = []
        self._num_steps = 0
        self._is_on_trial = False


class Blame(Struct, frozen=True):
    """A request by its content, and how many workers it is held to have killed so far."""

    digest: bytes
    num_deaths: int
    until_s: float


class Quarantine:
    """Requests by content that workers died of.

    Everything that a dead worker was busy with becomes suspect. A suspect that a worker dies of
    as the only suspect is convicted; with several there is no telling, so the caller lets
    suspects in one after the other.
    """

    def __init__(self) -> None:
        self._blamed: dict[bytes, Blame] = {}

    @property
    def is_empty(self) -> bool:
        return not self._blamed

    def died(self, digests: Iterable[bytes], now_s: float) -> None:
        """A worker died while it was busy with these."""
        self._forget(now_s)
        present = list(dict.fromkeys(digests))
        suspects = [digest for digest in present if digest in self._blamed]
        if len(suspects) == 1:
            known = self._blamed[suspects[0]]
            self._blame(known.digest, known.num_deaths + 1, now_s)
        for digest in present:
            if digest not in self._blamed:
                self._blame(digest, 1, now_s)

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

    def _blame(self, digest: bytes, num_deaths: int, now_s: float) -> None:
        self._blamed.pop(digest, None)  # the latest stand last
        self._blamed[digest] = Blame(digest=digest, num_deaths=num_deaths, until_s=now_s + POISON_S)
        while len(self._blamed) > MAX_SUSPECTS:
            del self._blamed[next(iter(self._blamed))]

    def _forget(self, now_s: float) -> None:
        if self._blamed and next(iter(self._blamed.values())).until_s <= now_s:
            self._blamed = {d: one for d, one in self._blamed.items() if one.until_s > now_s}
