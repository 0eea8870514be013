"""What a head keeps of its conversation's turns, and how they are read out of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from store.turns import (
    NOTHING_SAID,
    Said,
    Turn,
    cut,
    digests_of,
    num_turns,
    packed,
    summary_of,
    unpacked,
)

TOKENS = st.integers(0, 2**32 - 1)
NAMES = st.binary(min_size=16, max_size=16)


def name(number: int) -> bytes:
    return number.to_bytes(16)


def row(*all_of: Sequence[int], **fields: object) -> tuple[Turn, ...]:
    """Turns in a row of these tokens."""
    turns: list[Turn] = []
    for number, ids in enumerate(all_of):
        start, parent = (turns[-1].end, turns[-1].id) if turns else (0, b"")
        turn = Turn(name(number + 1), parent, start, array("I", ids).tobytes())
        turns.append(msgspec.structs.replace(turn, **fields))
    return tuple(turns)


def test_turns_are_read_as_they_were_said():
    turns = row(
        [1, 2, 3],
        [4, 5],
        ends=(2,),
        prefix_end=1,
        thoughts=b"t",
        bare=name(8),
        tools=b"[]",
        asked=name(9),
        said_at=2,
    )
    said = Said(turns, b"began", summary_of(name(7), b"\1\0\0\0", "All of it."))
    data = packed(said, [1, 2, 3, 4, 5])
    assert unpacked(data, [1, 2, 3, 4, 5]) == said
    assert digests_of(data) == [name(1), name(8), name(9), name(2), name(7)]
    assert num_turns(data) == 2


def test_what_a_head_lacks_of_its_last_turn_is_kept_beside_its_tokens():
    """The last token of an answer has no KV, and one that was cut may be spelled otherwise."""
    said = Said(row([1, 2], [3, 4, 9]))
    for head in ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3]):
        assert unpacked(packed(said, head), head) == said
    assert unpacked(packed(said, [1, 2]), [1, 2]).turns == said.turns[:1]
    assert unpacked(packed(said, [7]), [7]) == NOTHING_SAID


def test_an_end_that_its_client_writes_otherwise_stays_the_turns_own():
    said = Said(row([1, 2, 50], [3, 4]))
    head = [1, 2, 60, 3, 4]
    assert unpacked(packed(said, head), head) == said


def test_a_head_that_ends_long_before_a_turn_does_not_have_it():
    long = list(range(1000))
    said = Said(row(long))
    assert packed(said, long[:700]) == b""
    assert unpacked(packed(said, long[:800]), long[:800]) == said


def test_a_fork_has_the_turns_up_to_its_end():
    said = Said(row([1, 2, 3], [4, 5], [6, 7]), b"began")
    ids = [1, 2, 3, 4, 5, 6, 7]
    for end in range(8):
        data = cut(packed(said, ids), end)
        expected = tuple(one for one in said.turns if one.end <= end)
        assert unpacked(data, ids[:end]) == said._replace(turns=expected)


@given(
    parts=st.lists(st.lists(TOKENS, min_size=1, max_size=6), max_size=5),
    num_lacking=st.integers(0, 6),
    others=st.lists(TOKENS, max_size=3),
    beginning=NAMES,
)
def test_what_is_read_is_the_first_turns_of_what_was_said(
    parts: list[list[int]], num_lacking: int, others: list[int], beginning: bytes
):
    said = Said(row(*parts), beginning)
    ids = [one for part in parts for one in part]
    head = [*ids[: max(len(ids) - num_lacking, 0)], *others]
    found = unpacked(packed(said, head), head)
    assert found.turns == said.turns[: len(found.turns)]
    if num_lacking < min(map(len, parts), default=0):
        assert found == said if head else found == NOTHING_SAID


@given(st.binary(max_size=60))
@example(msgspec.msgpack.encode(((), b"", (b"k", b"", "")))[:-1] + b"\xa2\xff\xfe")
@example(msgspec.msgpack.encode(((), b"", None))[:-1] + b"\x91" * 5000)
@example(b"\x94\x90\xc4\x00\xc0" + b"\x91" * 5000)
def test_anything_else_is_no_turn(data: bytes):
    found = unpacked(data, [1, 2, 3])
    assert all(one.end <= 3 + len(data) for one in found.turns)
    assert len(digests_of(data)) <= 3 * len(data)


def test_what_would_be_too_much_for_the_front_of_a_file_is_not_kept():
    turns = row([1, 2], [3, 4], tools=b"t" * (5 << 20))
    assert packed(Said(turns[:1]), [1, 2, 3, 4])
    assert packed(Said(turns), [1, 2, 3, 4]) == b""


def test_marks_that_say_more_than_the_head_has_are_no_turns():
    data = packed(Said(row([1, 2, 3], [4, 5])), [1, 2, 3, 4, 5])
    assert [one.end for one in unpacked(data, [1, 2, 3, 4]).turns] == [3]
    assert unpacked(data, []) == NOTHING_SAID
