"""When a worker is in trouble: silent, or busy without a step for longer than its steps take."""

from pathlib import Path

import pytest

from runtime.config.settings import Settings
from runtime.supervisor.health import HealthLimits, Watchdog
from runtime.wire import Heartbeat, WorkerPhase

LIMITS = HealthLimits(
    silent_s=10.0, prefill_s=60.0, decode_s=15.0, restore_s=40.0, load_s=60.0, warm_s=120.0
)


def beat(step: int, *, is_busy: bool = True, phase: WorkerPhase = "decode") -> Heartbeat:
    return Heartbeat(step=step, is_busy=is_busy, phase=phase)


def new_watchdog() -> Watchdog:
    """Of a worker that has become ready at 100 s."""
    watchdog = Watchdog(LIMITS, 50.0)
    watchdog.moved("idle", 100.0)
    return watchdog


def text_of(watchdog: Watchdog, now_s: float) -> str | None:
    complaint = watchdog.complaint(now_s)
    return complaint.text if complaint is not None else None


def test_silence_counts_from_the_moment_when_it_became_ready():
    watchdog = new_watchdog()
    assert watchdog.complaint(110.0) is None
    complaint = watchdog.complaint(110.5)
    assert complaint == ("gave no sign of life for 10.5 s", True)


def test_a_beat_ends_the_silence():
    watchdog = new_watchdog()
    watchdog.beat(beat(0), 109.0)
    assert watchdog.complaint(119.0) is None
    assert text_of(watchdog, 119.25) == "gave no sign of life for 10.2 s"


def still(
    watchdog: Watchdog, phase: WorkerPhase, since_s: float, until_s: float, step: int = 7
) -> None:
    """Beats once a second without a step."""
    now_s = since_s
    while now_s <= until_s:
        watchdog.beat(beat(step, phase=phase), now_s)
        now_s += 1.0


def test_each_phase_has_its_own_limit():
    limits_s: dict[WorkerPhase, float] = {"decode": 15.0, "restore": 40.0, "prefill": 60.0}
    for phase, limit_s in limits_s.items():
        watchdog = new_watchdog()
        still(watchdog, phase, 100.0, 100.0 + limit_s)
        assert watchdog.complaint(100.0 + limit_s) is None
        still(watchdog, phase, 101.0 + limit_s, 101.0 + limit_s)
        complaint = watchdog.complaint(101.0 + limit_s)
        assert complaint == (f"made no progress in {phase} for {limit_s + 1:.1f} s", False)


def test_a_step_starts_the_count_again():
    watchdog = new_watchdog()
    watchdog.beat(beat(7), 100.0)
    watchdog.beat(beat(17), 101.0)
    still(watchdog, "decode", 102.0, 116.0, step=17)
    assert watchdog.complaint(116.0) is None
    assert text_of(watchdog, 116.5) == "made no progress in decode for 15.5 s"


def test_another_phase_of_the_same_step_starts_the_count_again():
    watchdog = new_watchdog()
    still(watchdog, "prefill", 100.0, 150.0)
    still(watchdog, "decode", 151.0, 166.0)
    assert watchdog.complaint(166.0) is None
    assert text_of(watchdog, 166.5) == "made no progress in decode for 15.5 s"


def test_idle_is_never_stuck_and_the_count_starts_when_it_gets_busy():
    watchdog = new_watchdog()
    for now_s in range(100, 1000, 5):
        watchdog.beat(beat(7, is_busy=False, phase="idle"), float(now_s))
        assert watchdog.complaint(float(now_s)) is None
    still(watchdog, "decode", 1000.0, 1015.0)
    assert watchdog.complaint(1015.0) is None
    assert text_of(watchdog, 1015.5) == "made no progress in decode for 15.5 s"


def test_decode_may_take_fifty_times_its_average_step():
    watchdog = new_watchdog()
    watchdog.beat(beat(0), 100.0)
    watchdog.beat(beat(2), 101.0)
    assert watchdog.limit_s("decode") == 25.0
    still(watchdog, "decode", 102.0, 126.0, step=2)
    assert watchdog.complaint(126.0) is None
    assert text_of(watchdog, 126.5) == "made no progress in decode for 25.5 s"


def test_prefill_may_take_ten_times_its_average_slice():
    watchdog = new_watchdog()
    still(watchdog, "prefill", 100.0, 119.0, step=3)
    watchdog.beat(beat(4, phase="prefill"), 120.0)
    assert watchdog.limit_s("prefill") == 200.0
    assert watchdog.limit_s("decode") == 15.0


def test_the_average_moves_by_a_fifth_and_short_steps_leave_the_floor():
    watchdog = new_watchdog()
    watchdog.beat(beat(0), 100.0)
    watchdog.beat(beat(10), 101.0)
    watchdog.beat(beat(12), 102.0)
    assert watchdog.limit_s("decode") == 15.0
    watchdog.beat(beat(13), 107.0)
    assert watchdog.limit_s("decode") == pytest.approx(50 * (0.18 + 0.2 * (5.0 - 0.18)))


def test_what_happens_between_requests_is_no_step():
    watchdog = new_watchdog()
    watchdog.beat(beat(0, is_busy=False, phase="idle"), 100.0)
    watchdog.beat(beat(9), 200.0)
    watchdog.beat(beat(19, is_busy=False, phase="idle"), 201.0)
    watchdog.beat(beat(20), 300.0)
    assert watchdog.limit_s("decode") == 15.0


def test_silence_is_told_before_being_stuck():
    watchdog = new_watchdog()
    watchdog.beat(beat(7), 100.0)
    assert text_of(watchdog, 200.0) == "gave no sign of life for 100.0 s"


def test_a_load_may_be_silent_and_counts_progress_only():
    watchdog = Watchdog(LIMITS, 100.0)
    assert watchdog.complaint(160.0) is None
    assert text_of(watchdog, 161.0) == "made no progress in starting for 61.0 s"
    watchdog.moved("loading", 161.0)
    for now_s in range(162, 225):
        # One of before may come late; none of them is progress.
        watchdog.beat(beat(0, is_busy=False, phase="starting"), float(now_s))
    assert text_of(watchdog, 222.0) == "made no progress in loading for 61.0 s"
    watchdog.moved("loading", 222.0)
    watchdog.moved("warming", 270.0)
    assert watchdog.complaint(390.0) is None
    assert text_of(watchdog, 391.0) == "made no progress in warming for 121.0 s"


def test_the_settings_are_the_floors():
    settings = Settings(
        home=Path(), wedge_timeout_s=120.0, heartbeat_timeout_s=7.0, load_timeout_s=600.0
    )
    assert HealthLimits.of(settings) == HealthLimits(
        silent_s=7.0, prefill_s=120.0, decode_s=15.0, restore_s=120.0, load_s=60.0, warm_s=120.0
    )
    short = Settings(home=Path(), wedge_timeout_s=5.0)
    assert (HealthLimits.of(short).prefill_s, HealthLimits.of(short).decode_s) == (5.0, 5.0)


def test_the_last_beat_is_kept():
    watchdog = new_watchdog()
    assert watchdog.last is None
    watchdog.beat(beat(1), 101.0)
    watchdog.beat(beat(2), 102.0)
    assert watchdog.last == beat(2)
