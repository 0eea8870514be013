"""Turns of what was forgotten stay forgotten, however much is forgotten besides."""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec

from runtime.kv.deletions import Deletions, Recognised
from runtime.kv_messages import Forget, TurnsFound, TurnsWanted
from runtime.prompt.healing import TurnScope
from runtime.worker.input.turns import AskedHeads, TurnStore
from store.keyed_names import Asker, Chain, Whom
from store.turns import Said, Turn
from tests.kept_turns import CHAIN, SECRET, KeptHeads

KEY = b"k" * 16
MINE = TurnScope(Asker(session_id="mine"))


def turn() -> Turn:
    ids = array("I", [1, 2, 3])
    return Turn(KEY, b"", 0, ids.tobytes(), ends=(3,), prefix_end=1)


class Forgetting:
    """Turns, and a server that numbers deletions."""

    def __init__(self) -> None:
        self.deletions = Deletions()
        self.turns = TurnStore(self.deletions)
        self.number = 0

    def forget(self, whom: Whom, secret: bytes = b"") -> None:
        self.number += 1
        self.deletions.add(Forget(self.number, whom, secret))
        self.turns.forget(whom, secret)

    def put(self, came_after: int) -> None:
        self.turns.put(turn(), MINE, Recognised(MINE.asker, came_after))


def test_an_answer_that_began_before_its_conversation_was_forgotten_is_not_kept():
    one = Forgetting()
    one.forget(Whom(session_id="mine"))
    one.forget(Whom(session_id="other"))
    one.put(0)
    assert one.turns.find([KEY], MINE) is None
    one.put(1)
    assert one.turns.find([KEY], MINE) is not None


def test_that_others_were_forgotten_costs_no_answer():
    one = Forgetting()
    one.forget(Whom(session_id="another"))
    one.put(0)
    assert one.turns.find([KEY], MINE) is not None
    one.forget(Whom())
    one.put(1)
    assert one.turns.find([KEY], MINE) is None


def test_a_turn_that_goes_on_from_itself_is_not_followed():
    turns = TurnStore()
    turns.put(Turn(KEY, KEY, 3, b""), MINE)
    assert turns.find([KEY], MINE) is None


def found_by(turns: TurnStore, scope: TurnScope = MINE) -> list[Turn]:
    turns.fetch([KEY], scope)
    found = turns.find([KEY], scope)
    return list(found[1][0].turns) if found is not None else []


def test_what_a_head_of_another_conversation_has_is_found_and_is_not_ones_own(tmp_path: Path):
    heads = KeptHeads(tmp_path)
    heads.keep(MINE, [1, 2, 3], Said((turn(),)))
    other = TurnScope(Asker(session_id="other"))
    for scope in (MINE, other):
        turns = heads.turns()
        assert found_by(turns, scope) == [turn()]
        assert turns.is_of(turn(), scope) == (scope == MINE)
    turns.forget(Whom(session_id="nobody"), SECRET)
    assert turns.find([KEY], other) is None, "it may have been meant: it is read again"
    assert found_by(turns, other) == [turn()]


def test_without_a_session_one_is_known_by_how_it_began(tmp_path: Path):
    heads, scope = KeptHeads(tmp_path), TurnScope(Asker("m"), b"began")
    heads.keep(scope, [1, 2, 3], Said((turn(),), b"began"))
    turns = heads.turns()
    assert found_by(turns, scope) == [turn()]
    for other in (scope._replace(beginning=b"otherwise"), scope._replace(tenant="t")):
        assert found_by(turns, other) == [turn()]
        assert not turns.is_of(turn(), other)
    assert turns.is_of(turn(), scope)


def test_the_thoughts_of_a_session_are_remembered_where_none_of_its_turns_comes_back(
    tmp_path: Path,
):
    heads = KeptHeads(tmp_path)
    heads.keep(MINE, [1, 2, 3], Said((msgspec.structs.replace(turn(), thoughts=b"t"),)))
    turns = heads.turns()
    turns.fetch([b"n" * 16], MINE)
    assert turns.had_thoughts(MINE)
    turns = heads.turns()
    turns.fetch([b"n" * 16], TurnScope(Asker(session_id="other")))
    assert not turns.had_thoughts(MINE)


