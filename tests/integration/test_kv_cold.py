"""Cold slots over a real model and a real store: asked for, waited for, and not for ever."""

from pathlib import Path

import msgspec
import pytest

from runtime.slot_events import HotAsked, HotNow, SlotsAway, SlotsPromoted, SlotsWanted
from runtime.worker.model import LoadedModel
from store.slots import slot_path
from tests.kv_sessions import FIRST, TURN_2, Session, Stored, check_right, ids, load, reused
from tests.tiny_models import write_model


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    if request.param == "hybrid":
        return load(write_model(folder, "lfm2"))
    return load(write_model(folder, num_hidden_layers=1))


@pytest.fixture
def stored(model: LoadedModel, tmp_path: Path) -> Stored:
    return Stored(model, tmp_path / "store")


def cold(stored: Stored) -> Session:
    session = Session(stored.model, stored.root)
    session.tiers.learn([msgspec.structs.replace(one, tier="cold") for one in stored.known])
    return session


def test_cold_slots_are_asked_for_and_read_when_they_are_here(stored: Stored):
    session = cold(stored)
    cursor = session.cursor(TURN_2)
    session.tiers.begin(cursor)
    wanted = [SlotsWanted(ids=(one.id,)) for one in stored.known]
    assert (session.reports, cursor.is_waiting, cursor.use.tier) == (wanted, True, "cold")
    session.tiers.hear(SlotsPromoted(ids=(stored.prompt.id,)))
    session.hear()
    assert cursor.is_waiting
    session.tiers.hear(SlotsPromoted(ids=(stored.answer.id,)))
    session.hear()
    assert not cursor.is_waiting
    _, num_tokens = session.tiers.restore(cursor)
    assert num_tokens == 120
    assert reused(cursor) == (120, "cold", "first_seen")


def test_nobody_waits_for_what_is_away_and_it_is_asked_for_again(stored: Stored):
    session = cold(stored)
    cursors = [session.cursor(TURN_2) for _ in range(2)]
    for cursor in cursors:
        session.tiers.begin(cursor)
    session.tiers.hear(SlotsAway(ids=(stored.prompt.id,)))
    session.tiers.hear(SlotsAway(ids=(stored.answer.id,)))
    for cursor in cursors:
        assert not cursor.is_waiting
        session.tiers.restore(cursor)
        assert reused(cursor) == (0, "none", "away")
    session.check()
    session.reports.clear()
    again = session.cursor(TURN_2)
    session.tiers.begin(again)
    assert session.reports == [SlotsWanted(ids=(one.id,)) for one in stored.known]
    session.tiers.hear(SlotsPromoted(ids=(*(one.id for one in stored.known),)))
    while again.is_waiting:
        session.hear()
    session.tiers.restore(again)
    assert reused(again)[:2] == (120, "cold")


def test_what_comes_before_what_is_away_is_used(stored: Stored):
    session = Session(stored.model, stored.root)
    session.tiers.learn([stored.prompt, msgspec.structs.replace(stored.answer, tier="cold")])
    cursor = session.cursor(TURN_2)
    session.tiers.begin(cursor)
    session.tiers.hear(SlotsAway(ids=(stored.answer.id,)))
    while cursor.is_waiting:
        session.hear()
    session.tiers.restore(cursor)
    assert reused(cursor) == (99, "warm", "away")


@pytest.mark.parametrize("prefill_s_per_token", [10.0, 0.01])
def test_nobody_waits_longer_than_computing_what_is_missing_takes(
    stored: Stored, prefill_s_per_token: float
):
    session = stored.session()
    check_right(session, FIRST)
    session.tiers.on_demoted([stored.answer.id])
    session.tier_state.rates.prefill_s_per_token = prefill_s_per_token
    cursor = session.cursor(TURN_2)
    session.tiers.begin(cursor)
    assert cursor.is_waiting
    num_tokens = 120 if session.tiers.needs_state else 21
    patience_s = cursor.give_up_s - cursor.started_s
    assert patience_s == pytest.approx(num_tokens * prefill_s_per_token)
    session.tiers.give_up(cursor)


@pytest.mark.parametrize("tier", ["warm", "cold"])
def test_before_anything_is_computed_reading_may_take_what_computing_took_once(
    stored: Stored, tier: str
):
    session = Session(stored.model, stored.root)
    changes = {"recompute_ms": 10_000.0, "tier": tier}
    session.tiers.learn([msgspec.structs.replace(one, **changes) for one in stored.known])
    cursor = session.cursor(TURN_2)
    session.tiers.begin(cursor)
    assert cursor.give_up_s - cursor.started_s == pytest.approx(20.0)
    session.tiers.give_up(cursor)


def test_who_waits_too_long_goes_on_without(stored: Stored):
    session = cold(stored)
    cursor = session.cursor(TURN_2)
    session.tiers.begin(cursor)
    assert not session.tiers.is_overdue(cursor)
    cursor.give_up_s = 0.0
    assert session.tiers.is_overdue(cursor)
    session.tiers.give_up(cursor)
    session.tiers.restore(cursor)
    assert reused(cursor) == (0, "none", "slower_than_prefill")
    session.tiers.hear(SlotsPromoted(ids=(*(one.id for one in stored.known),)))
    assert reused(check_right(session, TURN_2))[0] == 120


def test_nobody_waits_for_what_is_gone(stored: Stored):
    session = cold(stored)
    cursor = session.cursor(TURN_2)
    session.tiers.begin(cursor)
    session.tiers.on_gone([stored.prompt.id, stored.answer.id], "expired")
    assert not cursor.is_waiting
    session.tiers.restore(cursor)
    assert reused(cursor) == (0, "none", "expired")
    session.check()


def test_memory_holds_its_budget_as_soon_as_something_is_read(stored: Stored):
    session = stored.session()
    session.turn(ids(7, 101), ids(8, 19))
    hot = session.tiers.hot
    hot.budget_bytes = hot.num_bytes
    _, num_tokens = session.take_up(session.cursor(TURN_2))
    assert num_tokens == 120
    assert 0 < hot.num_bytes <= hot.budget_bytes


def test_what_is_read_before_what_it_continues_is_not_said_to_be_hot(stored: Stored):
    path = slot_path(stored.root, stored.prompt.id)
    elsewhere = path.rename(stored.root / "elsewhere")
    session = stored.session()
    cursor = session.cursor(TURN_2)
    session.tiers.begin(cursor)
    for _ in stored.known:
        session.hear()
    asked = HotAsked(number=1, ids=(stored.answer.id,))
    session.tiers.hear(asked)
    assert session.reports[-1] == HotNow(number=1, ids=())
    elsewhere.rename(path)
    session.tiers.hear(SlotsPromoted(ids=(stored.prompt.id,)))
    session.hear()
    session.tiers.hear(asked)
    assert session.reports[-1] == HotNow(number=1, ids=asked.ids)
