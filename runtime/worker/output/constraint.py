"""What a request demands of its output becomes a plan that every one of its sequences follows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llguidance import LLMatcher

from runtime.errors import InvalidRequest
from runtime.types import ChatPrompt, GenerateRequest, Thinking, Tool
from runtime.worker.output import forced_calls, harmony
from runtime.worker.output.dialect import Dialect, ReasoningBlock
from runtime.worker.output.grammar import Grammars, json_rule
from runtime.worker.output.guide import GuidePlan
from runtime.worker.output.schema_algebra import Undecided
from runtime.worker.output.tools import callable_tools

NOT_ENFORCED = "strict_not_enforced"
"""A strict tool of a model whose calls cannot be held to the whole of a schema."""

SCHEMA_NOT_ENFORCED = "tool_schema_not_enforced"
"""A forced call of a tool that is not strict may have any arguments: its schema is no grammar."""

_BLANK_LINES = ("\n", "\n\n")


@dataclass(frozen=True, slots=True)
class Demands:
    """The plan of a request, if it needs one, and remarks for its client."""

    plan: GuidePlan | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Marks:
    """A dialect's marks as tokens."""

    think_start: tuple[int, ...]
    think_end: tuple[int, ...]
    next_message: tuple[int, ...]
    answer_opening: tuple[int, ...]
    trigger: tuple[int, ...]
    gap: frozenset[int]

    @classmethod
    def of(cls, dialect: Dialect, tokenizer: Any) -> Marks:
        """The marks as the tokenizer itself writes them."""

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()

        is_harmony = dialect.name == harmony.NAME
        blank = () if is_harmony else [ids(text) for text in _BLANK_LINES]
        return cls(
            think_start=ids(dialect.think_start),
            think_end=ids(dialect.think_end),
            next_message=ids(harmony.NEXT_MESSAGE) if is_harmony else (),
            answer_opening=ids(harmony.FINAL_START) if is_harmony else (),
            trigger=ids(dialect.tool_start),
            gap=frozenset(one[0] for one in blank if len(one) == 1),
        )


