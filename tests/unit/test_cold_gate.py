"""A cold store that fails once is left alone until it has answered a probe."""

from __future__ import annotations

from pathlib import Path

import pytest
from obstore.store import LocalStore

from store.cold import ColdBucket
from store.cold_gate import MAX_PAUSE_S, ColdGate, Reach
from store.errors import ColdAway, SlotMissing
from tests.slot_samples import slot_id


def test_pauses_grow_up_to_a_bound_and_only_use_makes_them_short_again():
    reach = Reach()
    pauses: list[float] = []
    for _ in range(12):
        reach = reach.failed("it says")
        pauses.append(reach.pause_s)
    assert pauses == [*(2.0**number for number in range(9)), *[MAX_PAUSE_S] * 3]
    found = reach.found()
    assert (found.is_away, found.failed("again").pause_s) == (False, MAX_PAUSE_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path


def test_nothing_is_asked_of_what_is_away_until_a_probe_is_answered(folder: Path):
    gate = ColdGate(ColdBucket(LocalStore(str(folder / "bucket"))))
    in_the_way = folder / "bucket" / slot_id(1)[:2]
    in_the_way.write_text("no directory")
    with pytest.raises(ColdAway, match="the bucket fails"):
        gate.put(slot_id(1), [b"packed"])
    assert gate.reach.is_away
    in_the_way.unlink()
    for call in (
        lambda: gate.put(slot_id(1), [b"packed"]),
        lambda: gate.get(slot_id(1)).__enter__(),
        lambda: gate.delete(slot_id(1)),
        lambda: list(gate.slots()),
    ):
        with pytest.raises(ColdAway, match="is away: the bucket fails"):
            call()
    gate.probe()
    assert gate.reach == Reach(False, 1, gate.reach.why)
    told = gate.put(slot_id(1), [b"packed"])
    assert gate.reach == Reach()
    assert list(gate.slots()) == [told]


def test_what_is_not_there_was_answered(folder: Path):
    gate = ColdGate(ColdBucket(LocalStore(str(folder / "bucket"))))
    with pytest.raises(SlotMissing), gate.get(slot_id(1)):
        pass
    assert not gate.reach.is_away
