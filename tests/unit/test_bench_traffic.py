"""The traffic of agents: its distributions are those published, at any scale, for any seed."""

from __future__ import annotations

import functools
import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.bench.agents.traffic import (
    AgentScript,
    Shape,
    Texts,
    facts,
    lognormal,
    pause_quantile,
    spread,
    traffic,
)

PUBLISHED = Shape(seed=1, num_sessions=50, median_turns=43, scale=1.0, pause_scale=1.0)
TOY = Shape(seed=1, num_sessions=8, median_turns=43, scale=0.02, pause_scale=0.1)
SMALL = Shape(seed=7, num_sessions=3, median_turns=4, scale=0.004, pause_scale=0.0)


made_once = functools.cache(traffic)


def agents_of(sessions: tuple[AgentScript, ...]) -> list[AgentScript]:
    return [one for session in sessions for one in session.family()]


def test_the_traffic_is_as_published():
    made = facts(PUBLISHED, made_once(PUBLISHED))
    assert made.median_turns == 43
    assert made.median_tokens_in == 142_000
    assert made.median_tokens_out == 444
    assert made.share_with_sub_agents == 0.44
    assert made.new_share < 0.04


def test_a_scale_changes_lengths_and_nothing_else():
    made, whole = (facts(one, made_once(one)) for one in (TOY, PUBLISHED))
    assert (made.num_sessions, made.num_turns, made.num_sub_agents) == (8, 669, 9)
    assert (made.median_turns, made.num_sub_agent_turns) == (43.5, 105)
    assert made.median_tokens_in == 0.02 * whole.median_tokens_in
    assert made.median_tokens_out == round(0.02 * whole.median_tokens_out)
    assert made.new_share == pytest.approx(whole.new_share, abs=0.005)


def test_turns_answers_and_pauses_are_spread_as_published():
    sessions = made_once(PUBLISHED)
    turns = sorted(len(one.turns) for one in sessions)
    assert turns[:3] == [3, 5, 7]
    assert turns[-3:] == [270, 351, 577]
    assert sum(turns) / len(turns) == pytest.approx(80.2, rel=0.05)
    every = [turn for one in agents_of(sessions) for turn in one.turns]
    answers = sorted(turn.max_tokens for turn in every)
    assert sum(answers) / len(answers) == pytest.approx(523, rel=0.01)
    pauses = [turn.pause_s for turn in every]
    for seconds, share in ((1.0, 0.8646), (10.0, 0.9512)):
        assert sum(one <= seconds for one in pauses) / len(pauses) == pytest.approx(share, abs=1e-3)


def test_pauses_are_straight_between_the_published_points():
    assert pause_quantile(0.0) == pytest.approx(0.1)
    assert pause_quantile(0.4323) == pytest.approx(10**-0.5)
    assert pause_quantile(0.8646) == pytest.approx(1.0)
    assert pause_quantile(0.9512) == pytest.approx(10.0)
    assert pause_quantile(1.0) == pytest.approx(120.0)
    with pytest.raises(ValueError, match="no share"):
        pause_quantile(1.5)


def test_few_values_have_the_median_of_their_distribution():
    values = spread(3, lognormal(43.0, 1.0), random.Random(1))
    assert sorted(values) == pytest.approx([16.3427, 43.0, 113.1395], abs=1e-3)
    assert values != sorted(values)


def test_sub_agents_begin_in_the_middle_and_share_the_beginning():
    sessions = made_once(TOY)
    parents = [one for one in sessions if one.children]
    assert [one.name for one in parents] == ["2", "4", "6", "8"]
    assert [len(one.children) for one in parents] == [2, 4, 2, 1]
    assert [one.fans_out_after for one in parents] == [75, 48, 3, 13]
    assert all(not child.children for one in parents for child in one.children)
    assert all(one.fans_out_after == 0 for one in sessions if not one.children)
    texts = Texts(TOY, 4.0)
    assert texts.system.role == "system"
    assert len(texts.system.content) == pytest.approx(4 * 0.02 * 20_000, abs=100)


def test_the_words_are_the_same_again_and_others_for_another_agent_turn_or_seed():
    sessions = made_once(TOY)
    first, other = sessions[0], sessions[1]
    one, same = Texts(TOY, 4.0), Texts(TOY, 4.0)
    assert one.message(first, 3) == same.message(first, 3)
    assert one.system == same.system
    told = {one.message(script, turn).content for script in (first, other) for turn in (1, 2)}
    assert len(told) == 4
    again = Shape(2, *(getattr(TOY, name) for name in TOY.__struct_fields__[1:]))
    assert Texts(again, 4.0).message(first, 3) != one.message(first, 3)
    assert Texts(again, 4.0).system != one.system


def test_what_is_told_first_is_asked_for_last():
    (script, *_) = traffic(SMALL)
    texts = Texts(SMALL, 4.0)
    door = texts.door(script)
    assert texts.message(script, 0).content.startswith(f"The door number is {door}.")
    last = texts.message(script, len(script.turns) - 1).content
    assert last.startswith("Tool result:")
    assert last.endswith("What is the door number?")
    assert door not in last


@given(
    seed=st.integers(0, 10_000),
    num_sessions=st.integers(1, 6),
    median_turns=st.integers(1, 12),
    scale=st.floats(0.001, 0.2),
)
def test_any_traffic_is_well_formed(
    seed: int, num_sessions: int, median_turns: int, scale: float
) -> None:
    shape = Shape(seed, num_sessions, median_turns, scale, 0.5)
    sessions = traffic(shape)
    agents = agents_of(sessions)
    assert traffic(shape) == sessions
    assert [one.number for one in agents] == list(range(len(agents)))
    assert len({one.name for one in agents}) == len(agents)
    assert sum(bool(one.children) for one in sessions) == round(0.44 * num_sessions)
    for one in agents:
        assert len(one.turns) >= 2
        assert bool(one.children) == (one.fans_out_after > 0)
        assert one.fans_out_after < len(one.turns)
        assert one.turns[-1].max_tokens >= 32
        for turn in one.turns:
            assert turn.num_new_tokens >= 8
            assert turn.max_tokens >= 4
            assert 0 <= turn.pause_s <= 60
    made = facts(shape, sessions)
    assert made.num_turns == sum(len(one.turns) for one in agents)
    assert made.median_turns == median(len(one.turns) for one in sessions)
    assert made.longest_tokens >= made.median_tokens_in