class Constrainer:
    """Makes plans for one model. Belongs to the intake thread."""

    def __init__(self, dialect: Dialect, tokenizer: Any, grammars: Grammars) -> None:
        self._dialect = dialect
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._marks = Marks.of(dialect, tokenizer)
        self._generic: Constrainer | None = None

    def speaking(self, dialect: Dialect) -> Constrainer:
        """The same for a model that speaks this dialect; there is one for its own, and one more."""
        if dialect == self._dialect:
            return self
        if self._generic is None:
            self._generic = Constrainer(dialect, self._tokenizer, self._grammars)
        return self._generic

    def demands(
        self,
        request: GenerateRequest,
        reasoning: ReasoningBlock,
        budget: int | None,
        begun: str = "",
    ) -> Demands:
        """The plan for a request whose prompt left its thinking block like that, in which at most
        `budget` tokens of thinking may come; the answer has `begun` like this.

        Raises:
            InvalidRequest: a schema or a grammar cannot be enforced, or the model's dialect is none
                that a call can be forced in.
        """
        prompt = request.prompt
        answer = self._answer(request, begun)
        if not isinstance(prompt, ChatPrompt):
            return Demands(self._bare_plan(answer) if answer is not None else None)
        choice = prompt.tool_choice
        tools = _choosable(prompt)
        refuses_calls = choice.mode == "none" and bool(prompt.tools and self._marks.trigger)
        call, notes = self._call(prompt, tools, has_answer=answer is not None)
        demands_call = choice.mode == "required"
        if budget is None and answer is None and call is None and not refuses_calls:
            return Demands(notes=notes)
        marks = self._marks
        plan = replace(
            self._bare_plan(None if demands_call else answer),
            starts_in_reasoning=reasoning == "open",
            may_think=reasoning in ("unsaid", "expected") and _may_think(prompt.thinking),
            think_start=marks.think_start,
            think_end=marks.think_end,
            budget=budget if marks.think_end else None,
            next_message=marks.next_message,
            gap=marks.gap if _is_json(request) else frozenset(),
            between=marks.gap if self._dialect.tool_end else frozenset(),
            answer_opening=() if begun else marks.answer_opening,
            call=call,
            trigger=marks.trigger,
            demands_call=demands_call,
            refuses_calls=refuses_calls,
            is_parallel=choice.is_parallel,
        )
        return Demands(plan, notes)

    def _bare_plan(self, answer: LLMatcher | None) -> GuidePlan:
        """For text that no template opened."""
        grammars = self._grammars
        return GuidePlan(grammars.vocab_size, grammars.eos_token_ids, answer=answer)

    def _answer(self, request: GenerateRequest, begun: str) -> LLMatcher | None:
        if request.constraint is None:
            return None
        matcher = self._grammars.of_constraint(request.constraint)
        if not begun:
            return matcher
        ids: list[int] = self._tokenizer.encode(begun, add_special_tokens=False)
        if matcher.try_consume_tokens(ids) != len(ids):
            field = request.constraint.field
            message = (
                f"The answer cannot go on as {field} demands from what it begins with: the last"
            )
            raise InvalidRequest(f"{message} message. Leave out one of the two.", field)
        return matcher

    def _call(
        self, prompt: ChatPrompt, tools: tuple[Tool, ...], *, has_answer: bool
    ) -> tuple[LLMatcher | None, tuple[str, ...]]:
        """What follows the opening of a call, where one is forced or must follow a schema."""
        if not tools:
            return None, ()
        is_strict = any(tool.is_strict for tool in tools)
        is_demanded = prompt.tool_choice.mode == "required"
        is_part = len(tools) < len(prompt.tools)
        if not (is_demanded or is_strict or has_answer or is_part):
            return None, ()
        if not forced_calls.can_force(self._dialect, tools):
            if is_demanded or has_answer:
                self._refuse_unforced(prompt, has_answer=has_answer)
            return None, (NOT_ENFORCED,) * is_strict
        shown, is_whole = tools, True
        if is_demanded or has_answer:
            tools, is_whole = self._held(tools)
        try:
            matcher = self._rest_of_call(tools, "tools")
        except InvalidRequest:
            for tool, one in zip(tools, shown, strict=True):
                self._rest_of_call((tool,), f"tools[{prompt.tools.index(one)}]")
            raise
        is_held = is_demanded or has_answer or len(self._marks.trigger) == 1
        is_exact = all(
            forced_calls.is_exact(self._dialect, tool) for tool in shown if tool.is_strict
        )
        notes = () if (is_exact and is_held) or not is_strict else (NOT_ENFORCED,)
        return matcher, notes if is_whole else (*notes, SCHEMA_NOT_ENFORCED)

    def _held(self, tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], bool]:
        """The tools, strict wherever that is possible, and whether it is for all of them."""
        held = tuple(forced_calls.held(tool) for tool in tools)
        try:
            self._rest_of_call(held, "tools")
        except InvalidRequest:
            held = tuple(self._held_alone(tool) for tool in tools)
            return held, all(tool.is_strict or tool.is_freeform for tool in held)
        return held, True

    def _held_alone(self, tool: Tool) -> Tool:
        held = forced_calls.held(tool)
        try:
            self._rest_of_call((held,), "tools")
        except InvalidRequest:
            return tool
        return held

    def _rest_of_call(self, tools: tuple[Tool, ...], field: str) -> LLMatcher:
        literal = self._grammars.literal
        try:
            rules = forced_calls.rest_of_call(self._dialect, tools, literal, json_rule)
        except Undecided as error:
            raise InvalidRequest(f"{field} cannot be enforced: {error}.", field) from error
        return self._grammars.of_lark("\n".join(["start: call", *rules]), field)

    def _refuse_unforced(self, prompt: ChatPrompt, *, has_answer: bool) -> None:
        is_demanded = prompt.tool_choice.mode == "required"
        field = "tool_choice" if is_demanded or not has_answer else "tools"
        raise InvalidRequest(
            f"{field} cannot be enforced: this model's way to write calls of these tools is none "
            'that can be forced. Use "auto", ask for the call in the prompt, and give the answer '
            "no format.",
            field,
        )


def _choosable(prompt: ChatPrompt) -> tuple[Tool, ...]:
    """The tools that may be called.

    Raises:
        InvalidRequest: one must be called that is not there.
    """
    choice = prompt.tool_choice
    tools = callable_tools(prompt.tools, choice)
    if choice.mode == "required" and not tools:
        message = "tool_choice requires a call, but there are no tools: send some."
        raise InvalidRequest(message, "tool_choice")
    if choice.name is None:
        return tools
    named = tuple(tool for tool in prompt.tools if tool.name == choice.name)
    if not named:
        raise InvalidRequest(
            f"tool_choice names {choice.name!r}, which is not in tools.", "tool_choice"
        )
    return named


def _may_think(thinking: Thinking) -> bool:
    return thinking.is_enabled is not False


def _is_json(request: GenerateRequest) -> bool:
    return request.constraint is None or request.constraint.kind in ("json_object", "json_schema")
