"""Turns that were read stay in memory for the next request, and no longer than their files."""

from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.prompt.healing import TurnScope
from runtime.worker.input.turns import TurnReader, TurnStore
from store.keyed_names import Asker, Whom
from store.turns import Named, Turn, packed

TURN_TOKENS = 100
SECRET = b"secret"


def turn(number: int) -> Turn:
    return Turn(b"%d" % number, b"", 0, array("I", [number] * TURN_TOKENS).tobytes())


def written(folder: Path, number: int) -> tuple[Named, Path]:
    path = folder / f"{number}.turn"
    path.write_bytes(packed(turn(number)))
    return Named(f"{number}", f"{number}"), path


def test_what_was_read_is_not_read_again_while_its_file_is_there(tmp_path: Path):
    reader, (name, path) = TurnReader(), written(tmp_path, 1)
    first = reader.read(name, path)
    assert first == turn(1)
    assert reader.read(name, path) is first
    path.unlink()
    assert reader.read(name, path) is None
    assert reader.num_bytes == 0


def test_nothing_stays_when_it_is_cleared(tmp_path: Path):
    reader, (name, path) = TurnReader(), written(tmp_path, 1)
    first = reader.read(name, path)
    reader.clear()
    assert reader.num_bytes == 0
    assert reader.read(name, path) is not first


@given(
    moves=st.lists(st.tuples(st.sampled_from(["read", "remove", "write"]), st.integers(0, 5))),
    most=st.integers(0, 4),
)
def test_it_gives_what_is_there_and_keeps_no_more_than_it_may(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[str, int]], most: int
):
    folder = tmp_path_factory.mktemp("turns")
    reader = TurnReader(max_bytes=most * TURN_TOKENS * 4)
    there: set[int] = set()
    for move, number in moves:
        name, path = Named(f"{number}", f"{number}"), folder / f"{number}.turn"
        if move == "write":
            written(folder, number)
            there.add(number)
        elif move == "remove":
            path.unlink(missing_ok=True)
            there.discard(number)
        else:
            assert reader.read(name, path) == (turn(number) if number in there else None)
        assert reader.num_bytes <= most * TURN_TOKENS * 4


def test_a_conversation_that_is_deleted_leaves_nothing_that_was_read(tmp_path: Path):
    store, scope = TurnStore(), TurnScope(Asker("m", "a"))
    store.attach(tmp_path, SECRET)
    store.put(turn(1), scope, is_durable=True)
    store.close()
    store.run()
    assert store.find([turn(1).key], scope) is not None
    assert store._reader.num_bytes > 0
    store.forget(Whom(session_id="a"), SECRET)
    assert store._reader.num_bytes == 0
    assert store.find([turn(1).key], scope) is None
