"""Conversations that are edited, branched, restarted and killed, beside ones that are not."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ops.judge.bench import Bench, beside
from ops.judge.compare import Divergence, divergence
from ops.judge.outcome import Outcome
from ops.judge.reference import Continued
from ops.judge.server import Said, Server, message_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {field: {"type": "string", "maxLength": 20}},
                "required": [field],
                "additionalProperties": False,
            },
        },
    }
    for name, description, field in (
        ("weather", "The weather of a city.", "city"),
        ("read_file", "The text of a file.", "path"),
    )
]
_NAMES = ("interrupted", "uninterrupted")
_WINDOW_TURN_TOKENS = 200
_CALL_TOKENS = 96


class Step(NamedTuple):
    """A turn: what is said, after which turn of the conversation, and what happens before it."""

    says: str
    after: int | None = None
    """A turn that is gone on from; None is the one before."""
    is_result: bool = False
    choice: object = "auto"
    before: str = ""
    change: str = ""


def steps(material: Callable[[str, int, int], str]) -> list[Step]:
    """Twelve turns: two edits, two branches, three results, five interruptions."""
    named = {"type": "function", "function": {"name": "weather"}}
    return [
        Step(f"Remember this page:\n{material('prose', 400, 1)}\nWhat is it about?"),
        Step("What is the weather in Oslo?", choice=named, change="a forced call"),
        Step("8 degrees, rain 🌧️, wind from 西", is_result=True, change="its result"),
        Step("What should I wear?", before="restart"),
        Step("What should a dog wear?", after=3, change="turn 4 edited"),
        Step(f"Explain:\n{material('code', 500, 2)}", before="kill"),
        Step("Snow ❄️", after=2, is_result=True, change="another result of turn 2"),
        Step("Say it shorter.", after=6, before="kill_worker", change="back to turn 6"),
        Step("Read a file.", choice="required", before="restart", change="a forced call"),
        Step(material("scripts", 150, 3), is_result=True, change="its result"),
        Step("No such file.", after=9, is_result=True, change="another result of turn 9"),
        Step("What did you learn?", before="kill"),
    ]


class Turn(NamedTuple):
    """What was asked and answered."""

    body: dict[str, object]
    answer: Said


async def conversations(bench: Bench) -> Outcome:
    """Once without interruption; then the same requests to a server that is interrupted."""
    outcome = Outcome("conversation")
    planned = steps(bench.material.piece)[: bench.amount.num_turns]
    calm = await _talk(bench, planned)
    with tempfile.TemporaryDirectory() as home:
        async with Server(bench.model.folder, Path(home)) as server:
            stormy: list[Said] = []
            for step, turn in zip(planned, calm, strict=True):
                await _interrupt(server, step.before)
                stormy.append(await server.chat(turn.body))
    outcome.table.append(_HEAD)
    for number, (step, turn, other) in enumerate(zip(planned, calm, stormy, strict=True)):
        outcome.count(_beside(f"turn {number + 1}", other, turn.answer))
        outcome.table.append(_row(number, step.before, step.change, turn.answer, other))
        if step.choice != "auto":
            outcome.count(_call_of(f"the call of turn {number + 1}", turn.answer))
    return outcome


_HEAD = [
    *("turn", "what changes", "before the turn", "tokens in the prompt"),
    *("cached, uninterrupted", "cached, interrupted"),
]
_TOLD = {
    "": "",
    "restart": "restart",
    "kill": "`kill -9` of server and worker",
    "kill_worker": "`kill -9` of the worker",
}


def _row(number: int, before: str, change: str, calm: Said, stormy: Said) -> list[str]:
    cached = (str(calm.num_cached), str(stormy.num_cached))
    return [str(number + 1), change, _TOLD[before], str(calm.num_prompt), *cached]


def _beside(where: str, ours: Said, theirs: Said) -> Divergence | None:
    if ours.same == theirs.same:
        return None
    return divergence(where, ours.tokens, theirs.tokens, _NAMES)


def _call_of(where: str, answer: Said) -> Divergence | None:
    """A forced call has one of the tools' names and arguments that its schema allows."""
    fields = {"weather": {"city"}, "read_file": {"path"}}
    calls = [(one.function.name, json.loads(one.function.arguments)) for one in answer.calls]
    if len(calls) == 1 and set(calls[0][1]) == fields[calls[0][0]]:
        return None
    return Divergence(where, f"it is {calls} and the text {answer.text!r}", False)


