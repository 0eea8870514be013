"""Which tokens may come next in one sequence: thinking within its budget, then what is demanded.

Pure bookkeeping over llguidance's matchers; masks are bits on the host, lowest first.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from llguidance import LLMatcher

GRAMMAR_TOO_HEAVY = "grammar_too_heavy"
"""What the answer must be next takes more work than may be done for one token."""

GRAMMAR_FAILED = "grammar_failed"
"""The same for any other reason, such as that no token is possible."""

_TOO_HEAVY = re.compile(r"max is|too (many|complex|large|big)|limit|fuel", re.IGNORECASE)
_MAX_GAP_TOKENS = 2
_MAX_MARK_TOKENS = 32


class _Phase(Enum):
    BEGIN = auto()  # nothing said yet: thinking, a call or the answer may begin
    THINKING = auto()
    GAP = auto()  # thinking has closed: blank lines, then the same choice
    DEMANDED = auto()  # a matcher decides
    FREE = auto()
    DONE = auto()


@dataclass(frozen=True, slots=True)
class GuidePlan:
    """How one request's sequences are guided. Matchers in it are copied, never used.

    `answer` is what a constrained answer must be, after the tokens of `answer_opening`; `call` is
    what follows `trigger`, the tokens that open a call, and `demands_call` that one must come,
    `refuses_calls` that none may.
    `next_message` are forced after thinking where a dialect's turn has several messages, `gap`
    are the tokens of blank lines, `between` those that may stand between two calls.
    """

    vocab_size: int
    eos: frozenset[int]
    starts_in_reasoning: bool = False
    may_think: bool = False
    think_start: tuple[int, ...] = ()
    think_end: tuple[int, ...] = ()
    budget: int | None = None
    next_message: tuple[int, ...] = ()
    gap: frozenset[int] = frozenset()
    between: frozenset[int] = frozenset()
    answer: LLMatcher | None = None
    answer_opening: tuple[int, ...] = ()
    call: LLMatcher | None = None
    trigger: tuple[int, ...] = ()
    demands_call: bool = False
    refuses_calls: bool = False
    is_parallel: bool = True

    @property
    def decides_end(self) -> bool:
        """The end of the sequence is a grammar's to allow."""
        return self.answer is not None or self.demands_call

    def start(self) -> Guide:
        """The guide of one sequence, before its first token."""
        return Guide(self)


