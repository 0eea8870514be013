"""When a worker is in trouble: silent, or busy without a step."""

from runtime.pulse import Pulse
from runtime.wire import Heartbeat


def beat(step: int, *, is_busy: bool = True, phase: str = "decode") -> Heartbeat:
    return Heartbeat(step=step, is_busy=is_busy, phase=phase)


def new_pulse() -> Pulse:
    return Pulse(silent_s=10.0, stuck_s=60.0, now_s=100.0)


def test_silence_counts_from_the_start_before_the_first_beat():
    pulse = new_pulse()
    assert pulse.complaint(110.0) is None
    assert pulse.complaint(110.5) == "gave no sign of life for 10.5 s"


def test_a_beat_ends_the_silence():
    pulse = new_pulse()
    pulse.beat(beat(0), 109.0)
    assert pulse.complaint(119.0) is None
    assert pulse.complaint(119.25) == "gave no sign of life for 10.2 s"


def test_busy_without_a_step_is_stuck_and_names_the_phase():
    pulse = new_pulse()
    pulse.beat(beat(7), 100.0)
    for now_s in range(105, 165, 5):
        pulse.beat(beat(7, phase="prefill"), float(now_s))
        assert pulse.complaint(float(now_s)) is None
    pulse.beat(beat(7, phase="prefill"), 161.0)
    assert pulse.complaint(161.0) == "made no progress in prefill for 61.0 s"


def test_a_step_starts_the_count_again():
    pulse = new_pulse()
    pulse.beat(beat(7), 100.0)
    pulse.beat(beat(8), 155.0)
    pulse.beat(beat(8), 214.0)
    assert pulse.complaint(214.0) is None
    assert pulse.complaint(215.5) == "made no progress in decode for 60.5 s"


def test_idle_is_never_stuck_and_the_count_starts_when_it_gets_busy():
    pulse = new_pulse()
    for now_s in range(100, 1000, 5):
        pulse.beat(beat(7, is_busy=False, phase="idle"), float(now_s))
        assert pulse.complaint(float(now_s)) is None
    pulse.beat(beat(7), 1000.0)
    pulse.beat(beat(7), 1050.0)
    assert pulse.complaint(1050.0) is None
    pulse.beat(beat(7), 1056.0)
    assert pulse.complaint(1056.0) == "made no progress in decode for 61.0 s"


def test_silence_is_told_before_being_stuck():
    pulse = new_pulse()
    pulse.beat(beat(7), 100.0)
    assert pulse.complaint(200.0) == "gave no sign of life for 100.0 s"


def test_the_last_beat_is_kept():
    pulse = new_pulse()
    assert pulse.last is None
    pulse.beat(beat(1), 101.0)
    pulse.beat(beat(2), 102.0)
    assert pulse.last == beat(2)
