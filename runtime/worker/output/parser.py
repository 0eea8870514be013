"""Generated text to chunks: answer, reasoning, tool calls, and where a stop string ends it all.

Knows mlx-lm's `TextStateMachine`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from runtime.prompt.healing import Cut
from runtime.types import (
    Chunk,
    FinishReason,
    ReasoningDelta,
    ReasoningWasText,
    TextDelta,
    TextWasReasoning,
    TokenLogprobs,
)
from runtime.worker.output.calls import UNREAD, CallReader, Section
from runtime.worker.output.dialect import (
    ANSWER,
    HEADER,
    INVENTED,
    NORMAL,
    REASONING,
    START,
    STOP,
    TOOL,
    Dialect,
    ReasoningBlock,
    transitions,
)
from runtime.worker.output.tools import RequestTools

__all__ = ["NO_TOOLS", "Dialect", "OutputParser", "ReasoningBlock"]

# The package re-exports a function under the module's name.
_TextStateMachine = importlib.import_module("mlx_lm.generate").TextStateMachine

ORPHAN = "orphan_think_end"
"""Text that was already said turned out to be reasoning: its block closed, but never opened.

What was streamed cannot be taken back: such a stream has the mark in its text.
"""

INVENTED_RESULT = "invented_tool_result"
"""After its call the model went on with a result of its own; the answer ends before it."""

NO_THOUGHTS = "no_thoughts"
"""The model was expected to think, and its answer has no end of thoughts.

Such a stream has told it as reasoning, and tells it again as what it was.
"""

NO_TOOLS = RequestTools.of(())


class ExpectedThoughts:
    """What is said where thoughts are expected, until it is clear that they were some.

    It is told as reasoning meanwhile, without blanks at either end.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._held = ""
        self.has_told = False

    @property
    def text(self) -> str:
        """All of it to the letter."""
        return "".join(self._pieces)

    def add(self, text: str) -> str:
        """What is to be told of one more piece."""
        self._pieces.append(text)
        text = self._held + text
        if not self.has_told:
            text = text.lstrip()
        body = text.rstrip()
        self._held = text[len(body) :]
        self.has_told |= bool(body)
        return body