class Guide:
    """One sequence's state. `failure` is what llguidance could not go on with: then it ends."""

    def __init__(self, plan: GuidePlan) -> None:
        self._plan = plan
        self._phase = _Phase.THINKING if plan.starts_in_reasoning else _Phase.BEGIN
        self._forced: deque[int] = deque()
        self._recent: list[int] = []
        self._num_reasoning = 0
        self._num_gap = 0
        self._matcher: LLMatcher | None = None
        self._in_call = False
        self._said: list[int] = []
        self.failure: str | None = None
        self._enter(self._phase)

    def advance(self, token_ids: Iterable[int]) -> None:
        """Take note of the tokens that were said."""
        for token_id in token_ids:
            self._recent = [*self._recent[-_MAX_MARK_TOKENS:], token_id]
            if self._forced and token_id == self._forced[0]:
                self._forced.popleft()
                if self._forced or self._phase is not _Phase.THINKING:
                    continue
            self._take(token_id)

    def mask(self) -> bytearray | None:
        """A bit for each token that may come next; None where every one may."""
        plan = self._plan
        if self.failure is not None:
            return self._only(plan.eos)
        if self._forced:
            return self._only([self._forced[0]])
        match self._phase:
            case _Phase.BEGIN | _Phase.GAP:
                return self._mask_of_beginning()
            case _Phase.THINKING:
                if not plan.decides_end:
                    return self._all_but(self._calling())
                return self._all_but([*plan.eos, *plan.trigger[:1]])
            case _Phase.DEMANDED:
                return self._mask_of_matcher()
            case _Phase.FREE:
                again = self._last_of(plan.think_start) if self._is_exhausted else ()
                return self._all_but([*again, *self._calling()])
            case _Phase.DONE:
                return self._only([*plan.eos, *self._calling_again()])

    # Phases

    def _take(self, token_id: int) -> None:
        plan = self._plan
        match self._phase:
            case _Phase.BEGIN | _Phase.GAP:
                self._take_beginning(token_id)
            case _Phase.THINKING:
                self._num_reasoning += 1
                if _ends_with(self._recent, plan.think_end):
                    self._leave_thinking()
                elif self._is_exhausted:
                    self._forced.extend(plan.think_end)
                elif not plan.decides_end:
                    self._watch_for_call()
            case _Phase.DEMANDED:
                self._take_demanded(token_id)
            case _Phase.FREE:
                if plan.think_start and _ends_with(self._recent, plan.think_start):
                    self._enter(_Phase.THINKING)
                else:
                    self._watch_for_call()
            case _Phase.DONE:
                self._num_gap += 1
                if self._may_call_again:
                    self._watch_for_call()

    def _enter(self, phase: _Phase) -> None:
        plan = self._plan
        self._phase = phase
        if phase is _Phase.THINKING and self._is_exhausted:
            self._forced.extend(plan.think_end)
        if phase in (_Phase.BEGIN, _Phase.GAP):
            self._said = []
            has_mark = bool(plan.answer_opening)
            self._matcher = None if has_mark or plan.answer is None else plan.answer.deep_copy()
            if not plan.decides_end:
                self._phase = _Phase.FREE

    def _leave_thinking(self) -> None:
        self._forced.clear()
        if self._plan.decides_end:
            self._forced.extend(self._plan.next_message)
        self._enter(_Phase.GAP)

    def _watch_for_call(self) -> None:
        plan = self._plan
        if plan.call is not None and len(plan.trigger) == 1 and self._recent[-1] == plan.trigger[0]:
            self._demand(plan.call, in_call=True)

    def _demand(self, matcher: LLMatcher, *, in_call: bool) -> None:
        self._matcher = matcher.deep_copy()
        self._in_call = in_call
        self._phase = _Phase.DEMANDED

    def _take_demanded(self, token_id: int) -> None:
        matcher = self._matcher
        assert matcher is not None
        if not matcher.consume_token(token_id) or matcher.is_error():
            self._fail(matcher.get_error())
        elif matcher.is_stopped():
            self._end_demanded()

    def _end_demanded(self) -> None:
        plan = self._plan
        self._matcher = None
        is_free = self._in_call and plan.is_parallel and not plan.decides_end
        self._phase = _Phase.FREE if is_free else _Phase.DONE
        self._num_gap = 0

    @property
    def _may_call_again(self) -> bool:
        return self._in_call and self._plan.is_parallel and len(self._plan.trigger) == 1

    def _calling_again(self) -> Iterable[int]:
        """What leads to one more call, after blank lines as templates put them between two."""
        if not self._may_call_again:
            return ()
        is_apart = self._num_gap >= _MAX_GAP_TOKENS
        return self._plan.trigger if is_apart else (*self._plan.trigger, *self._plan.between)

    # The beginning: the answer, or one of the marks that open something

    def _openings(self) -> list[tuple[tuple[int, ...], LLMatcher | None]]:
        """The marks that what was said may be the beginning of, and what follows each; thinking
        follows where it is None.
        """
        plan = self._plan
        marks: list[tuple[tuple[int, ...], LLMatcher | None]] = []
        if plan.may_think and self._phase is _Phase.BEGIN and not self._is_exhausted:
            marks.append((plan.think_start, None))
        if plan.call is not None:
            marks.append((plan.trigger, plan.call))
        if plan.answer is not None:
            marks.append((plan.answer_opening, plan.answer))
        said = tuple(self._said)
        return [(ids, then) for ids, then in marks if ids and ids[: len(said)] == said]

    def _mask_of_beginning(self) -> bytearray | None:
        allowed = self._mask_of_matcher() if self._matcher is not None else self._only(())
        if self.failure is not None:
            return allowed
        for ids, _ in self._openings():
            _set(allowed, ids[len(self._said)])
        if self._phase is _Phase.GAP and self._num_gap < _MAX_GAP_TOKENS and not self._said:
            for token_id in self._plan.gap:
                _set(allowed, token_id)
        return allowed

    def _take_beginning(self, token_id: int) -> None:
        matcher, why = self._matcher, ""
        if matcher is not None and matcher.try_consume_tokens([token_id]) != 1:
            self._matcher, why = None, matcher.get_error()
        if self._matcher is None and token_id in self._plan.gap and not self._said:
            self._num_gap += 1
            self._enter(_Phase.GAP)
            return
        self._said.append(token_id)
        openings = self._openings()
        for ids, then in openings:
            if len(ids) == len(self._said):
                self._open(then)
                return
        if openings:
            return
        if self._matcher is None:
            self._fail(why or "a token that no grammar allows")
            return
        self._in_call = False
        self._phase = _Phase.DEMANDED
        if self._matcher.is_stopped():
            self._end_demanded()

    def _open(self, then: LLMatcher | None) -> None:
        if then is None:
            self._enter(_Phase.THINKING)
        else:
            self._demand(then, in_call=then is self._plan.call)

    # Thinking

    @property
    def _is_exhausted(self) -> bool:
        budget = self._plan.budget
        return budget is not None and self._num_reasoning >= budget

    def _calling(self) -> Sequence[int]:
        """The token that would open a call where none may be."""
        return self._last_of(self._plan.trigger) if self._plan.refuses_calls else ()

    def _last_of(self, mark: tuple[int, ...]) -> Sequence[int]:
        """The token that would complete a mark."""
        begun = mark[:-1]
        is_begun = not begun or _ends_with(self._recent, begun)
        return mark[-1:] if is_begun else ()

    @property
    def gave_up(self) -> str | None:
        """What is told of a `failure`; None while there is none."""
        if self.failure is None:
            return None
        return GRAMMAR_TOO_HEAVY if _TOO_HEAVY.search(self.failure) else GRAMMAR_FAILED

    # Masks

    def _mask_of_matcher(self) -> bytearray:
        assert self._matcher is not None
        mask = bytearray(self._matcher.compute_bitmask())
        if self._matcher.is_error() or not any(mask):
            self._fail(self._matcher.get_error() or "no token is possible")
            return self._only(self._plan.eos)
        return mask

    def _fail(self, why: str) -> None:
        # All but the first line is the matcher's state: the grammar, and what was said.
        self.failure = why.strip().partition("\n")[0] or "the grammar cannot go on"
        self._phase = _Phase.DONE

    def _only(self, token_ids: Iterable[int]) -> bytearray:
        mask = bytearray(self._num_bytes)
        for token_id in token_ids:
            _set(mask, token_id)
        return mask

    def _all_but(self, token_ids: Iterable[int]) -> bytearray | None:
        banned = list(token_ids)
        if not banned:
            return None
        mask = bytearray(b"\xff" * self._num_bytes)
        for token_id in banned:
            mask[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
        return mask

    @property
    def _num_bytes(self) -> int:
        return (self._plan.vocab_size + 31) // 32 * 4


def _set(mask: bytearray, token_id: int) -> None:
    mask[token_id >> 3] |= 1 << (token_id & 7)


def _ends_with(token_ids: list[int], end: tuple[int, ...]) -> bool:
    return bool(end) and tuple(token_ids[-len(end) :]) == end
