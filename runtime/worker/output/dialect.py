"""`Dialect`: the marks of one model's reasoning and tool calls, and the states they lead to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from runtime.prompt.tools_as_text import CALL_END, CALL_START, RESULT_START

START = "start"
NORMAL = "normal"
REASONING = "reasoning"
TOOL = "tool "
"""Prefix of the states that an opening mark of calls leads to; the mark follows."""
ANSWER = "answer"
"""A constrained answer has begun: nothing in it is a mark any more."""
HEADER = "header"
"""Between two messages of a dialect that has several in one turn."""
STOP = "stop "
"""Prefix of the states that a stop string leads to; its number follows."""
INVENTED = f"{STOP}invented"
"""A result begins, which is not the model's to write."""

ReasoningBlock = Literal["open", "closed", "unsaid", "expected", "begun"]
"""How a prompt leaves the thinking block of the answer; `expected` is unsaid for a model that is
known to think, `begun` says that its text has begun."""

Edges = Mapping[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model marks its reasoning and its tool calls; empty strings mean it has no marker.

    `name` is its family's, which reads its calls; `bare`, `first`, `keeps_blanks` and
    `ends_thoughts` are too. `dropped` are marks that say nothing but that
    thoughts are over, `edges` the transitions of a
    dialect whose turn has several messages. After a call `result_start` ends the turn: what follows
    would be a result that the model invents.
    """

    think_start: str = ""
    think_end: str = ""
    tool_start: str = ""
    tool_end: str = ""
    name: str = ""
    bare: tuple[str, ...] = ()
    first: str = ""
    keeps_blanks: bool = False
    ends_thoughts: bool = True
    result_start: str = ""
    dropped: tuple[str, ...] = ()
    edges: Edges = field(default_factory=dict[str, tuple[tuple[str, str], ...]])
    initial: str = START

    @property
    def shows_headers(self) -> bool:
        """What stands between two messages and is no known mark is text."""
        return self.name == "harmony"


def with_generic_calls(dialect: Dialect) -> Dialect:
    """For a model whose template has no form for tools: its calls are those of `tools_as_text`."""
    edges = dict(dialect.edges)
    if edges:
        edges[NORMAL] = (*edges.get(NORMAL, ()), (CALL_START, opening(CALL_START)))
    return replace(
        dialect,
        name="json_tools",
        tool_start=CALL_START,
        tool_end=CALL_END,
        result_start=RESULT_START,
        bare=(),
        first="",
        keeps_blanks=False,
        ends_thoughts=True,
        edges=edges,
    )


def opening(mark: str) -> str:
    """The state that a mark which opens calls leads to."""
    return TOOL + mark


def transitions(
    dialect: Dialect, stop: tuple[str, ...], *, has_tools: bool
) -> dict[str, list[tuple[str, str]]]:
    """State -> (mark, next state) for mlx-lm's `TextStateMachine`."""
    stops = [(word, f"{STOP}{i}") for i, word in enumerate(stop)]
    edges: dict[str, list[tuple[str, str]]] = {
        START: list(stops),
        NORMAL: list(stops),
        ANSWER: list(stops),
        REASONING: [],
        HEADER: [],
        INVENTED: [],
    }
    edges |= {target: [] for _, target in stops}
    if dialect.edges:
        for state, more in dialect.edges.items():
            edges[state] += [(mark, target) for mark, target in more]
        targets = [target for more in edges.values() for _, target in more]
        return edges | {target: [] for target in targets if target.startswith(TOOL)}
    if dialect.think_end:
        edges[START] += [(dialect.think_start, REASONING), (dialect.think_end, NORMAL)]
        edges[NORMAL].append((dialect.think_start, REASONING))
        edges[REASONING].append((dialect.think_end, NORMAL))
    for mark in dialect.dropped:
        edges[REASONING].append((mark, NORMAL))
        edges[START].append((mark, START))
        edges[NORMAL].append((mark, NORMAL))
    if dialect.result_start and has_tools:
        edges[START].append((dialect.result_start, INVENTED))
        edges[NORMAL].append((dialect.result_start, INVENTED))
    if has_tools and dialect.name:
        openings = [(mark, opening(mark)) for mark in (dialect.tool_start, *dialect.bare)]
        may_think = dialect.think_end and dialect.ends_thoughts
        for state in (START, NORMAL, REASONING) if may_think else (START, NORMAL):
            edges[state] += openings
        edges |= {target: [] for _, target in openings}
    return edges
