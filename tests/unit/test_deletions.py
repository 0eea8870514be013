"""What a deletion means of what had come before it: exact cases, and how much is remembered."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Sequence

import pytest

from runtime.cache.deletion_log import DeletionLog
from runtime.kv.deletions import Deletions, Recognised
from runtime.kv_messages import Forget
from store.keyed_names import Asker, Chain, Whom, conversation_key

SECRET = b"secret"
ANYBODY = Asker("m")
SYSTEM, ASKED, SAID = range(100), range(100, 130), range(130, 200)
TALK = [*SYSTEM, *ASKED, *SAID]


def chain(ids: Sequence[int] = TALK, **fields: object) -> Chain:
    given: dict[str, object] = {"num_shared": len(SYSTEM), "root": b"r", "block_size": 16}
    return Chain(array("I", ids).tobytes(), **(given | fields))  # pyright: ignore[reportArgumentType]


def means(whom: Whom, one: Recognised) -> bool:
    deletions = Deletions()
    deletions.add(Forget(1, whom, SECRET))
    return deletions.mean(one)


def means_chain(ids: Sequence[int], of: Chain | None = None, **fields: object) -> bool:
    one = Recognised(ANYBODY, 0, ids)._replace(**fields)
    return means(Whom(model="m", chain=of or chain()), one)


@pytest.mark.parametrize(
    ("whom", "asker", "is_meant"),
    [
        (Whom(session_id="a"), Asker("m", "a"), True),
        (Whom(key=conversation_key(SECRET, "a")), Asker("m", "a"), True),
        (Whom(session_id="a"), Asker("m", "b"), False),
        (Whom(session_id="a"), ANYBODY, False),
        (Whom(model="m"), ANYBODY, True),
        (Whom(model="m"), Asker("m", "a"), True),
        (Whom(model="m"), Asker("n", "a"), False),
        (Whom(), ANYBODY, True),
        (Whom(), Asker("n", "a"), True),
    ],
)
def test_what_has_a_name_is_meant_by_it(whom: Whom, asker: Asker, is_meant: bool):
    assert means(whom, Recognised(asker)) == is_meant
    assert not means(whom, Recognised(asker, came_after=1)), "it came later"


def test_a_chain_means_who_goes_on_from_it_and_who_asks_again():
    assert means_chain([*TALK, 1, 2, 3])
    assert means_chain(TALK[:-1]), "the KV of an answer may end before its last token"
    assert means_chain([*TALK[:-4], 9, 9, 9, *range(300, 340)]), "given otherwise by its client"
    assert means_chain([*SYSTEM, *ASKED])
    assert means_chain([]), "whose it is cannot be told"
    assert not means_chain([*TALK, 1], came_after=1)
    assert not means_chain([*TALK, 1], asker=Asker("m", "a"))
    assert not means_chain([*TALK, 1], asker=Asker("n"))
    assert not means_chain([*TALK, 1], root=b"another tenant's")
    assert means_chain([*TALK, 1], root=b"r")


def test_who_shares_no_more_than_what_others_have_is_not_meant():
    assert not means_chain([*SYSTEM, *range(300, 400)])
    assert not means_chain([*SYSTEM, 100, 101, *range(300, 400)]), "less than a block beyond"
    assert means_chain([*SYSTEM, *ASKED, *range(300, 400)])
    assert not means_chain([*SYSTEM, *ASKED, *range(300, 400)], chain(num_shared=130))


def test_who_began_otherwise_or_goes_on_from_another_turn_is_not_meant():
    of = chain(num_shared=0, beginning=b"began")
    sibling = [*SYSTEM, *range(300, 400)]
    assert means_chain(sibling, of), "nothing else is known of it"
    assert not means_chain(sibling, of, beginning=b"otherwise")
    thoughtless = [*SYSTEM, *ASKED, *range(300, 400)]
    assert means_chain(thoughtless, of, beginning=b"began")
    assert not means_chain(thoughtless, of, beginning=b"began", num_said=160), "a branch of it"
    assert means_chain([*TALK, *range(300, 400)], of, beginning=b"began", num_said=len(TALK))


def test_what_is_short_is_known_by_half_of_it():
    of = chain(range(10), num_shared=0)
    assert means_chain([*range(10), 50], of)
    assert means_chain([*range(6), 50, 51, 52], of)
    assert not means_chain([*range(2), 50, 51, 52], of)


def test_only_what_something_in_flight_came_before_is_remembered():
    log, deletions = DeletionLog(), Deletions()
    early = log.receive()
    for number in range(3):
        deletions.add(log.record(Whom(session_id=str(number)), SECRET))
    late = log.receive()
    assert (early.number, late.number) == (0, 3)
    assert len(log) == len(deletions) == 3
    assert deletions.mean(Recognised(Asker("m", "2"), early.number))
    assert not deletions.mean(Recognised(Asker("m", "2"), late.number))
    del early
    gc.collect()
    deletions.add(log.record(Whom(session_id="last"), SECRET))
    assert len(log) == len(deletions) == 1
    assert deletions.mean(Recognised(Asker("m", "last"), late.number))
    assert not deletions.mean(Recognised(Asker("m", "2"), late.number))
    assert deletions.mean(Recognised(Asker("m", "other"), 0)), "of long ago nothing is known"


def test_of_very_many_deletions_the_first_count_for_everybody():
    log, deletions = DeletionLog(), Deletions()
    early = log.receive()
    for number in range(1200):
        deletions.add(log.record(Whom(session_id=str(number)), SECRET))
    assert len(log) == len(deletions) == 1000
    assert deletions.mean(Recognised(Asker("m", "nobody's"), early.number))
    assert not deletions.mean(Recognised(Asker("m", "nobody's"), 300))


def test_a_worker_that_comes_late_knows_what_the_others_were_told():
    log, told, late = DeletionLog(), Deletions(), Deletions()
    received = [log.receive()]
    for number in range(20):
        told.add(log.record(Whom(session_id=str(number)), SECRET, [b"x"] if number % 2 else None))
        received.append(log.receive())
        if number == 5:
            del received[:3]
    for news, models in log.known():
        if models is None:
            late.add(news)
    for one in received:
        for number in range(0, 20, 2):
            known = Recognised(Asker("m", str(number)), one.number)
            assert late.mean(known) == told.mean(known) == (one.number <= number)
