"""When a worker is in trouble: silent, or busy without a step for longer than one may take."""

from pathlib import Path

from runtime.config.settings import Settings
from runtime.supervisor.health import HealthLimits, Watchdog
from runtime.wire import Heartbeat, WorkerPhase

LIMITS = HealthLimits(silent_s=10.0, step_s=60.0, load_s=60.0, warm_s=120.0)


def beat(
    step: int, *, is_busy: bool = True, phase: WorkerPhase = "decode", decode_step_s: float = 0.0
) -> Heartbeat:
    return Heartbeat(step=step, is_busy=is_busy, phase=phase, decode_step_s=decode_step_s)


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
    limits_s: dict[WorkerPhase, float] = dict.fromkeys(
        ("upkeep", "intake", "restore", "prefill", "errand"), 60.0
    )
    limits_s["decode"] = 15.0
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


def test_a_decode_step_may_take_fifty_times_the_average_but_not_more_than_any_step():
    watchdog = new_watchdog()
    limits_s = [(0.0, 15.0), (0.3, 15.0), (0.5, 25.0), (1.2, 60.0), (2.0, 60.0)]
    for step, (average_s, limit_s) in enumerate(limits_s):
        watchdog.beat(beat(step, decode_step_s=average_s), 100.0 + step)
        assert watchdog.limit_s("decode") == limit_s
        assert watchdog.limit_s("prefill") == 60.0


def test_a_step_that_hangs_right_after_a_heartbeat_is_waited_for_no_longer_than_any_other():
    """One step between two heartbeats: it was taken for one that had lasted a second, and fifty
    of these for what the next one may take.
    """
    watchdog = new_watchdog()
    watchdog.beat(beat(67), 100.0)
    still(watchdog, "decode", 101.0, 116.0, step=68)
    assert watchdog.complaint(116.0) is None
    assert text_of(watchdog, 116.25) == "made no progress in decode for 15.2 s"


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


def test_the_settings_are_the_limits():
    settings = Settings(
        home=Path(), wedge_timeout_s=120.0, heartbeat_timeout_s=7.0, load_timeout_s=600.0
    )
    assert HealthLimits.of(settings) == HealthLimits(
        silent_s=7.0, step_s=120.0, load_s=60.0, warm_s=120.0
    )
    short = Watchdog(HealthLimits.of(Settings(home=Path(), wedge_timeout_s=5.0)), 100.0)
    short.beat(beat(7, decode_step_s=1.0), 100.0)
    assert (short.limit_s("prefill"), short.limit_s("decode")) == (5.0, 5.0)


def test_the_last_beat_is_kept():
    watchdog = new_watchdog()
    assert watchdog.last is None
    watchdog.beat(beat(1), 101.0)
    watchdog.beat(beat(2), 102.0)
    assert watchdog.last == beat(2)


def test_a_load_gets_on_while_its_process_computes_and_is_stuck_when_it_does_not():
    watchdog = Watchdog(LIMITS, 100.0)
    watchdog.moved("loading", 100.0)
    watchdog.computed(3.0, 101.0)  # a spare one has computed before
    for number in range(1, 400):  # an hour of a starved machine
        watchdog.computed(3.0 + number * 0.15, 101.0 + number * 9)
        assert watchdog.complaint(101.0 + number * 9) is None
    end_s = 101.0 + 399 * 9
    watchdog.computed(3.0 + 399 * 0.15 + 0.5, end_s + 61.0)
    assert text_of(watchdog, end_s + 70.0) is not None


def test_what_computes_without_a_step_is_stuck_once_it_is_loaded():
    watchdog = new_watchdog()
    still(watchdog, "prefill", 100.0, 161.0)
    watchdog.computed(1000.0, 161.0)
    assert text_of(watchdog, 161.0) == "made no progress in prefill for 61.0 s"
