"""Caches that stay as they are for the next turn: the same bytes, within memory, nobody else's."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.worker.model import LoadedModel
from tests.kv_sessions import FIRST, NEXT, SAID, TURN_2, Session, ids, load
from tests.tiny_models import write_model

MOVES = ("go on", "edit", "branch", "again", "delete", "rows", "calm")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_model(tmp_path_factory.mktemp("dense"), num_hidden_layers=1))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_model(tmp_path_factory.mktemp("hybrid"), "lfm2"))


def answered(talk: Session, token_ids: list[int], said: list[int], **fields: Any) -> list[Any]:
    """A whole request; the caches that it ended with."""
    cursor = talk.cursor(token_ids, **fields)
    kv, start = talk.take_up(cursor)
    talk.compute(cursor, kv, start)
    talk.answer(cursor, kv, said)
    return kv


def same_bytes(one: list[Any], other: list[Any], num_tokens: int) -> bool:
    return all(
        cache.offset == again.offset == num_tokens
        and mx.array_equal(cache.keys[:, :, :num_tokens], again.keys[:, :, :num_tokens]).item()
        and mx.array_equal(cache.values[:, :, :num_tokens], again.values[:, :, :num_tokens]).item()
        for cache, again in zip(one, other, strict=True)
        if num_tokens
    )


def bytes_of_idle_caches(session: Session) -> int:
    return session.state.idle_caches.num_bytes


def test_the_next_turn_has_the_caches_of_the_last_one_themselves(dense: LoadedModel):
    session = Session(dense)
    ended = answered(session, FIRST, SAID)
    kv, num_tokens = session.take_up(session.cursor(TURN_2))
    assert num_tokens == len(FIRST) + len(SAID)
    assert [id(cache) for cache in kv] == [id(cache) for cache in ended]
    assert kv[0].offset == num_tokens


def test_two_that_go_on_from_one_turn_have_caches_of_their_own(dense: LoadedModel):
    session = Session(dense)
    answered(session, FIRST, SAID)
    first, _ = session.take_up(session.cursor(TURN_2))
    second, num_tokens = session.take_up(session.cursor(TURN_2))
    assert not {id(cache) for cache in first} & {id(cache) for cache in second}
    assert same_bytes(first, second, num_tokens)


def test_layers_that_cannot_forget_leave_none(hybrid: LoadedModel):
    session = Session(hybrid)
    answered(session, FIRST, SAID)
    assert len(session.state.idle_caches) == 0


def test_what_is_deleted_leaves_its_caches_too_and_nobody_elses(dense: LoadedModel):
    session = Session(dense)
    answered(session, FIRST, SAID, session="a")
    others = ids(8, 90)
    answered(session, others, SAID, session="b")
    session.delete("a")
    assert len(session.state.idle_caches) == 1
    assert session.take_up(session.cursor(TURN_2))[1] == 0
    kept = session.take_up(session.cursor([*others, *SAID, *NEXT]))
    assert kept[1] == len(others) + len(SAID)
    assert len(session.state.idle_caches) == 0


def test_they_take_what_requests_and_the_blocks_leave(dense: LoadedModel):
    session = Session(dense)
    answered(session, FIRST, SAID)
    answered(session, ids(8, 90), SAID)
    both = bytes_of_idle_caches(session)
    session.tiers.leave_beside_rows(session.tiers.memory.num_bytes + both)
    assert bytes_of_idle_caches(session) == both
    session.tiers.leave_beside_rows(session.tiers.memory.num_bytes + both - 1)
    assert 0 < bytes_of_idle_caches(session) < both
    session.tiers.leave_beside_rows(session.tiers.memory.num_bytes)
    assert bytes_of_idle_caches(session) == 0
    assert session.take_up(session.cursor(TURN_2))[1] == len(FIRST) + len(SAID)


def test_who_is_restored_next_need_not_make_room_for_its_own_caches(dense: LoadedModel):
    session = Session(dense)
    ended = answered(session, FIRST, SAID)
    answered(session, ids(8, 90), SAID)
    cursor = session.cursor(TURN_2)
    session.tiers.begin(cursor)
    session.tiers.leave_beside_rows(session.tiers.memory.num_bytes, [cursor])
    kv, _ = session.tiers.restore(cursor)
    assert [id(cache) for cache in kv] == [id(cache) for cache in ended]
    assert bytes_of_idle_caches(session) == 0


def test_another_tenant_has_none_of_them(dense: LoadedModel):
    session = Session(dense)
    answered(session, FIRST, SAID, tenant="one")
    assert session.take_up(session.cursor(TURN_2, tenant="two"))[1] == 0
    assert session.take_up(session.cursor(TURN_2, tenant="one"))[1] == len(FIRST) + len(SAID)


class Pair:
    """The same requests with idle caches and without; what both take up is the same to the byte."""

    def __init__(self, model: LoadedModel) -> None:
        self.sessions = Session(model), Session(model)
        self.talks: list[list[int]] = []

    def turn(self, number: int, token_ids: list[int], said: list[int]) -> None:
        """One more request of a conversation."""
        cursors = [one.cursor(token_ids, session=f"{number}") for one in self.sessions]
        pairs = [*zip(self.sessions, cursors, strict=True)]
        (ours, num_ours), (theirs, num_theirs) = (one.take_up(cursor) for one, cursor in pairs)
        assert num_ours == num_theirs
        assert same_bytes(ours, theirs, num_ours)
        for (session, cursor), kv in zip(pairs, (ours, theirs), strict=True):
            session.compute(cursor, kv, num_ours)
            session.answer(cursor, kv, said)
        self.sessions[1].state.idle_caches.fit(0)

    def delete(self, number: int) -> None:
        for session in self.sessions:
            session.delete(f"{number}")
        self.sessions[1].state.idle_caches.fit(0)


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(MOVES), st.integers(0, 2), st.integers(1, 60)), max_size=12
    )
)
def test_what_is_taken_up_is_what_the_blocks_hold(
    dense: LoadedModel, moves: list[tuple[str, int, int]]
):
    pair = Pair(dense)
    for at, (move, number, size) in enumerate(moves):
        if move == "delete":
            pair.delete(number)
            continue
        if move in ("rows", "calm"):
            num_bytes = pair.sessions[0].tiers.memory.num_bytes * size // 30
            for session in pair.sessions:
                session.tiers.leave_beside_rows(num_bytes if move == "rows" else None)
            continue
        talk = pair.talks[number] if number < len(pair.talks) else ids(number, 40)
        if move == "edit":
            talk = [*talk[: size % len(talk)], *ids(100 + at, 20)]
        new = [] if move == "again" else ids(200 + at, size)
        said = ids(300 + at, 5)
        pair.turn(number, [*talk, *new], said)
        if move != "branch":
            pair.talks[number : number + 1] = [[*talk, *new, *said]]
