"""What follows from crashes: exact seconds, the breaker, and who is blamed."""

import pytest

from runtime.supervisor.failures import CrashHistory, Quarantine, Verdict


def test_after_the_first_crash_there_is_no_pause_and_then_they_grow_and_take_jitter():
    history = CrashHistory()
    pauses = [history.crashed(1000.0 * i, 0.0, 0.0).hold_s for i in range(8)]
    assert pauses == [0.0, 1.0, 5.0, 15.0, 60.0, 300.0, 300.0, 300.0]
    history = CrashHistory()
    assert history.crashed(0.0, 0.0, 1.0) == Verdict(hold_s=0.0, is_final=False)
    assert history.crashed(1000.0, 0.0, 1.0) == Verdict(hold_s=1.2, is_final=False)
    assert history.crashed(2000.0, 0.0, 0.5).hold_s == pytest.approx(5.5)


def test_ten_healthy_minutes_are_a_new_beginning():
    history = CrashHistory()
    history.crashed(0.0, 0.0, 0.0)
    history.crashed(1000.0, 599.0, 0.0)
    assert history.crashed(2000.0, 600.0, 0.0).hold_s == 0.0
    assert history.crashed(3000.0, 599.0, 0.0).hold_s == 1.0


def test_the_third_crash_in_five_minutes_opens_the_breaker():
    history = CrashHistory()
    assert not history.crashed(0.0, 0.0, 0.0).is_final
    assert not history.crashed(100.0, 90.0, 0.0).is_final
    assert history.crashed(299.9, 190.0, 0.0) == Verdict(hold_s=600.0, is_final=True)


def test_three_crashes_in_more_than_five_minutes_do_not():
    history = CrashHistory()
    assert [history.crashed(at, 0.0, 0.0).is_final for at in (0.0, 150.0, 300.0)] == [False] * 3
    assert history.crashed(301.0, 0.0, 0.0).is_final


def test_after_the_breaker_one_crash_is_enough_until_it_was_forgiven():
    history = CrashHistory()
    for at_s in (0.0, 1.0, 2.0):
        history.crashed(at_s, 0.0, 0.0)
    assert history.crashed(5000.0, 30.0, 0.0).is_final
    history.forgive()
    assert history.crashed(5001.0, 0.0, 0.0) == Verdict(hold_s=0.0, is_final=False)


def test_what_cannot_be_loaded_is_held_back_for_a_minute_and_is_no_crash():
    history = CrashHistory()
    assert history.unloadable() == Verdict(hold_s=60.0, is_final=True)
    assert history.crashed(0.0, 0.0, 0.0).hold_s == 0.0


def convicted(quarantine: Quarantine, digest: bytes, now_s: float) -> float | None:
    return quarantine.convicted_until_s(lambda: digest, now_s)


def test_a_request_that_two_workers_died_of_is_convicted_for_ten_minutes():
    quarantine = Quarantine()
    quarantine.died([b"a"], 0.0)
    assert convicted(quarantine, b"a", 0.0) is None
    assert quarantine.is_suspect(lambda: b"a", 599.0)
    quarantine.died([b"a"], 100.0)
    assert convicted(quarantine, b"a", 100.0) == 700.0
    assert convicted(quarantine, b"a", 700.0) is None
    assert quarantine.is_empty


def test_nothing_is_convicted_for_a_death_beside_others_but_tried_alone():
    quarantine = Quarantine()
    assert not quarantine.died([b"innocent"], 0.0)
    assert not quarantine.runs_alone(lambda: b"innocent", 0.0)
    assert quarantine.died([b"innocent", b"guilty"], 1.0)
    assert convicted(quarantine, b"innocent", 1.0) is None
    assert quarantine.runs_alone(lambda: b"innocent", 1.0)
    quarantine.acquit(lambda: b"innocent")
    assert not quarantine.is_suspect(lambda: b"innocent", 1.0)
    assert quarantine.died([b"guilty"], 2.0)
    assert convicted(quarantine, b"guilty", 2.0) == 602.0


def test_what_is_explained_by_a_request_does_not_open_the_breaker():
    history = CrashHistory()
    verdicts = [history.crashed(float(i), 0.0, 0.0, is_explained=True) for i in range(9)]
    assert set(verdicts) == {Verdict(hold_s=1.0, is_final=False)}
    assert history.crashed(10.0, 0.0, 0.0) == Verdict(hold_s=0.0, is_final=False)


def test_of_several_suspects_nobody_is_convicted():
    quarantine = Quarantine()
    quarantine.died([b"a", b"b"], 0.0)
    for at_s in (1.0, 2.0, 3.0):
        quarantine.died([b"a", b"b"], at_s)
    assert convicted(quarantine, b"a", 3.0) is None
    quarantine.died([b"b"], 4.0)
    assert convicted(quarantine, b"b", 4.0) == 604.0


def test_a_suspicion_ends_after_ten_minutes_of_peace():
    quarantine = Quarantine()
    quarantine.died([b"a"], 0.0)
    quarantine.died([b"a"], 600.0)
    assert convicted(quarantine, b"a", 600.0) is None


def test_nothing_is_digested_while_nobody_is_suspect():
    quarantine = Quarantine()

    def explode() -> bytes:
        raise AssertionError("digested")

    assert not quarantine.is_suspect(explode, 0.0)
    assert quarantine.convicted_until_s(explode, 0.0) is None


def test_the_number_of_suspects_is_bounded():
    quarantine = Quarantine()
    quarantine.died([b"first"], 0.0)
    quarantine.died([number.to_bytes(4, "big") for number in range(1024)], 1.0)
    assert not quarantine.is_suspect(lambda: b"first", 1.0)
    assert quarantine.is_suspect(lambda: (1023).to_bytes(4, "big"), 1.0)
