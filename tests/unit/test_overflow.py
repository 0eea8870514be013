"""Which turns go when a conversation no longer fits, and that the next request is cut as well."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ContextTooLong, SummaryWanted
from runtime.kv.deletions import Deletions
from runtime.kv_messages import Forget
from runtime.prompt.compaction import summary_message
from runtime.prompt.overflow import DROPPED, most_tokens, num_dropped, turn_starts
from runtime.types import (
    CacheParams,
    ChatPrompt,
    GenerateRequest,
    Message,
    Summary,
    ToolCall,
)
from runtime.worker.input.compose import Composed
from runtime.worker.input.intake import said_by
from runtime.worker.input.overflow import compose_within
from runtime.worker.input.turns import TurnStore
from store.heads import Whom as HeadsOf
from store.keyed_names import Chain, Whom, conversation_key
from tests.kept_turns import SECRET, KeptHeads
from tests.templates import template_of
from tests.unit.test_compose import END, LOOK, SYSTEM, Talk, chatml

WINDOW = 1024


def user(text: str) -> Message:
    return Message(role="user", text=text)


def said(text: str, *calls: str) -> Message:
    made = tuple(ToolCall(id=one, name="look", arguments="{}") for one in calls)
    return Message(role="assistant", text=text, tool_calls=made)


def result(call: str, text: str = "rain") -> Message:
    return Message(role="tool", text=text, tool_call_id=call, name="look")


# Exact values


@pytest.mark.parametrize(
    ("window", "max_tokens", "most"),
    [
        (1024, None, 896),
        (1024, 16, 896),
        (1024, 200, 824),
        (1024, 4000, 768),
        (8, None, 7),
        (2, None, 1),
        (1, 9, 1),
    ],
)
def test_an_eighth_of_the_window_is_left_to_the_answer_or_what_it_may_have_up_to_a_quarter(
    window: int, max_tokens: int | None, most: int
):
    assert most_tokens(window, max_tokens) == most


def test_a_turn_begins_where_the_user_speaks_and_never_between_a_call_and_its_result():
    assert turn_starts([SYSTEM, user("a"), said("b"), SYSTEM, user("c"), user("d")]) == [1, 4, 5]
    assert turn_starts([said("hello"), user("a")]) == [0, 1]
    asked = [user("a"), said("", "x", "y"), result("x"), user("wait"), result("y"), said("b")]
    assert turn_starts([*asked, user("c")]) == [0, 6]
    orphan = [user("a"), result("gone"), user("b"), said("c")]
    assert turn_starts(orphan) == [0, 2]
    assert turn_starts([SYSTEM]) == []


def test_lines_are_half_a_window_apart_and_a_cut_is_at_the_first_turn_behind_one():
    turns = [100] * 8
    assert num_dropped(turns, 96, 1024, 896) == 0
    cuts = [num_dropped([100] * n, 96, 1024, 896) for n in range(8, 21)]
    assert cuts == [0, *[6] * 6, *[11] * 5, 16]
    # Less is free beside a longer system prompt: lines are closer.
    cuts = [num_dropped([50] * n, 496, 1024, 896) for n in range(8, 21)]
    assert cuts == [0, *[6] * 6, *[11] * 5, 16]
    # A turn that is as long as half the window is passed by where that is enough.
    assert num_dropped([600, 300, 100], 0, 1024, 896) == 1
    # Nothing but the last turn fits, or not even that.
    assert num_dropped([100, 100, 800], 96, 1024, 896) == 2
    assert num_dropped([100, 100, 900], 96, 1024, 896) is None
    assert num_dropped([900], 96, 1024, 896) is None


# Over conversations that grow


TURNS = st.lists(st.integers(1, 120), min_size=1, max_size=200)


@given(TURNS, st.integers(0, 400), st.integers(768, 896))
def test_what_is_left_fits_and_the_cut_moves_forward_only_and_rarely(
    turns: list[int], kept: int, most: int
):
    cuts: list[int] = []
    for length in range(1, len(turns) + 1):
        now = turns[:length]
        number = num_dropped(now, kept, WINDOW, most)
        assert number is not None
        assert number < length
        assert kept + sum(now[number:]) <= most
        cuts.append(number)
    assert cuts == sorted(cuts)
    moves = [(last, here) for last, here in pairwise(cuts) if here != last]
    # However long it becomes, an eighth of the window is said between two cuts.
    assert all(sum(turns[last:here]) >= WINDOW // 8 - 120 for last, here in moves)
    assert len(moves) <= 1 + sum(turns) // (WINDOW // 8)


Said = list[tuple[str, list[str]]]
WORDS = st.integers(1, 60).map(lambda number: "fox " * number)
TALKS: st.SearchStrategy[list[tuple[str, str, list[str], bool]]] = st.lists(
    st.tuples(WORDS, WORDS, st.lists(WORDS, max_size=2), st.booleans()), min_size=4, max_size=14
)


def spoken(turns: Sequence[tuple[str, str, list[str], bool]]) -> list[list[Message]]:
    """Turns: what the user says, calls and their results, an answer; and a late system message."""
    found: list[list[Message]] = []
    for number, (asked, answer, results, has_system) in enumerate(turns):
        turn = [user(f"{number} {asked}")]
        if results:
            names = [f"{number}-{i}" for i in range(len(results))]
            turn.append(said("", *names))
            turn += [result(name, text) for name, text in zip(names, results, strict=True)]
        turn.append(said(f"{number} {answer}"))
        if has_system:
            turn.append(Message(role="system", text=f"late {number}"))
        found.append(turn)
    return found


def cut(
    talk: Talk, messages: Sequence[Message], max_tokens: int | None = None, session: str = "s"
) -> Composed:
    prompt = ChatPrompt(messages=tuple(messages), tools=(LOOK,))
    request = GenerateRequest(
        request_id="r",
        model="m",
        prompt=prompt,
        max_tokens=max_tokens,
        cache=CacheParams(session_id=session),
        overflow="drop_oldest_turns",
    )
    return compose_within(talk.composer, request, prompt)


def read(composed: Composed) -> list[Message]:
    """The messages that the model reads, as the client sent them."""
    assert composed.asked is not None
    parts, sent = composed.asked.parts, composed.asked.sent
    return [sent[number] for part in parts for number in part.sources]


def told(composed: Composed) -> tuple[int, int] | None:
    """How many messages and turns it says were dropped."""
    changes = [one for one in composed.changes if one.rule == DROPPED]
    return (changes[0].num_places, changes[0].num_turns) if changes else None


@given(TALKS, st.sampled_from([None, 10, 5000]))
def test_whatever_is_said_the_prompt_fits_and_has_all_but_the_oldest_turns(
    turns: list[tuple[str, str, list[str], bool]], max_tokens: int | None
):
    talk = Talk(chatml(), TurnStore(), needs_state=False, context=WINDOW)
    history: list[Message] = [SYSTEM]
    asked: list[Message] = []
    kept: list[Message] = []
    for number, turn in enumerate(spoken(turns)):
        asked = [*history, turn[0]]
        composed = cut(talk, asked, max_tokens)
        assert len(composed.token_ids) <= most_tokens(WINDOW, max_tokens)
        kept = read(composed)
        systems = [one for one in asked if one.role == "system"]
        assert [one for one in kept if one.role == "system"] == systems
        first = next(i for i, one in enumerate(kept) if one.role != "system")
        assert kept[first].role == "user"
        assert kept[-1] == turn[0]
        rest = [one for one in kept if one.role != "system"]
        everything = [one for one in asked if one.role != "system"]
        assert rest == everything[len(everything) - len(rest) :]
        num_turns = sum(one.role == "user" for one in everything)
        num_left = sum(one.role == "user" for one in rest)
        is_whole = len(rest) == len(everything)
        gone = (len(everything) - len(rest), num_turns - num_left)
        assert told(composed) == (None if is_whole else gone)
        text = talk.text_of(composed.token_ids)
        assert "Look." in text
        assert f"{number} fox" in text
        history += turn
    again = Talk(talk.template, TurnStore(), needs_state=False, context=WINDOW)
    assert read(cut(again, asked, max_tokens)) == kept


@pytest.mark.parametrize("family", ["chatml", "qwen3"])
def test_between_two_cuts_each_turn_begins_with_all_that_was_read_and_generated(family: str):
    with TemporaryDirectory() as place:
        template = template_of(Path(place), family)
    talk = Talk(template, TurnStore(), needs_state=False, context=WINDOW)
    messages: list[Message] = [SYSTEM]
    known: list[int] = []
    gone = num_moves = num_tokens = 0
    for number in range(60):
        messages.append(user(f"{number} " + "fox " * 20))
        composed = cut(talk, messages)
        change = next((one for one in composed.changes if one.rule == DROPPED), None)
        if change is None or change.num_turns == gone:
            assert composed.token_ids[: len(known)] == known
        else:
            num_moves += 1
            gone, num_tokens = change.num_turns, change.num_tokens
        answer = f"{number} rain"
        known = talk.says(composed, f"{answer}{END}", answer)
        messages.append(said(answer))
    assert gone > 40
    assert num_moves == num_tokens // (WINDOW // 2)


def test_the_last_turn_stays_also_where_it_leaves_less_to_the_answer():
    talk = Talk(chatml(), TurnStore(), needs_state=False, context=WINDOW)
    long = user("fox " * (WINDOW - 150))
    assert len(cut(talk, [SYSTEM, long]).token_ids) > most_tokens(WINDOW, None)
    # What fits whole is left whole where nothing that may go is enough.
    small = [SYSTEM, user("a"), said("b"), long]
    assert told(cut(talk, small)) is None
    assert told(cut(talk, [SYSTEM, user("fox " * 200), said("b"), long])) == (2, 1)


def test_a_last_turn_that_does_not_fit_is_refused_with_what_is_left_of_the_prompt():
    talk = Talk(chatml(), TurnStore(), needs_state=False, context=WINDOW)
    messages = [SYSTEM, user("a"), said("b"), user("fox " * 2000)]
    with pytest.raises(ContextTooLong) as caught:
        cut(talk, messages)
    alone = talk.composer.template.render(ChatPrompt(messages=(SYSTEM, messages[-1])))
    error = caught.value
    assert error.is_rest
    assert error.context == WINDOW
    assert 2000 < error.num_tokens <= len(talk.template.encode(alone).token_ids) + 100
    assert "Shorten what the user says last or" in error.message


# Summaries


def asked_for(
    messages: Sequence[Message], session: str | None = "s", tenant: str = "", **fields: Any
) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=ChatPrompt(messages=tuple(messages), tools=(LOOK,)),
        cache=CacheParams(session_id=session, tenant=tenant),
        overflow="summarise",
        **fields,
    )


def summed(talk: Talk, request: GenerateRequest) -> Composed:
    assert isinstance(request.prompt, ChatPrompt)
    return compose_within(talk.composer, request, request.prompt)


def wanted(talk: Talk, request: GenerateRequest) -> int:
    with pytest.raises(SummaryWanted) as caught:
        summed(talk, request)
    return caught.value.first


def long_talk() -> list[Message]:
    turns = [[user(f"{n} " + "fox " * 30), said(f"Noted {n}.")] for n in range(20)]
    late = Message(role="system", text="late")
    return [SYSTEM, *turns[0], late, *(one for turn in turns[1:] for one in turn), user("and now?")]


def rule_of(composed: Composed, rule: str) -> list[tuple[int, int]]:
    return [(one.num_places, one.num_turns) for one in composed.changes if one.rule == rule]


def test_a_summary_stands_where_the_dropped_turns_were_and_is_used_by_the_next_request():
    talk = Talk(chatml(), TurnStore(), needs_state=False, context=WINDOW)
    messages = long_talk()
    first = wanted(talk, asked_for(messages))
    assert messages[first].role == "user"
    given = asked_for(messages, summaries=(Summary(first=first, text="Foxes."),))
    composed = summed(talk, given)
    assert composed.asked is not None
    late = Message(role="system", text="late")
    read = composed.asked.prompt.messages
    assert [one.text for one in read[:2]] == [f"{SYSTEM.text}\n\n{late.text}", summary("Foxes.")]
    assert list(read[2:]) == messages[first:]
    num_turns = sum(one.role == "user" for one in messages[:first])
    # Of the system messages two became one, which is another rule.
    assert rule_of(composed, "summarised_turns") == [(2 * num_turns, num_turns)]
    assert not rule_of(composed, DROPPED)
    again = summed(talk, asked_for([*messages, said("So."), user("go on")]))
    assert again.token_ids[: len(composed.token_ids) - 8] == composed.token_ids[:-8]
    # Another conversation that says the same is read in the same way, another tenant's is not.
    assert summed(talk, asked_for(messages, "other")).token_ids == composed.token_ids
    assert wanted(talk, asked_for(messages, tenant="bob")) == first
    edited = [SYSTEM, user("else"), *messages[2:]]
    assert wanted(talk, asked_for(edited)) > 0


def summary(text: str) -> str:
    return summary_message(text).text


def test_where_the_model_wrote_no_summary_turns_are_dropped_and_the_next_request_tries_again():
    talk = Talk(chatml(), TurnStore(), needs_state=False, context=WINDOW)
    messages = long_talk()
    first = wanted(talk, asked_for(messages))
    composed = summed(talk, asked_for(messages, summaries=(Summary(first=first, text=""),)))
    assert rule_of(composed, DROPPED)
    assert wanted(talk, asked_for(messages)) == first


def test_nothing_is_kept_for_a_conversation_that_was_deleted_meanwhile():
    deletions = Deletions()
    talk = Talk(chatml(), TurnStore(deletions), needs_state=False, context=WINDOW)
    messages = long_talk()
    first = wanted(talk, asked_for(messages))
    given = asked_for(messages, summaries=(Summary(first=first, text="Foxes."),))
    deletions.add(Forget(1, Whom(session_id="s"), b""))
    composed = summed(talk, given)
    assert rule_of(composed, "summarised_turns")
    assert wanted(talk, asked_for(messages)) == first


def test_what_nobody_waits_for_makes_no_summary():
    talk = Talk(chatml(), TurnStore(), needs_state=False, context=WINDOW)
    for work in ("prefill", "explain"):
        assert rule_of(summed(talk, asked_for(long_talk(), work=work)), DROPPED)


@pytest.mark.parametrize("session", ["s", None])
def test_a_summary_survives_a_restart_and_is_gone_with_its_conversation(
    tmp_path: Path, session: str | None
):
    messages, heads = long_talk(), KeptHeads(tmp_path)
    talk = Talk(chatml(), heads.turns(), needs_state=False, context=WINDOW)
    first = wanted(talk, asked_for(messages, session))
    given = asked_for(messages, session, summaries=(Summary(first=first, text="The fox ate."),))
    composed = summed(talk, given)
    assert composed.lineage is not None
    known = heads.keep(composed.lineage.scope, composed.token_ids, said_by(composed.lineage))
    restarted = Talk(talk.template, heads.turns(), needs_state=False, context=WINDOW)
    kept = summed(restarted, asked_for(messages, session))
    assert kept.token_ids == composed.token_ids
    if session is not None:
        heads.heads.delete(HeadsOf(session=conversation_key(SECRET, session)))
        whom = Whom(session_id=session)
    else:
        heads.heads.delete_head(known.head.id)
        whom = Whom(model="m", chain=Chain(array("I", composed.token_ids).tobytes()))
    for one in (talk, restarted):
        one.store.forget(whom, SECRET)
        assert wanted(one, asked_for(messages, session)) == first
    assert heads.files == []