class OutputParser:
    """One sequence's text on its way out.

    Stop strings end the answer, not the reasoning or the blanks behind it, and are not part of it.
    Blank lines around reasoning and before a tool call belong to the template and are dropped. A
    tool call that cannot be understood is given to the client as the text it was, with the blanks
    before it; `notes` say why. In a constrained answer nothing but stop strings is a mark.
    `reasoning` says how the prompt left its block; where it said nothing, one may close that was
    not opened, unless that is inside of code, and where thoughts are expected the text before it is
    told as reasoning from its beginning on. What goes on with an answer that has begun is told to
    the letter.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        index: int,
        stop: tuple[str, ...] = (),
        tools: RequestTools = NO_TOOLS,
        reasoning: ReasoningBlock = "unsaid",
        is_constrained: bool = False,
    ) -> None:
        self._dialect = dialect
        self._index = index
        self._has_tools = not tools.is_empty
        self._calls = CallReader(dialect, tools, index)
        self._stop = stop
        self.stopped_by: str | None = None
        """The stop string that ended the answer."""
        self.cut: Cut | None = None
        """What ended the answer and is no part of it: a stop string, or a mark like one."""
        self.is_stopped = False
        """The answer ended before the model ended it: by a stop string, or with its one call."""
        self._is_broken = False
        self._has_spoken = False
        self._held = ""
        self._before_calls = ""
        self._in_calls = False
        is_at_start = reasoning != "begun" and not is_constrained
        self._may_be_call = self._has_tools and bool(dialect.first) and is_at_start
        self._strays = self._calls.inner_marks if self._has_tools and not is_constrained else ()
        self._has_stray = False
        self._said = ""
        """The end of the text, as long as the beginning of a mark may be."""
        self._has_text = False
        self._pending = ""
        self._header = ""
        self._skips_blank = reasoning == "open" or (self._has_tools and reasoning != "begun")
        self._may_be_orphan = reasoning in ("unsaid", "expected")
        is_expected = reasoning == "expected" and not is_constrained
        self._expected = ExpectedThoughts() if is_expected else None
        self._is_before_answer = reasoning == "closed"
        self._num_backticks = 0
        self._is_constrained = is_constrained
        self._logprobs: list[TokenLogprobs] = []
        self._notes: list[str] = []
        self._machine = _TextStateMachine(transitions(dialect, stop, has_tools=self._has_tools))
        unstopped = transitions(dialect, (), has_tools=self._has_tools) if stop else {}
        self._unstopped = _TextStateMachine(unstopped)
        self._marks = {state: _marks_beside(stop, edges) for state, edges in unstopped.items()}
        initial = NORMAL if reasoning == "begun" else dialect.initial
        self._state = self._machine.make_state(REASONING if reasoning == "open" else initial)

    @property
    def is_reasoning(self) -> bool:
        return self._state[0] == REASONING

    @property
    def is_broken_off(self) -> bool:
        """It ended inside of thoughts or of a call: what was shown is no turn to go on from."""
        return self._is_broken or self.is_reasoning

    @property
    def is_settled(self) -> bool:
        """All that was read is said, but for blanks, and no thoughts and no call are open."""
        return self._state[0] in (START, NORMAL, ANSWER) and not self._state[3]

    @property
    def num_tool_calls(self) -> int:
        return self._calls.num_calls

    @property
    def notes(self) -> tuple[str, ...]:
        """Machine-readable remarks on what was odd."""
        unread = (UNREAD,) if self._has_stray and not self.num_tool_calls else ()
        return (*self._notes, *self._calls.notes, *unread)

    def give_call_ids(self, ids: tuple[str, ...]) -> None:
        """Its first calls have these ids: they are told again."""
        self._calls.given_ids = ids

    def remark(self, notes: Iterable[str]) -> None:
        """Add remarks from elsewhere."""
        self._notes += notes

    def reason(self, given: FinishReason) -> FinishReason:
        """Why the answer ended: a call that broke off is no clean end."""
        if given != "stop" or not self.num_tool_calls:
            return given
        return "length" if self._is_broken else "tool_calls"

    def feed(self, text: str, logprobs: TokenLogprobs | None = None) -> list[Chunk]:
        """The chunks that one token's stable text completes."""
        if logprobs is not None:
            self._logprobs.append(logprobs)
        chunks = self._feed(text)
        while self._pending and not self.is_stopped:
            rest, self._pending = self._pending, ""
            chunks += self._feed(rest)
        return chunks

    def _feed(self, text: str) -> list[Chunk]:
        if not text or self.is_stopped:
            return []
        if self._in_calls:
            return self._read_calls(text)
        if text in self._marks.get(self._state[0], ()):
            return self._read_mark(text)
        if (self._is_constrained and self._state[0] != ANSWER) or self._may_be_call:
            return self._by_character(text)
        if self._stop and (self._skips_blank or self._is_before_answer) and not self.is_reasoning:
            return self._by_character(text)
        state, segments = _TextStateMachine.split(self._state, text)
        if len(segments) == 1:
            self._state = state
            return self._say(*segments[0])
        return self._by_character(text) if self._stop else self._advance(text)

    def finish(self, text: str = "", *, is_cut: bool = False) -> list[Chunk]:
        """The chunks of the held-back rest. `is_cut` says that the model did not end by itself."""
        chunks = self.feed(text)
        while self._in_calls and not self.is_stopped:
            section = self._calls.close(is_cut=is_cut)
            chunks += [*section.deltas, *self._leave_calls(section), *self.feed("")]
        if self.is_stopped:
            return chunks
        state = self._state[0]
        self._state, rest, _ = _TextStateMachine.flush(self._state)
        chunks += self._say(state, rest) + self._told_as_text()
        is_silent = not (self._has_spoken or self.num_tool_calls)
        if state == HEADER and (self._dialect.shows_headers or is_silent):
            chunks += self._say_header()
        is_blank = not is_cut if state == REASONING else not self._has_text and self.num_tool_calls
        held = "" if is_blank else self._held
        if self._logprobs or held:
            chunks.append(self._delta(state, held))
        return chunks

    def _read_mark(self, mark: str) -> list[Chunk]:
        """What a mark says that came as one token: no stop string is looked for inside it."""
        self._state, before, state = _TextStateMachine.flush(self._state)
        if before:
            return self._say(state, before) + self.feed(mark)
        self._state = self._unstopped.make_state(state)
        chunks = self._advance(mark)
        self._state = self._machine.make_state(self._state[0])
        return chunks

    def _by_character(self, text: str) -> list[Chunk]:
        """For where what was read decides what the next mark means."""
        chunks: list[Chunk] = []
        for i, character in enumerate(text):
            if self._in_calls or self._begins_call(character):
                self._pending = text[i:]
                break
            if self._precedes_answer(character):
                chunks += self._say(self._state[0], character)
            else:
                self._is_before_answer = False
                chunks += self._advance(character)
            if self.is_stopped:
                break
        return chunks

    def _precedes_answer(self, character: str) -> bool:
        """A blank between thoughts and answer: no stop string begins with it, nor does any mark."""
        is_before = self._skips_blank or self._is_before_answer
        is_open = self._state[0] in (START, NORMAL, ANSWER) and not self._state[3]
        return is_open and is_before and character.isspace()

    def _begins_call(self, character: str) -> bool:
        """An answer that begins like this may be a call without a mark."""
        is_first = self._may_be_call and self._state[0] in (START, NORMAL) and not self._state[3]
        if not is_first or character not in self._dialect.first:
            return False
        self._enter_calls("", self._held)
        return True

    def _advance(self, piece: str) -> list[Chunk]:
        before = self._state[0]
        self._state, segments = _TextStateMachine.split(self._state, piece)
        chunks: list[Chunk] = []
        for state, segment in segments:
            if state != before:
                chunks += self._enter(before, state)
                if self.is_stopped:
                    break
            before = state
            chunks += self._say(state, segment)
        return chunks

    def _enter(self, old: str, new: str) -> list[Chunk]:
        """What leaving state `old` for `new` says."""
        is_end = old == START and new == NORMAL and self._has_spoken
        if is_end and self._may_be_orphan and self._num_backticks % 2 == 0:
            return self._say_orphan()
        said = self._told_as_text()
        if is_end:
            return said + self._say(NORMAL, self._dialect.think_end)
        if new == INVENTED and not self.num_tool_calls:
            self._state = self._machine.make_state(NORMAL)
            return said + self._say(NORMAL, self._dialect.result_start)
        return said + self._leave(old, new)

    def _leave(self, old: str, new: str) -> list[Chunk]:
        """The same where the mark between them is one."""
        held, self._held = self._held, ""
        self._skips_blank = True
        if new.startswith(STOP):
            return self._stop_at(new, held)
        if new.startswith(TOOL):
            header = self._say_header() if self._dialect.shows_headers else []
            before = held if old != REASONING else ""
            return [*header, *self._enter_calls(new.removeprefix(TOOL), before)]
        if old == HEADER:
            header = self._say_header() if self._dialect.shows_headers else []
            self._header = ""
            return header
        return []

    def _say_orphan(self) -> list[Chunk]:
        """The mark as it was written, for who has been told the text before it as such already."""
        held, self._held = self._held, ""
        if self._expected is not None:
            self._expected, self._skips_blank = None, True
            return [TextWasReasoning(self._index)]
        self._notes.append(ORPHAN)
        self._is_before_answer = True
        mark = self._delta(NORMAL, held + self._dialect.think_end)
        return [mark, TextWasReasoning(self._index)]

    def _told_as_text(self) -> list[Chunk]:
        """What was told as the thoughts that were expected, if there were none."""
        expected, self._expected = self._expected, None
        if expected is None or not expected.has_told:
            return []
        self._notes.append(NO_THOUGHTS)
        return [ReasoningWasText(self._index), TextDelta(index=self._index, text=expected.text)]

    def _stop_at(self, mark: str, held: str) -> list[Chunk]:
        """The answer ends with these blanks, before the mark of this state."""
        self.is_stopped = True
        if mark == INVENTED:
            self.cut = Cut(self._dialect.result_start, is_last=True)
            self._notes.append(INVENTED_RESULT)
            return []
        self.stopped_by = self._stop[int(mark.removeprefix(STOP))]
        self.cut = Cut(self.stopped_by)
        return [self._delta(NORMAL, held)] if held else []

    def _say(self, state: str, text: str) -> list[Chunk]:
        if not text:
            return []
        if state.startswith(TOOL):
            return self._read_calls(text)
        if state == HEADER:
            self._header += text
            return []
        if self._skips_blank:
            text = text.lstrip()
            self._skips_blank = not text
        if state == REASONING or (self._has_tools and state != ANSWER):
            text = self._hold_blank_end(text)
        if not text:
            return []
        if state != REASONING:
            self._has_text |= not text.isspace()
            self._has_spoken |= self._has_text
            self._may_be_call &= not self._has_spoken
            self._num_backticks += text.count("`")
            self._watch(text)
            if self._is_constrained and state != ANSWER:
                self._begin_answer()
        if state == START and self._expected is not None:
            text, state = self._expected.add(text), REASONING
        return [self._delta(state, text)] if text else []

    def _watch(self, text: str) -> None:
        """Text with a mark that stands inside of calls only may be a call that nothing began."""
        if self._strays and not self._has_stray:
            self._said += text
            self._has_stray = any(mark in self._said for mark in self._strays)
            self._said = self._said[-max(map(len, self._strays)) :]

    def _begin_answer(self) -> None:
        """From the first text of a constrained answer on, it is all answer."""
        buffered = self._state[3]
        self._state, _ = _TextStateMachine.split(self._machine.make_state(ANSWER), buffered)

    def _hold_blank_end(self, text: str) -> str:
        """Trailing blanks wait for what follows: text needs them, a marker does not."""
        text = self._held + text
        body = text.rstrip()
        self._held = text[len(body) :]
        return body

    def _say_header(self) -> list[Chunk]:
        text, self._header = self._header, ""
        return [self._delta(NORMAL, text)] if text.strip() else []

    def _delta(self, state: str, text: str) -> Chunk:
        logprobs, self._logprobs = tuple(self._logprobs), []
        kind = ReasoningDelta if state == REASONING else TextDelta
        return kind(index=self._index, text=text, logprobs=logprobs)

    def _enter_calls(self, mark: str, before: str) -> list[Chunk]:
        """Calls begin with this mark, after blanks that are text if more text follows."""
        self._in_calls, self._may_be_call, self._held = True, False, ""
        self._expected = None
        self._calls.open(mark)
        if self._dialect.keeps_blanks and before and self._has_text:
            return [self._delta(NORMAL, before)]
        self._before_calls = before
        return []

    def _read_calls(self, text: str) -> list[Chunk]:
        chunks: list[Chunk] = list(self._calls.feed(text))
        section = self._calls.ended()
        if self._calls.has_extra:
            self.is_stopped = True
        elif section is not None:
            chunks += self._leave_calls(section)
        return chunks

    def _leave_calls(self, section: Section) -> list[Chunk]:
        """The calls are over: what they had of text is said, and what follows is read on."""
        before, self._before_calls = self._before_calls, ""
        self._in_calls = False
        self._state = self._machine.make_state(HEADER if self._dialect.edges else NORMAL)
        self._is_broken |= section.is_broken
        self.is_stopped = self._calls.has_extra or (self._calls.is_full and not section.is_broken)
        self._pending = "" if self.is_stopped else section.rest
        if section.text:
            self._skips_blank = False
            self._has_spoken = self._has_text = True
            return [self._delta(NORMAL, before + section.text)]
        self._held = before
        self._skips_blank = not self._has_spoken
        self._has_text = False
        return []


def _marks_beside(stop: tuple[str, ...], edges: Iterable[tuple[str, str]]) -> frozenset[str]:
    """The marks of these edges that no stop string has in it: who names a mark wants to stop."""
    return frozenset(mark for mark, _ in edges if not any(mark in word for word in stop))
