"""Turns of what was forgotten stay forgotten, however much is forgotten besides."""

from __future__ import annotations

from array import array
from pathlib import Path

from runtime.kv.deletions import Deletions, Recognised
from runtime.kv_messages import Forget
from runtime.prompt.healing import TurnScope
from runtime.worker.input.turns import TurnStore
from store.keyed_names import Asker, Whom, conversation_key
from store.turns import Turn

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

    def put(self, came_after: int, *, is_durable: bool = False) -> None:
        known = Recognised(MINE.asker, came_after)
        self.turns.put(turn(), MINE, is_durable=is_durable, recognised=known)


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
    turns.put(Turn(KEY, KEY, 3, b""), MINE, is_durable=False)
    assert turns.find([KEY], MINE) is None


def test_turns_of_before_the_store_was_open_are_kept_under_its_names(tmp_path: Path):
    turns = TurnStore()
    turns.put(turn(), MINE, is_durable=True)
    turns.put(
        Turn(b"q" * 16, b"", 0, turn().token_ids),
        TurnScope(Asker(session_id="quiet")),
        is_durable=False,
    )
    turns.attach(tmp_path / "turns" / "m", b"secret")
    turns.close()
    turns.run()
    [path] = tmp_path.rglob("*.turn")
    assert path.parent.name == conversation_key(b"secret", "mine").hex()
    assert KEY.hex() not in path.name
    for secret, is_found in ((b"secret", True), (b"another", False)):
        later = TurnStore()
        later.attach(tmp_path / "turns" / "m", secret)
        assert (later.find([KEY], MINE) is not None) == is_found
    assert turns.find([b"q" * 16], MINE) is not None


def test_what_was_forgotten_before_the_store_was_open_is_not_kept_by_it(tmp_path: Path):
    one = Forgetting()
    turns = one.turns
    one.put(0, is_durable=True)
    one.forget(Whom(key=conversation_key(b"secret", "mine")), b"secret")
    assert turns.find([KEY], MINE) is None
    one.put(0, is_durable=True)
    turns.attach(tmp_path / "turns" / "m", b"secret")
    turns.close()
    turns.run()
    assert list(tmp_path.rglob("*.turn")) == []
