"""The swap policy, purely: which requests go to their model now, which models load, which leave.

Cohort, quantum, linger. While nobody else needs its room, a model's requests flow. When another
model is awaited and needs the room, admission stays open for a quantum after that wish or after
the model became ready, whichever is later; then it closes and the model drains. The quantum is a
multiple of what the swap takes, so that swaps that take half a second keep nobody waiting for
long; for somebody interactive it is one swap, where the model serves nobody interactive. Whatever
waited when it became ready, its cohort, is served all the same. A model that runs dry earlier
lingers a moment, because the next turn of a tool loop is seconds away, and then leaves; not where
its requests have come back later than that of late. One that has been idle waits for an instant,
because agents that are started together ask together, unless swaps are quick.
Background work never displaces what is in use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from runtime.supervisor.lifecycle import Stage
from runtime.supervisor.placement import LoadCapacity, Need
from runtime.types import Priority, Struct

_RANKS: dict[Priority, int] = {"interactive": 0, "default": 1, "background": 2}
_BACKGROUND = _RANKS["background"]
_MAX_CANDIDATES = 10
_RETURNS = 3
"""One of three that comes back in time is worth the wait: it saves two swaps, for half of one."""


class Waiting(Struct, frozen=True):
    """A request that no worker has yet. All times are of one monotonic clock."""

    request_id: str
    model: str
    since_s: float
    priority: Priority = "default"


class Resident(Struct, frozen=True):
    """A model that has a process, from the decision to load it until the process is gone.

    `num_running` counts the requests handed over and not finished, `is_interactive` says that one
    of them is so; `cohort` holds the ids of those that waited when it became ready. `returns_s` is
    after how long the next request came, each of the last times that it ran dry. Times are None
    for what has not happened. Its state is never `away`.
    """

    model: str
    state: Stage
    reserved_bytes: int
    ready_since_s: float | None = None
    num_running: int = 0
    is_interactive: bool = False
    last_finished_s: float | None = None
    returns_s: tuple[float, ...] = ()
    is_pinned: bool = False
    cohort: frozenset[str] = frozenset()

    @property
    def last_used_s(self) -> float:
        times = (self.ready_since_s, self.last_finished_s)
        return max((time for time in times if time is not None), default=0.0)


class Returns:
    """After how long a model that ran dry is asked again, be it loaded then or not; one clock."""

    def __init__(self) -> None:
        self._last_s: deque[float] = deque(maxlen=_RETURNS)
        self._dry_since_s: float | None = None

    @property
    def last_s(self) -> tuple[float, ...]:
        """The last few."""
        return tuple(self._last_s)

    def ran_dry(self, now_s: float) -> None:
        """None of its requests runs any more, or waits."""
        self._dry_since_s = now_s

    def asked(self, now_s: float) -> None:
        """A request for it came."""
        if self._dry_since_s is not None:
            self._last_s.append(now_s - self._dry_since_s)
            self._dry_since_s = None


class Terms(Struct, frozen=True):
    """The policy's constants; a swap's seconds are those of the model that wants in.

    A request rises by a class for each `raise_after_s` that it waits. Half of a model's chance to
    be used again is gone after `reuse_half_life_s` of idleness.
    """

    quantum_factor: float = 4.0
    min_quantum_s: float = 2.0
    max_quantum_s: float = 120.0
    urgent_factor: float = 1.0
    linger_share: float = 0.5
    max_linger_s: float = 10.0
    max_grace_s: float = 0.3
    quick_swap_s: float = 0.3
    raise_after_s: float = 60.0
    reuse_half_life_s: float = 600.0

    def quantum_s(self, swap_s: float) -> float:
        """How long a model may go on while another one waits."""
        return min(max(self.quantum_factor * swap_s, self.min_quantum_s), self.max_quantum_s)

    def urgent_quantum_s(self, swap_s: float) -> float:
        """The same while an interactive request waits for the other one."""
        return min(self.urgent_factor * swap_s, self.quantum_s(swap_s))

    def linger_s(self, swap_s: float) -> float:
        """How long an idle model may wait for its next request while another one waits."""
        return min(self.linger_share * swap_s, self.max_linger_s)

    def grace_s(self, swap_s: float) -> float:
        """How long a model stays at the least once another one is waited for.

        Not at all where two swaps too many cost little more than everybody's waiting.
        """
        if swap_s < self.quick_swap_s:
            return 0.0
        return min(self.linger_share * swap_s, self.max_grace_s)


class SwapState(Struct, frozen=True):
    """Everything a plan depends on. `needs` knows every model that waits or is resident.

    A request whose model may not load now (it backs off, say) is left out of `waiting`.
    """

    waiting: tuple[Waiting, ...]
    residents: tuple[Resident, ...]
    needs: Mapping[str, Need]
    room: LoadCapacity
    now_s: float


class SwapPlan(Struct, frozen=True):
    """What to do now, and when to ask again if nothing happens before.

    `grants` are request ids in order, all for ready models. `loads` fit as they are; a model that
    must wait for one of `unloads` to be gone is loaded by a later plan, `follows` first of all. A
    loading model among `unloads` is awaited by nobody. `closed` models take no requests beyond
    their cohort, and `blocked` ones cannot load before something pinned leaves.
    """

    grants: tuple[str, ...] = ()
    loads: tuple[str, ...] = ()
    unloads: tuple[str, ...] = ()
    closed: frozenset[str] = frozenset()
    blocked: frozenset[str] = frozenset()
    follows: str | None = None
    wake_s: float | None = None


def plan(swap_state: SwapState, terms: Terms) -> SwapPlan:
    """The next moves. Equal states give equal plans, whatever the order inside them."""
    return _Planning(swap_state, terms).plan()


class _Target(NamedTuple):
    """A model that waits for room; ordered by what goes first. `since_s` is of foreground work,
    `urgent_s` of interactive requests.
    """

    rank: int
    oldest_s: float
    model: str
    since_s: float | None
    urgent_s: float | None


class _Wish(NamedTuple):
    """For whom others may have to leave: what its swap takes, since when foreground work waits for
    any target, and interactive requests; background work is None and None.
    """

    swap_s: float
    since_s: float | None
    urgent_s: float | None


class _Candidate(NamedTuple):
    """A resident that may have to leave: not before `free_s`, and dear by `cost_s`."""

    resident: Resident
    is_in_use: bool
    free_s: float
    cost_s: float


class _Planning:
    """One plan in the making."""

    def __init__(self, swap_state: SwapState, terms: Terms) -> None:
        self._scene = swap_state
        self._terms = terms
        self._now_s = swap_state.now_s
        self._residents = {one.model: one for one in sorted(swap_state.residents, key=_model)}
        self._waiting = sorted(
            swap_state.waiting, key=lambda one: (self._rank(one), one.since_s, one.request_id)
        )
        self._closed: set[str] = set()
        self._held: set[str] = set()
        self._loads: list[str] = []
        self._unloads: list[str] = []
        self._wakes: list[float] = []
        self._follows: str | None = None

    def plan(self) -> SwapPlan:
        targets, blocked = self._targets()
        if targets:
            self._place(targets)
        grants = tuple(one.request_id for one in self._waiting if self._is_granted(one))
        return SwapPlan(
            grants=grants,
            loads=tuple(self._loads),
            unloads=tuple(self._unloads),
            closed=frozenset(self._closed),
            blocked=blocked,
            follows=self._follows,
            wake_s=self._wake_s(frozenset(grants)),
        )

    def _rank(self, one: Waiting) -> int:
        """The class of a request; waiting raises it."""
        return _RANKS[one.priority] - sum(end_s <= self._now_s for end_s in self._raises(one))

    def _raises(self, one: Waiting) -> list[float]:
        """When a request rises by a class."""
        return [
            one.since_s + number * self._terms.raise_after_s
            for number in range(1, _RANKS[one.priority] + 1)
        ]

    def _targets(self) -> tuple[list[_Target], frozenset[str]]:
        """The models that wait for room, and those that what is pinned keeps out."""
        by_model: dict[str, list[Waiting]] = {}
        for one in self._waiting:
            resident = self._residents.get(one.model)
            if resident is None or resident.state == "leaving":
                by_model.setdefault(one.model, []).append(one)
        if not by_model:
            return [], frozenset()
        pinned = [one for one in _staying(self._residents.values()) if one.is_pinned]
        room = self._scene.room.without(one.reserved_bytes for one in pinned)
        blocked = {model for model in by_model if not room.holds(self._need(model).num_bytes)}
        targets = [_target(of, self._rank(of[0])) for m, of in by_model.items() if m not in blocked]
        return sorted(targets), frozenset(blocked)

    def _place(self, targets: Sequence[_Target]) -> None:
        """Find room for each target: what fits is loaded, for the rest others must leave.

        A target that waits keeps its claim, so that nobody behind it takes what becomes free.
        """
        staying = {one.model: one for one in _staying(self._residents.values())}
        is_free = self._scene.room.without(one.reserved_bytes for one in self._residents.values())
        since_s = _earliest(one.since_s for one in targets)
        urgent_s = _earliest(one.urgent_s for one in targets)
        claims: list[int] = []
        for target in targets:
            need = self._need(target.model)
            rest = self._scene.room.without(
                [*(one.reserved_bytes for one in staying.values()), *claims]
            )
            if rest.holds(need.num_bytes):
                if is_free.holds(need.num_bytes) and target.model not in self._residents:
                    self._loads.append(target.model)
                    is_free = is_free.without([need.num_bytes])
            else:
                is_foreground = target.since_s is not None
                wish = _Wish(need.swap_s, *((since_s, urgent_s) if is_foreground else (None, None)))
                candidates = self._candidates(staying.values(), wish)
                leaving = _cheapest(candidates, rest, need.num_bytes, self._now_s)
                self._displace(leaving, is_foreground=is_foreground)
                for candidate in leaving:
                    del staying[candidate.resident.model]
                if not leaving and not is_foreground:
                    continue
            if target.model not in self._loads:
                self._follows = self._follows or target.model
            claims.append(need.num_bytes)

    def _candidates(self, staying: Iterable[Resident], wish: _Wish) -> list[_Candidate]:
        """Who may have to leave for a target."""
        found: list[_Candidate] = []
        for resident in staying:
            awaited = [one for one in self._waiting if one.model == resident.model]
            if resident.is_pinned:
                continue
            is_background = wish.since_s is None
            if resident.state == "loading" and (awaited or is_background):
                continue
            is_in_use = self._is_in_use(resident, awaited, is_background=is_background)
            if is_background and is_in_use:
                continue
            is_equal = resident.is_interactive or any(
                one.priority == "interactive" for one in awaited
            )
            own = wish._replace(urgent_s=None) if is_equal else wish
            free_s = self._free_s(resident, is_in_use, own)
            cost_s = self._need(resident.model).swap_s * self._reuse(resident, is_in_use)
            found.append(_Candidate(resident, is_in_use, free_s, cost_s))
        found.sort(key=lambda one: (one.is_in_use, one.free_s, one.cost_s, one.resident.model))
        return found[:_MAX_CANDIDATES]

    def _is_in_use(
        self, resident: Resident, awaited: Sequence[Waiting], *, is_background: bool
    ) -> bool:
        """Background work that waits keeps a model for itself only against its like."""
        return resident.num_running > 0 or any(
            is_background or self._rank(one) < _BACKGROUND or one.request_id in resident.cohort
            for one in awaited
        )

    def _free_s(self, resident: Resident, is_in_use: bool, wish: _Wish) -> float:
        """When a resident may be asked to leave."""
        swap_s, since_s, urgent_s = wish
        if resident.state != "ready" or resident.ready_since_s is None:
            return self._now_s
        linger_s, may_linger_s = self._now_s, self._terms.linger_s(swap_s)
        if resident.last_finished_s is not None and _may_return(resident, may_linger_s):
            linger_s = resident.last_finished_s + may_linger_s
        if since_s is None:
            return linger_s
        begin_s = max(since_s, resident.ready_since_s)
        close_s = begin_s + self._terms.quantum_s(swap_s)
        if urgent_s is not None:
            begin_urgent_s = max(urgent_s, resident.ready_since_s)
            close_s = min(close_s, begin_urgent_s + self._terms.urgent_quantum_s(swap_s))
        if is_in_use:
            return close_s
        return min(max(linger_s, begin_s + self._terms.grace_s(swap_s)), close_s)

    def _reuse(self, resident: Resident, is_in_use: bool) -> float:
        """The chance that a model is used again before long."""
        if is_in_use or resident.state == "loading":
            return 1.0
        idle_s = max(self._now_s - resident.last_used_s, 0.0)
        return 0.5 ** (idle_s / self._terms.reuse_half_life_s)

    def _displace(self, leaving: Sequence[_Candidate], *, is_foreground: bool) -> None:
        """They leave together or not yet: one alone makes no room."""
        models = [one.resident.model for one in leaving]
        if is_foreground:
            self._held.update(models)
        free_s = max((one.free_s for one in leaving), default=self._now_s)
        if free_s > self._now_s:
            self._wakes.append(free_s)
            return
        self._closed.update(models)
        if all(self._is_drained(one.resident) for one in leaving):
            self._unloads += models

    def _is_drained(self, resident: Resident) -> bool:
        waiting = {one.request_id for one in self._waiting if one.model == resident.model}
        return resident.num_running == 0 and not waiting & resident.cohort

    def _is_granted(self, one: Waiting) -> bool:
        resident = self._residents.get(one.model)
        if resident is None or resident.state != "ready":
            return False
        if one.request_id in resident.cohort:
            return True
        if one.model in self._held and self._rank(one) == _BACKGROUND:
            return False
        return one.model not in self._closed

    def _wake_s(self, grants: frozenset[str]) -> float | None:
        """The next moment at which time alone changes something: an end, or a class raised."""
        for one in self._waiting:
            if one.request_id not in grants:
                self._wakes += [end_s for end_s in self._raises(one) if end_s > self._now_s]
        return min(self._wakes, default=None)

    def _need(self, model: str) -> Need:
        return self._scene.needs[model]


def _may_return(resident: Resident, within_s: float) -> bool:
    """Some of its requests have come back within that time of late, or nothing is known of it."""
    return not resident.returns_s or min(resident.returns_s) <= within_s


def _model(resident: Resident) -> str:
    return resident.model


def _staying(residents: Iterable[Resident]) -> list[Resident]:
    return [one for one in residents if one.state != "leaving"]


def _target(waiting: Sequence[Waiting], rank: int) -> _Target:
    foreground = [one.since_s for one in waiting if one.priority != "background"]
    urgent = [one.since_s for one in waiting if one.priority == "interactive"]
    first = waiting[0]
    return _Target(rank, first.since_s, first.model, _earliest(foreground), _earliest(urgent))


def _earliest(times: Iterable[float | None]) -> float | None:
    return min((time_s for time_s in times if time_s is not None), default=None)


def _cheapest(
    candidates: Sequence[_Candidate], rest: LoadCapacity, num_bytes: int, now_s: float
) -> tuple[_Candidate, ...]:
    """The set to leave: nobody in use if possible, then the soonest, then the cheapest.

    Equal sets are told apart by who was used longest ago. Empty when no set makes enough room.
    """
    sets = (
        chosen
        for size in range(1, len(candidates) + 1)
        for chosen in combinations(candidates, size)
        if rest.with_back(one.resident.reserved_bytes for one in chosen).holds(num_bytes)
    )
    return min(sets, key=lambda chosen: _price(chosen, now_s), default=())


def _price(chosen: Sequence[_Candidate], now_s: float) -> tuple[object, ...]:
    residents = [one.resident for one in chosen]
    return (
        sum(one.is_in_use for one in chosen),
        max(max(one.free_s, now_s) for one in chosen),
        sum(one.cost_s for one in chosen),
        len(chosen),
        sorted(one.last_used_s for one in residents),
        sorted(one.model for one in residents),
    )