async def _talk(bench: Bench, planned: Sequence[Step]) -> list[Turn]:
    turns: list[Turn] = []
    for number, step in enumerate(planned):
        after = number if step.after is None else step.after
        before = turns[after - 1] if after else None
        messages = [*_messages_of(before), _message(step, before)]
        body: dict[str, object] = {
            "messages": messages,
            "tools": TOOLS,
            "tool_choice": step.choice,
            "max_tokens": bench.amount.num_tokens if step.choice == "auto" else _CALL_TOKENS,
        }
        turns.append(Turn(body, await bench.calm.chat(body)))
    return turns


def _messages_of(turn: Turn | None) -> list[dict[str, object]]:
    if turn is None:
        return []
    asked = turn.body["messages"]
    assert isinstance(asked, list)
    return [*asked, message_of(turn.answer)]


def _message(step: Step, before: Turn | None) -> dict[str, object]:
    calls = before.answer.calls if before is not None else []
    if step.is_result and calls:
        return {"role": "tool", "tool_call_id": calls[0].id, "content": step.says}
    return {"role": "user", "content": step.says}


async def _interrupt(server: Server, how: str) -> None:
    ways: dict[str, Callable[[], Awaitable[None]]] = {
        "restart": server.restart,
        "kill": server.kill,
        "kill_worker": server.kill_worker,
    }
    if how:
        await ways[how]()


async def windows(bench: Bench) -> Outcome:
    """A conversation that leaves a sliding window three times behind.

    mlx_lm computes each of its turns from the beginning.
    """
    outcome = Outcome("sliding window", table=[_WINDOW_HEAD])
    config = json.loads((bench.model.folder / "config.json").read_text("utf-8"))
    window = config.get("sliding_window")
    if window is None:
        return outcome
    interruptions = {4: "restart", 6: "kill", 8: "restart"}
    num_turns = 3 * window // _WINDOW_TURN_TOKENS + 2
    calm, theirs = await _window_talk(bench, num_turns)
    with tempfile.TemporaryDirectory() as home:
        async with Server(bench.model.folder, Path(home)) as server:
            for number, (turn, their) in enumerate(zip(calm, theirs, strict=True)):
                how = interruptions.get(number, "")
                await _interrupt(server, how)
                answer = await server.chat(turn.body)
                outcome.count(_beside(f"turn {number + 1}, interrupted", answer, turn.answer))
                outcome.count(beside(f"turn {number + 1}, beside mlx_lm", turn.answer, their))
                crossed = turn.answer.num_prompt // window
                row = _row(number, how, f"{crossed} times", turn.answer, answer)
                outcome.table.append(row)
    last = calm[-1].answer.num_prompt
    outcome.facts.append(f"a window of {window} tokens, {last} tokens in the last prompt")
    return outcome


_WINDOW_HEAD = ["turn", "window left behind", *_HEAD[2:]]


async def _window_talk(bench: Bench, num_turns: int) -> tuple[list[Turn], list[Continued]]:
    turns: list[Turn] = []
    theirs: list[asyncio.Task[Continued]] = []
    for number in range(num_turns):
        piece = bench.material.piece("prose", _WINDOW_TURN_TOKENS, number + 20)
        said: dict[str, object] = {"role": "user", "content": f"{piece}\nGo on."}
        messages = [*_messages_of(turns[-1] if turns else None), said]
        body: dict[str, object] = {"messages": messages, "max_tokens": bench.amount.num_tokens}
        turns.append(Turn(body, await bench.calm.chat(body)))
        asked = bench.reference.answer(messages, bench.amount.num_tokens)
        theirs.append(asyncio.create_task(asked))
    return turns, await asyncio.gather(*theirs)
