"""When a worker is in trouble: silent, or busy without a step for longer than its steps take."""

from pathlib import Path

from runtime.pulse import Limits, Pulse
from runtime.settings import Settings
from runtime.wire import Heartbeat

LIMITS = Limits(
    silent_s=10.0, prefill_s=60.0, decode_s=15.0, restore_s=40.0, load_s=60.0, warm_s=120.0
)


def beat(step: int, *, is_busy: bool = True, phase: str = "decode") -> Heartbeat:
    return Heartbeat(step=step, is_busy=is_busy, phase=phase)


def new_pulse() -> Pulse:
    """Of a worker that has become ready at 100 s."""
    pulse = Pulse(LIMITS, 50.0)
    pulse.moved("idle", 100.0)
    return pulse


def text_of(pulse: Pulse, now_s: float) -> str | None:
    complaint = pulse.complaint(now_s)
    return complaint.text if complaint is not None else None


def test_silence_counts_from_the_moment_when_it_became_ready():
    pulse = new_pulse()
    assert pulse.complaint(110.0) is None
    complaint = pulse.complaint(110.5)
    assert complaint == ("gave no sign of life for 10.5 s", True)


def test_a_beat_ends_the_silence():
    pulse = new_pulse()
    pulse.beat(beat(0), 109.0)
    assert pulse.complaint(119.0) is None
    assert text_of(pulse, 119.25) == "gave no sign of life for 10.2 s"


def still(pulse: Pulse, phase: str, since_s: float, until_s: float, step: int = 7) -> None:
    """Beats once a second without a step."""
    now_s = since_s
    while now_s <= until_s:
        pulse.beat(beat(step, phase=phase), now_s)
        now_s += 1.0


def test_each_phase_has_its_own_limit():
    for phase, limit_s in (("decode", 15.0), ("restore", 40.0), ("prefill", 60.0)):
        pulse = new_pulse()
        still(pulse, phase, 100.0, 100.0 + limit_s)
        assert pulse.complaint(100.0 + limit_s) is None
        still(pulse, phase, 101.0 + limit_s, 101.0 + limit_s)
        complaint = pulse.complaint(101.0 + limit_s)
        assert complaint == (f"made no progress in {phase} for {limit_s + 1:.1f} s", False)


def test_a_step_starts_the_count_again():
    pulse = new_pulse()
    pulse.beat(beat(7), 100.0)
    pulse.beat(beat(17), 101.0)
    still(pulse, "decode", 102.0, 116.0, step=17)
    assert pulse.complaint(116.0) is None
    assert text_of(pulse, 116.5) == "made no progress in decode for 15.5 s"


def test_another_phase_of_the_same_step_starts_the_count_again():
    pulse = new_pulse()
    still(pulse, "prefill", 100.0, 150.0)
    still(pulse, "decode", 151.0, 166.0)
    assert pulse.complaint(166.0) is None
    assert text_of(pulse, 166.5) == "made no progress in decode for 15.5 s"


def test_idle_is_never_stuck_and_the_count_starts_when_it_gets_busy():
    pulse = new_pulse()
    for now_s in range(100, 1000, 5):
        pulse.beat(beat(7, is_busy=False, phase="idle"), float(now_s))
        assert pulse.complaint(float(now_s)) is None
    still(pulse, "decode", 1000.0, 1015.0)
    assert pulse.complaint(1015.0) is None
    assert text_of(pulse, 1015.5) == "made no progress in decode for 15.5 s"


def test_decode_may_take_fifty_times_its_average_step():
    pulse = new_pulse()
    pulse.beat(beat(0), 100.0)
    pulse.beat(beat(2), 101.0)
    assert pulse.step_s == {"decode": 0.5}
    assert pulse.limit_s("decode") == 25.0
    still(pulse, "decode", 102.0, 126.0, step=2)
    assert pulse.complaint(126.0) is None
    assert text_of(pulse, 126.5) == "made no progress in decode for 25.5 s"


def test_prefill_may_take_ten_times_its_average_slice():
    pulse = new_pulse()
    still(pulse, "prefill", 100.0, 119.0, step=3)
    pulse.beat(beat(4, phase="prefill"), 120.0)
    assert pulse.step_s == {"prefill": 20.0}
    assert pulse.limit_s("prefill") == 200.0
    assert pulse.limit_s("decode") == 15.0


def test_the_average_moves_by_a_fifth_and_short_steps_leave_the_floor():
    pulse = new_pulse()
    pulse.beat(beat(0), 100.0)
    pulse.beat(beat(10), 101.0)
    pulse.beat(beat(12), 102.0)
    assert pulse.step_s["decode"] == 0.1 + 0.2 * (0.5 - 0.1)
    assert pulse.limit_s("decode") == 15.0


def test_what_happens_between_requests_is_no_step():
    pulse = new_pulse()
    pulse.beat(beat(0, is_busy=False, phase="idle"), 100.0)
    pulse.beat(beat(9), 200.0)
    pulse.beat(beat(19, is_busy=False, phase="idle"), 201.0)
    pulse.beat(beat(20), 300.0)
    assert pulse.step_s == {}


def test_silence_is_told_before_being_stuck():
    pulse = new_pulse()
    pulse.beat(beat(7), 100.0)
    assert text_of(pulse, 200.0) == "gave no sign of life for 100.0 s"


def test_a_load_may_be_silent_and_counts_progress_only():
    pulse = Pulse(LIMITS, 100.0)
    assert pulse.complaint(160.0) is None
    assert text_of(pulse, 161.0) == "made no progress in starting for 61.0 s"
    pulse.moved("loading", 161.0)
    for now_s in range(162, 225):
        # One of before may come late; none of them is progress.
        pulse.beat(beat(0, is_busy=False, phase="starting"), float(now_s))
    assert text_of(pulse, 222.0) == "made no progress in loading for 61.0 s"
    pulse.moved("loading", 222.0)
    pulse.moved("warming", 270.0)
    assert pulse.complaint(390.0) is None
    assert text_of(pulse, 391.0) == "made no progress in warming for 121.0 s"


def test_the_settings_are_the_floors():
    settings = Settings(
        home=Path(), wedge_timeout_s=120.0, heartbeat_timeout_s=7.0, load_timeout_s=600.0
    )
    assert Limits.of(settings) == Limits(
        silent_s=7.0, prefill_s=120.0, decode_s=15.0, restore_s=120.0, load_s=60.0, warm_s=120.0
    )
    short = Settings(home=Path(), wedge_timeout_s=5.0)
    assert (Limits.of(short).prefill_s, Limits.of(short).decode_s) == (5.0, 5.0)


def test_the_last_beat_is_kept():
    pulse = new_pulse()
    assert pulse.last is None
    pulse.beat(beat(1), 101.0)
    pulse.beat(beat(2), 102.0)
    assert pulse.last == beat(2)
