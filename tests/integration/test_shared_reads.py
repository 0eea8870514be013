"""Slots that several requests want at once, or that move while they are read."""

from pathlib import Path

import pytest

from runtime.kv.prefix_tree import Run
from runtime.kv.reader import SlotRead, SlotReader
from runtime.kv.restore import Restorer
from runtime.slot_events import SlotsPromoted
from store.slots import slot_path
from tests.kv_sessions import (
    FIRST,
    PATIENCE_S,
    SAID,
    TURN_2,
    Session,
    Stored,
    load,
    reused,
)
from tests.tiny_models import write_model


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    model = load(write_model(tmp_path / "model", num_hidden_layers=1))
    return Stored(model, tmp_path / "store")


class CountingReader(SlotReader):
    """Notes whole slots that it is asked for."""

    def __init__(self, session: Session, root: Path) -> None:
        super().__init__(root, session.news.put)
        self.asked: list[str] = []

    def read(self, run: Run, slot_id: str, *, tokens_only: bool = False) -> None:
        if not tokens_only:
            self.asked.append(slot_id)
        super().read(run, slot_id, tokens_only=tokens_only)


def next_read(session: Session) -> SlotRead:
    read = session.news.get(timeout=PATIENCE_S)
    assert isinstance(read, SlotRead)
    return read


def test_siblings_that_come_at_once_have_a_slot_read_once(stored: Stored):
    session = stored.session()
    reader = CountingReader(session, stored.root)
    restorer = Restorer(session.tier_state, reader, session.reports.append)
    cursors = [session.cursor(one) for one in (TURN_2, [*FIRST, *SAID, 9, 8], FIRST[:23], TURN_2)]
    for cursor in cursors:
        restorer.begin(cursor)
    while any(cursor.is_waiting for cursor in cursors):
        restorer.on_read(next_read(session))
    assert [restorer.restore(cursor)[1] for cursor in cursors] == [120, 120, 22, 120]
    assert sorted(reader.asked) == sorted([stored.prompt.id, stored.answer.id])


def test_a_slot_that_is_back_before_it_is_found_missing_is_read(stored: Stored):
    """Its reader looked while it was away; that is heard after the news that it is back."""
    path = slot_path(stored.root, stored.prompt.id)
    elsewhere = path.rename(stored.root / "elsewhere")
    session = stored.session()
    cursor = session.cursor(TURN_2)
    session.tiers.begin(cursor)
    reads = [next_read(session), next_read(session)]
    elsewhere.rename(path)
    session.tiers.hear(SlotsPromoted(ids=(stored.prompt.id,)))
    for read in reads:
        session.tiers.hear(read)
    while cursor.is_waiting:
        session.hear()
    session.tiers.restore(cursor)
    assert reused(cursor) == (120, "warm", "first_seen")
