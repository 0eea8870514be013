"""Ends of slots inside a block: lost ones are recognised by tokens, and no longer once on disk."""

from __future__ import annotations

from pathlib import Path

import msgspec

from runtime.slot_events import HotBudget, Lost, SlotQueued
from store.types import LostRow, PrefixPiece
from tests.integration.test_kv_replay import Hashing
from tests.kv_sessions import FIRST, TURN_2, Session, ids, reused

SHORT = ids(9, 10)
LONGER = [*SHORT, *ids(10, 30)]


def end_of(session: Session, token_ids: list[int]) -> PrefixPiece:
    """How the end of these tokens is known, inside the first block."""
    root = session.chain.root
    return PrefixPiece(session.chain.end_hash(root, token_ids), root, len(token_ids))


def told(root: Path, token_ids: list[int]) -> Session:
    """A worker that was told that these were lost."""
    session = Session(Hashing(is_hybrid=False), root)
    lost = LostRow(key=b"k", name="m", pieces=(end_of(session, token_ids),))
    session.tiers.hear(Lost(rows=(lost,)))
    return session


def why(session: Session, token_ids: list[int]) -> object:
    cursor = session.cursor(token_ids, ttl_s=0.0)
    session.take_up(cursor)
    session.tiers.release(cursor)
    return reused(cursor)[2]


def computed(session: Session, token_ids: list[int]) -> None:
    cursor = session.cursor(token_ids)
    kv, at = session.take_up(cursor)
    end = len(token_ids) - 1
    model = session.model
    assert isinstance(model, Hashing)
    model.compute(kv, token_ids, at, end)
    session.tiers.on_prefill(cursor, kv, (at, end), 0.001)
    session.tiers.release(cursor)


def test_only_who_says_the_same_tokens_misses_a_lost_end(tmp_path: Path):
    session = told(tmp_path, SHORT)
    assert why(session, LONGER) == "not_yet_durable"
    assert why(session, [*SHORT[:-1], 5, *ids(10, 30)]) == "first_seen"
    assert why(session, SHORT[:-1]) == "first_seen", "it does not go as far"
    session.close()


def test_a_slot_that_goes_through_a_lost_end_takes_it_along(tmp_path: Path):
    session = told(tmp_path, SHORT)
    computed(session, LONGER)
    [queued] = session.noted
    assert isinstance(queued, SlotQueued)
    assert end_of(session, SHORT) in queued.pieces
    session.wait_until_written()
    [(job, _)] = session.written
    session.tiers.on_saved([job.header.id])
    session.tiers.on_gone([job.header.id], "evicted")
    session.tiers.hear(HotBudget(num_bytes=0))
    assert why(session, [*SHORT, 5, 6]) == "first_seen", "it was on disk since"
    session.close()


def test_one_that_says_something_else_leaves_it(tmp_path: Path):
    session = told(tmp_path, SHORT)
    computed(session, FIRST)
    [queued] = session.noted
    assert isinstance(queued, SlotQueued)
    assert end_of(session, SHORT) not in queued.pieces
    assert why(session, LONGER) == "not_yet_durable"
    assert why(session, TURN_2) != "not_yet_durable"
    session.close()


def test_what_is_taken_up_behind_a_lost_piece_does_not_hide_that_it_was_lost(tmp_path: Path):
    model = Hashing(is_hybrid=False)
    session = Session(model, tmp_path)
    computed(session, FIRST)
    computed(session, TURN_2)
    first, second = session.publish()
    session.close()
    session = Session(model, tmp_path)
    pieces = [PrefixPiece(one, b"", 0) for one in first.block_hashes]
    session.tiers.hear(Lost(rows=(LostRow(key=b"k", name="m", pieces=tuple(pieces)),)))
    session.tiers.learn([msgspec.structs.replace(second, parent=None)])
    cursor = session.cursor(TURN_2)
    kv, at = session.take_up(cursor)
    assert (at, cursor.use.reason) == (0, "not_yet_durable")
    model.compute(kv, TURN_2, 0, second.start)
    session.tiers.on_prefill(cursor, kv, (0, second.start), 0.001)
    assert session.tiers.knows_more(cursor, second.start)
    _, at = session.tiers.restore(cursor, num_had=second.start)
    assert at == len(TURN_2) - 1
    assert reused(cursor) == (at - second.start, "warm", "not_yet_durable")
    assert cursor.use.at == 0
    session.close()
