"""The clock that things age by: never faster than time really passes."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from store.clock import Trusted, TrustedClock
from store.types import Instant

DAY_S = 86_400.0
WALL_S = 1_800_000_000.0


class Machine:
    """A machine whose wall clock may say anything. `true_s` really have passed."""

    def __init__(self) -> None:
        self.true_s = 0.0
        self.ahead_s = 0.0
        self.boot = 1
        self.booted_s = -1000.0

    def read(self) -> Instant:
        wall_s = WALL_S + self.true_s + self.ahead_s
        return Instant(wall_s, self.true_s - self.booted_s, f"boot {self.boot}")

    def reboot(self, off_s: float) -> None:
        self.true_s += off_s
        self.boot += 1
        self.booted_s = self.true_s - 10.0


def test_it_begins_at_the_wall_clock_and_counts_what_passes_asleep_or_not():
    machine = Machine()
    clock = TrustedClock(Trusted(), machine.read)
    assert clock.now_s() == WALL_S
    machine.true_s += 8 * 3600.0
    assert clock.now_s() == WALL_S + 8 * 3600.0
    assert clock.instant() == Trusted(WALL_S + 8 * 3600.0, 1000.0 + 8 * 3600.0, "boot 1")


def test_a_step_of_the_wall_clock_is_no_age():
    machine = Machine()
    clock = TrustedClock(Trusted(), machine.read)
    for ahead_s in (365 * DAY_S, -365 * DAY_S, 30 * DAY_S):
        machine.ahead_s = ahead_s
        assert clock.now_s() == WALL_S
        assert clock.wall_s(WALL_S - 60.0) == WALL_S + ahead_s - 60.0, "a minute ago, to people"


def test_a_restart_goes_on_by_the_clock_that_nobody_sets():
    machine = Machine()
    last = TrustedClock(Trusted(), machine.read).instant()
    machine.true_s += 3 * DAY_S
    machine.ahead_s = -10 * 365 * DAY_S
    assert TrustedClock(last, machine.read).now_s() == WALL_S + 3 * DAY_S


def test_what_passed_while_the_machine_was_off_is_not_known_and_counts_as_nothing():
    machine = Machine()
    last = TrustedClock(Trusted(), machine.read).instant()
    machine.reboot(60 * DAY_S)
    assert TrustedClock(last, machine.read).now_s() == WALL_S


def test_where_the_system_names_no_boot_a_restart_counts_as_nothing():
    def read() -> Instant:
        return Instant(WALL_S, 5e6, "0")

    assert TrustedClock(Trusted(WALL_S, 1.0, "0"), read).now_s() == WALL_S


class Step(NamedTuple):
    """What happens: `run`, `sleep`, `set` (the wall clock), `restart`, `kill`, `reboot`."""

    what: str
    seconds: float


_SPANS_S = st.sampled_from((1.0, 59.0, 3600.0, 5 * DAY_S, 29.9 * DAY_S))
_JUMPS_S = st.sampled_from((1.0, 301.0, 60 * DAY_S, 365 * DAY_S, 10 * 365 * DAY_S))
_STEPS = st.one_of(
    st.builds(Step, st.sampled_from(("run", "sleep", "restart", "kill", "reboot")), _SPANS_S),
    st.builds(Step, st.just("set"), _JUMPS_S | _JUMPS_S.map(lambda one: -one)),
)


@given(steps=st.lists(_STEPS, max_size=40), ttl_s=_SPANS_S)
def test_nothing_ages_faster_than_it_lives_nor_slower_than_the_server_was_there(
    steps: list[Step], ttl_s: float
):
    machine = Machine()
    clock = TrustedClock(Trusted(), machine.read)
    kept, kept_true_s = clock.instant(), machine.true_s
    used: list[tuple[float, float, float]] = []  # the trusted time, the true one, and of it there
    there_s = 0.0
    for what, seconds in steps:
        used.append((clock.now_s(), machine.true_s, there_s))
        if what == "set":
            machine.ahead_s += seconds
            continue
        if what in ("run", "sleep"):
            machine.true_s += seconds
            there_s += seconds
            if what == "run":
                kept, kept_true_s = clock.instant(), machine.true_s
            continue
        if what == "restart":
            kept, kept_true_s = clock.instant(), machine.true_s
        if what == "reboot":
            there_s -= machine.true_s - kept_true_s  # slept away, and never said to the disk
            machine.reboot(seconds)
        else:
            machine.true_s += seconds
            there_s += seconds
        clock = TrustedClock(kept, machine.read)
        kept, kept_true_s = clock.instant(), machine.true_s
        now_s = clock.now_s()
        for trusted_s, true_s, was_there_s in used:
            age_s = now_s - trusted_s
            assert age_s <= machine.true_s - true_s + 1e-3
            assert age_s >= there_s - was_there_s - 1e-3
    assert not [one for one in used if clock.now_s() - one[0] > ttl_s > machine.true_s - one[1]]