def test_what_is_being_read_while_something_is_forgotten_is_asked_for_again(tmp_path: Path):
    heads = KeptHeads(tmp_path)
    heads.keep(MINE, [1, 2, 3], Said((turn(),)))
    paths = tuple(str(one) for one in heads.files)
    asked_for: list[TurnsWanted] = []

    def answer(wanted: TurnsWanted) -> None:
        asked_for.append(wanted)
        if len(asked_for) == 1:  # its file is still there, as another's may be
            turns.forget(Whom(session_id="mine"), SECRET)
        found = paths if len(asked_for) == 1 else ()
        asked.hear(TurnsFound(number=wanted.number, paths=found))

    asked = AskedHeads(answer)
    turns = TurnStore(heads=asked)
    turns.attach(SECRET, CHAIN.root_of)
    assert found_by(turns) == []
    assert len(asked_for) == 2


def test_what_lost_its_beginning_in_memory_is_looked_for_on_disk(tmp_path: Path):
    heads, ids = KeptHeads(tmp_path), [1, 2, 3, 4, 5, 6]
    first = msgspec.structs.replace(turn(), key=b"f" * 16)
    last = Turn(KEY, first.id, 3, array("I", ids[3:]).tobytes())
    heads.keep(MINE, ids, Said((first, last)))
    turns = heads.turns(max_memory_bytes=30)
    for one in (first, last, Turn(b"o" * 16, b"", 0, turn().token_ids)):
        turns.put(one, MINE)
    assert turns.find([KEY], MINE) is None
    assert not turns.has(KEY, b"", MINE)
    assert found_by(turns) == [first, last]
    assert turns.has(KEY, b"", MINE)


def test_turns_that_are_lent_are_found_unless_their_conversation_was_deleted():
    one = Forgetting()
    one.forget(Whom(session_id="mine"))
    for came_after in (0, 1):
        one.turns.lend([turn()], Recognised(MINE.asker, came_after))
        assert (one.turns.find([KEY], MINE) is not None) == bool(came_after)
    one.forget(Whom(session_id="other"))
    assert one.turns.find([KEY], MINE) is None, "nobody owns it"


def test_a_turn_that_ends_otherwise_than_its_head_is_forgotten_with_it():
    """It was cut before a stop string, or ends with another mark than its client's template has."""
    turns, scope = TurnStore(), TurnScope(Asker("m"), b"began")
    said = Turn(KEY, b"", 0, array("I", [1, 2, 3, 7, 99]).tobytes())
    turns.put(said, scope)
    head = array("I", [1, 2, 3, 7, 8]).tobytes()
    turns.forget(Whom(model="m", chain=Chain(head, turns=(said.id,))), SECRET)
    assert turns.find([KEY], scope) is None


def test_nothing_is_found_where_no_store_is_open_or_nobody_answers_any_more(tmp_path: Path):
    heads = KeptHeads(tmp_path)
    heads.keep(MINE, [1, 2, 3], Said((turn(),)))
    asked = AskedHeads(heads.asked.append)
    turns = TurnStore(heads=asked)
    assert found_by(turns) == []
    asked.close()
    turns.attach(SECRET, CHAIN.root_of)
    assert found_by(turns) == []
    assert heads.asked == []


def test_turns_take_no_more_memory_than_they_may():
    turns = TurnStore(max_memory_bytes=5 * 12)
    for number in range(9):
        key = bytes([number]) * 16
        turns.put(Turn(key, b"", 0, turn().token_ids), MINE)
    is_there = [turns.find([bytes([number]) * 16], MINE) is not None for number in range(9)]
    assert is_there == [False] * 4 + [True] * 5
