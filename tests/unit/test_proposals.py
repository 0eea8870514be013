"""What is proposed, with exact values: what followed the same tokens before."""

from collections import Counter
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.worker.proposals import MOST_TOKENS, Proposer, num_accepted

TEXT = list(range(100, 140))


def proposer_of(
    prompt: list[int], said: list[int], prediction: list[int] | None = None
) -> Proposer:
    proposer = Proposer(prompt, prediction or ())
    for token_id in said:
        proposer.note(token_id)
    return proposer


def test_nothing_is_proposed_before_three_tokens_are_those_of_some_place():
    assert proposer_of([*TEXT, 1, 2], []).proposal() == []
    assert proposer_of([*TEXT, 1, 2], [105, 106]).proposal() == []
    proposer = proposer_of([*TEXT, 1, 2], [105, 106, 107])
    assert proposer.guess == 108
    assert proposer.proposal() == [108, 109, 110]


def test_more_is_proposed_the_longer_it_agrees_up_to_a_bound():
    proposer = proposer_of([*TEXT, 1, 2], [105, 106, 107])
    for number in range(108, 126):
        proposal = proposer.proposal()
        size = min(number - 105, MOST_TOKENS)
        assert proposal == [*TEXT, 1, 2][number - 100 :][:size]
        assert proposer.note(number) is True


def test_what_was_found_last_is_followed_and_the_answer_itself_counts():
    proposer = proposer_of([1, 2, 3, 50, 9, 1, 2, 3, 60, 9], [1, 2, 3])
    assert proposer.proposal()[0] == 60
    assert proposer_of([7], [1, 2, 3, 70, 71, 72, 1, 2, 3]).proposal() == [70, 71, 72]


def test_another_token_than_the_guess_is_told_and_an_edit_is_left_behind():
    proposer = proposer_of([*TEXT, 1], TEXT[:10])
    assert proposer.note(999) is False
    assert proposer.guess is None
    assert proposer.note(111) is None
    assert proposer.note(112) is None
    assert proposer.proposal() == [113, 114]


def test_behind_an_edit_the_nearest_place_is_taken_not_the_last():
    lines = [1, 2, 10, 20, 30, 1, 2, 11, 21, 31, 1, 2, 12, 22, 32]
    proposer = proposer_of([*lines, 99], [*lines[:4], 77, 1, 2])
    assert proposer.proposal()[0] == 11


def test_a_prediction_is_proposed_from_its_beginning_and_before_the_prompt():
    proposer = proposer_of([*TEXT, 1], [], [5, 6, 7, 8])
    assert proposer.proposal() == [5, 6, 7, 8]
    proposer = proposer_of([3, 4, 5, 6, 50, 1], [90, 91, 4, 5, 6], [3, 4, 5, 6, 60, 61])
    assert proposer.proposal()[0] == 60


def test_a_prediction_that_was_said_to_its_end_proposes_no_more():
    proposer = proposer_of([1], [5, 6, 7], [5, 6, 7])
    assert (proposer.guess, proposer.proposal()) == (None, [])


def test_a_long_prompt_is_indexed_in_parts_and_found_in_the_end():
    prompt = list(range(20_000))
    proposer = proposer_of([*prompt, -1], [])
    for token_id in (-2, -3, -4, -5, 19_000, 19_001, 19_002):
        proposer.note(token_id)
    assert proposer.proposal() == [19_003, 19_004, 19_005]


@given(
    prompt=st.lists(st.integers(0, 3), max_size=60),
    said=st.lists(st.integers(0, 3), max_size=60),
    prediction=st.lists(st.integers(0, 3), max_size=20),
)
def test_every_proposal_stands_somewhere_behind_tokens_that_were_said_last(
    prompt: list[int], said: list[int], prediction: list[int]
):
    proposer = Proposer(prompt, prediction)
    for number, token_id in enumerate(said):
        guess = proposer.guess
        assert proposer.note(token_id) is (None if guess is None else guess == token_id)
        proposal, tail = proposer.proposal(), [*prompt, *said[: number + 1]]
        assert len(proposal) <= MOST_TOKENS
        if proposal and len(tail) >= 3:
            places = (prediction, tail)
            begun = [*tail[-2:], *proposal]
            is_start = prediction[: len(tail)] and said[: number + 1] == prediction[: number + 1]
            assert is_start or any(
                begun == one[at : at + len(begun)] for one in places for at in range(len(one))
            )


@pytest.mark.parametrize(
    ("proposal", "drawn", "expected"),
    [
        ([], [4], 0),
        ([4], [4, 5], 1),
        ([4], [5], 0),
        ([4, 5, 6], [4, 5, 7], 2),
        ([4, 5, 6], [4, 9, 6, 7], 1),
        ([4, 5, 6], [4, 5, 6, 7], 3),
    ],
)
def test_what_is_said_is_what_was_drawn_up_to_the_first_other(
    proposal: list[int], drawn: list[int], expected: int
):
    assert num_accepted(proposal, drawn) == expected


def chain(said: tuple[int, ...]) -> list[float]:
    """A small language: how likely each of three tokens is after these."""
    weights = [1.0 + (3 * token_id + sum(said) + 2 * len(said)) % 5 for token_id in range(3)]
    return [weight / sum(weights) for weight in weights]


def test_sampled_text_has_the_distribution_that_it_has_without_proposals():
    random, length, num_texts = Random(7), 3, 60_000
    found: Counter[tuple[int, ...]] = Counter()
    for number in range(num_texts):
        said: tuple[int, ...] = ()
        # A fixed guess, a long one, a short one: whatever is proposed must not be felt.
        proposal = ([0, 1, 2], [2, 2], [1])[number % 3]
        while len(said) < length:
            drawn = [
                random.choices(range(3), chain((*said, *proposal[:n])))[0]
                for n in range(len(proposal) + 1)
            ]
            num = num_accepted(proposal, drawn)
            said = (*said, *proposal[:num], drawn[num])
        found[said[:length]] += 1
    for text in product(range(3), repeat=length):
        exact = 1.0
        for number, token_id in enumerate(text):
            exact *= chain(text[:number])[token_id]
        deviation = (exact * (1 - exact) / num_texts) ** 0.5
        assert abs(found[text] / num_texts - exact) < 5 * deviation, text
