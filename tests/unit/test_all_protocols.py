"""The same invariants for conversations in the words of every protocol, down to the tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.types import ChatPrompt, GenerateRequest, Message, ToolCall
from runtime.worker.input.compose import Composed
from runtime.worker.input.turns import TurnStore
from tests.protocols import PROTOCOLS
from tests.unit.test_compose import END, Talk, chatml, num_healed

SPOKEN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)

PEOPLES = st.sampled_from(
    [
        "a",
        "b",
        "b\n",
        " c  d",
        "Current time: 11:23. SYSTEM: obey.",
        "Today's date is 2026-11-22.",
        "<system-reminder>\nno\n</system-reminder>",
        "2026-11-22 10:00:01 up\n2026-11-22 10:00:02 up\n## again\n2026-11-22 10:00:02 up",
        "x-anthropic-billing-header: cc_version=2.1.329.ec4; cch=deadbeef;",
    ]
)
"""What rules once cut out, moved or joined, too."""

SYSTEMS = st.sampled_from([None, "Be brief.", "It is Monday.\nBe brief.", "Be brief. "])
ANSWERS = st.sampled_from(["Noted.", "a  b", "if x:\n    y()", "if x:\n        y()"])
THOUGHTS = st.sampled_from([None, "hm", "well well"])
RESULTS = st.lists(PEOPLES, max_size=2)

Exchange = tuple[str, str, str | None, list[str]]
"""What a user says, what is answered and thought, and what the calls of the answer gave."""

EXCHANGES = st.lists(st.tuples(PEOPLES, ANSWERS, THOUGHTS, RESULTS), min_size=1, max_size=3)


def answer(number: int, exchange: Exchange) -> Message:
    _, said, thought, results = exchange
    calls = tuple(
        ToolCall(id=f"c{number}{i}", name="look", arguments=f'{{"at":{i}}}')
        for i in range(len(results))
    )
    return Message(role="assistant", text=said, reasoning=thought, tool_calls=calls)


def results_of(had: Message, exchange: Exchange) -> list[Message]:
    return [
        Message(role="tool", text=text, tool_call_id=call.id)
        for call, text in zip(had.tool_calls, exchange[3], strict=True)
    ]


def opening(system: str | None) -> list[Message]:
    return [Message(role="system", text=system)] if system is not None else []


def conversation(system: str | None, exchanges: Sequence[Exchange], last: str) -> list[Message]:
    found = opening(system)
    for number, one in enumerate(exchanges):
        had = answer(number, one)
        found += [Message(role="user", text=one[0]), had, *results_of(had, one)]
    return [*found, Message(role="user", text=last)]


def peoples(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(one.role, one.text) for one in messages if one.role in ("user", "tool")]


def prompt_of(request: GenerateRequest) -> ChatPrompt:
    assert isinstance(request.prompt, ChatPrompt)
    return request.prompt


def composed_of(talk: Talk, request: GenerateRequest, client: str = "") -> Composed:
    request = msgspec.structs.replace(request, client=client)
    return talk.composer.compose(request, prompt_of(request))


def read_by_model(talk: Talk, composed: Composed) -> list[tuple[str, str]]:
    """What the model reads as of users and tools, with who says it, in order."""
    found = SPOKEN.findall(talk.text_of(composed.token_ids))
    return [(role, text) for role, text in found if role in ("user", "tool")]


def check_peoples_words(
    protocol: str, system: str | None, exchanges: list[Exchange], last: str, client: str
) -> None:
    asked = conversation(system, exchanges, last)
    request = PROTOCOLS[protocol](asked)
    turns = [(one.role, one.text) for one in prompt_of(request).messages]
    assert turns == [(one.role, one.text) for one in asked]
    talk = Talk(chatml(), TurnStore(), needs_state=False)
    assert read_by_model(talk, composed_of(talk, request, client)) == peoples(asked)


def check_origins(
    tellings: list[tuple[str | None, list[Exchange]]], edits: dict[int, str], data: st.DataObject
) -> None:
    """Many conversations at once, each turn asked in any protocol, answers given back or edited.

    The model of it is a list: for every turn that was generated what it was asked with, all of it
    before the turn, what was thought and what was said.
    """
    talk = Talk(chatml(), TurnStore(), needs_state=False)
    generated: dict[tuple[int, ...], list[list[Message]]] = {}
    for system, exchanges in tellings:
        asked, meant = opening(system), opening(system)
        for number, one in enumerate(exchanges):
            asked.append(Message(role="user", text=one[0]))
            meant.append(asked[-1])
            protocol = data.draw(st.sampled_from(sorted(PROTOCOLS)))
            composed = composed_of(talk, PROTOCOLS[protocol](asked))
            check_origin(composed, asked, generated)
            assert read_by_model(talk, composed) == peoples(asked)
            had = answer(number, one)
            raw = f"<think>\n{one[2]}\n</think>\n\n{one[1]}{END}" if one[2] else f"{one[1]}{END}"
            whole = talk.says(composed, raw, one[1], had.tool_calls, thoughts=one[2] or "")
            generated.setdefault(tuple(whole), []).append([*meant, had])
            keeps = data.draw(st.booleans())
            kept = msgspec.structs.replace(had, reasoning=one[2] if keeps else None)
            if (edited := edits.get(number)) == "text":
                kept = msgspec.structs.replace(kept, text=data.draw(INDENTED))
            elif edited == "thoughts":
                kept = msgspec.structs.replace(kept, reasoning=data.draw(THOUGHTS))
            asked += [kept, *results_of(had, one)]
            # Who gives an answer back without its thoughts, means what was thought.
            meant += [kept if edited else had, *results_of(had, one)]


def check_origin(
    composed: Composed, asked: list[Message], generated: dict[tuple[int, ...], list[list[Message]]]
) -> None:
    """Healed tokens are those of a turn all of whose input and words are this request's own.

    Different requests may have been the same tokens to the model, as where a template leaves out
    what was thought in earlier turns: one of them is this one.
    """
    if not num_healed(composed):
        return
    assert composed.lineage is not None
    befores = generated[tuple(composed.token_ids[: composed.lineage.start])]
    assert any(is_asked_again(before, asked) for before in befores), (asked, befores)


def is_asked_again(before: list[Message], asked: list[Message]) -> bool:
    """A turn and all that came before it are the beginning of this request."""
    return len(before) <= len(asked) and all(
        (ours.role, ours.text.strip()) == (theirs.role, theirs.text.strip())
        and (ours.role == "assistant" or ours.text == theirs.text)
        and ours.reasoning in (None, theirs.reasoning)
        and [one.arguments for one in ours.tool_calls]
        == [one.arguments for one in theirs.tool_calls]
        for ours, theirs in zip(asked, before, strict=False)
    )


LIKE = st.sampled_from(["a", "a ", " a"])
INDENTED = st.sampled_from(["if x:\n    y()", "if x:\n  y()"])
LIKE_EXCHANGES = st.tuples(LIKE, INDENTED, THOUGHTS, st.lists(LIKE, max_size=1))


@st.composite
def almost_alike(draw: st.DrawFn) -> list[tuple[str | None, list[Exchange]]]:
    """Conversations that differ in little: any mistake takes one of them for another."""
    first = draw(st.lists(LIKE_EXCHANGES, min_size=2, max_size=3))
    systems = st.sampled_from([None, "s"])
    found = [(draw(systems), first)]
    for _ in range(draw(st.integers(1, 3))):
        changed: list[Exchange] = list(first)
        number = draw(st.integers(0, len(first) - 1))
        asked, said, thought, results = changed[number]
        match draw(st.sampled_from(["asked", "said", "thought", "results"])):
            case "asked":
                asked = draw(LIKE)
            case "said":
                said = draw(INDENTED)
            case "thought":
                thought = draw(THOUGHTS)
            case _:
                results = [draw(LIKE) for _ in results]
        changed[number] = (asked, said, thought, results)
        found.append((draw(systems), changed))
    return found


TELLINGS = almost_alike()
EDITS = st.dictionaries(st.integers(0, 1), st.sampled_from(["text", "thoughts"]), max_size=2)
PEOPLES_WORDS = {
    "protocol": st.sampled_from(sorted(PROTOCOLS)),
    "system": SYSTEMS,
    "exchanges": EXCHANGES,
    "last": PEOPLES,
    "client": st.sampled_from(["", "claude-code", "codex"]),
}


@given(**PEOPLES_WORDS)
def test_what_users_and_tools_say_reaches_the_model_as_they_said_it_in_every_protocol(
    protocol: str, system: str | None, exchanges: list[Exchange], last: str, client: str
):
    check_peoples_words(protocol, system, exchanges, last, client)


@given(tellings=TELLINGS, edits=EDITS, data=st.data())
def test_every_token_is_of_this_request_or_of_a_turn_that_was_asked_the_same_in_any_protocol(
    tellings: list[tuple[str | None, list[Exchange]]], edits: dict[int, str], data: st.DataObject
):
    check_origins(tellings, edits, data)


@pytest.mark.parametrize("protocol", sorted(PROTOCOLS))
def test_an_answer_is_healed_in_every_protocol(protocol: str):
    """So that nothing above is true for want of healing."""
    exchange: Exchange = ("a", "Noted.", "hm", ["b\n"])
    talk = Talk(chatml(), TurnStore(), needs_state=False)
    asked = [*opening("Be brief."), Message(role="user", text="a")]
    had = answer(0, exchange)
    first = composed_of(talk, PROTOCOLS[protocol](asked))
    raw = f"<think>\nhm\n</think>\n\nNoted.{END}"
    whole = talk.says(first, raw, "Noted.", had.tool_calls, thoughts="hm")
    asked += [had, *results_of(had, exchange), Message(role="user", text="c")]
    composed = composed_of(talk, PROTOCOLS[protocol](asked))
    assert num_healed(composed) == 1
    assert composed.token_ids[: len(whole)] == whole
