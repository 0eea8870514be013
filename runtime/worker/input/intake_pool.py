"""Reception: requests are taken in, each within a budget, and none holds up the others.

One thread takes in at a time, except while the sandbox works for it. A request for which it works
longer than `SLOW_S` is slow: another lane goes on with the others, and where too many are slow it
waits until they are fewer and begins again. Tenants take turns, and so do the conversations of
each.
"""

from __future__ import annotations

import pickle
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from runtime.errors import InvalidRequest
from runtime.fair_share import FairShare
from runtime.types import ChatPrompt, GenerateRequest, Message
from runtime.worker.input.intake import Intake
from runtime.worker.input.preparer import (
    Compiled,
    GrammarRefused,
    Marked,
    OverBudget,
    PromptPreparer,
)
from runtime.worker.input.sandbox import (
    Encoded,
    Lane,
    LaneLost,
    Outcome,
    Rendered,
    Sandbox,
    Tried,
    Unfit,
)
from runtime.worker.sequence import SequenceGroup

SLOW_S = 0.5
MAX_SLOW = 2
"""So many requests may be slow at once; there is one lane more than that."""
CPU_S = 3.0
CPU_S_PER_MB = 6.0
"""What a request may have of the processor, and what more for each megabyte that is worked on."""
GROWTH_BYTES = 512 << 20
GRAMMAR_CPU_S = 2.0
VOCABULARY_CPU_S = 30.0
"""For what a lane's first grammar needs of the model's vocabulary: no request's own doing. Gemma's
262,144 tokens took 2.6 s.
"""
GRAMMAR_GROWTH_BYTES = 256 << 20
"""Of one grammar: what a lane could compile, the worker compiles once more for itself."""
_NUM_TRIES = 2
REHEARSAL = GenerateRequest(
    request_id="rehearsal",
    model="",
    prompt=ChatPrompt((Message(role="system", text="."), Message(role="user", text="."))),
    work="count",
)


def refusal_of(error: OverBudget, request: GenerateRequest) -> InvalidRequest:
    """What a request's client is told where its prompt takes too much."""
    field = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
    what = "The prompt cannot be tokenized"
    if error.job == "render":
        what = "The model's chat template cannot show these messages"
    return InvalidRequest(f"{what}: {error.why}. Send less, or choose another model.", field)


class _Given(BaseException):
    """The lane is given up, and with it the work; no handler of errors is to stop it."""


class _HasLeft(_Given):
    """Nobody wants the answer any more."""


class _SetAside(_Given):
    """Too many are slow: it begins again when they are fewer."""


class IntakeTask:
    """One request that is taken in: what it has used, and who does its work."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.is_over = False
        self.is_slow = False
        self.has_left = False
        self.began_s = 0.0
        self.lane: Lane | None = None
        self._cpu_s = 0.0
        self._num_bytes = 0

    def begin(self, lane: Lane) -> None:
        """From now on this lane works for it."""
        self.lane, self.began_s = lane, time.monotonic()
        self._cpu_s, self._num_bytes = 0.0, 0

    def call(
        self, name: str, arguments: Sequence[object], slow_down: Callable[[], None]
    ) -> Outcome:
        """Have the lane do a job; `slow_down` is called when that takes long.

        Raises:
            OverBudget: it took too much.
        """
        assert self.lane is not None
        job = pickle.dumps((name, arguments))
        self._num_bytes += len(job)
        is_grammar = name == "matcher"
        limit_s = CPU_S + CPU_S_PER_MB * self._num_bytes / 1e6 - self._cpu_s
        is_alone = is_grammar and limit_s >= GRAMMAR_CPU_S
        limit_s = GRAMMAR_CPU_S if is_alone else limit_s
        is_own = name != "prepare"
        limit_s = limit_s if is_own else VOCABULARY_CPU_S
        limit_bytes = GRAMMAR_GROWTH_BYTES if is_grammar else GROWTH_BYTES

        def look(cpu_s: float, growth: int) -> None:
            if self.has_left:
                raise _HasLeft
            if cpu_s > limit_s:
                why = f"that takes more than {max(limit_s, 0):.1f} s of computing"
                raise OverBudget(name, why, is_alone=is_alone)
            if growth > limit_bytes:
                why = f"that takes more than {limit_bytes >> 20} MB of memory"
                raise OverBudget(name, why, is_alone=is_grammar)
            if not self.is_slow and time.monotonic() - self.began_s > SLOW_S:
                slow_down()

        for _ in range(_NUM_TRIES):
            try:
                outcome, took_s = self.lane.call(job, limit_s, look)
            except LaneLost:
                continue
            self._cpu_s += took_s * is_own
            return outcome
        raise OverBudget(name, "the process that was to do it ended, twice")


class IntakePool:
    """`admit` takes a request in, in one of its threads; what it returns is given to
    `deliver`, unless nobody wants it any more. Their order is not kept. `work_on` is told whose
    work comes now outside of the sandbox.

    It is the bench (`preparer.Bench`) of the requests that it takes in. On other threads the work
    is done there and then.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        bench: PromptPreparer,
        admit: Callable[[Intake, GenerateRequest], SequenceGroup | None],
        deliver: Callable[[SequenceGroup], None],
        work_on: Callable[[Sequence[str]], None],
    ) -> None:
        self._sandbox = sandbox
        self._bench = bench
        self._admit = admit
        self._deliver = deliver
        self._work_on = work_on
        self._turn = threading.Lock()
        self._here = threading.local()
        self._changed = threading.Condition()
        self._fresh: deque[IntakeTask] = deque()
        self._share: FairShare[IntakeTask] = FairShare(lambda task: task.request)
        self._late: deque[IntakeTask] = deque()
        self._inside: set[IntakeTask] = set()
        self._num_slow = 0
        self._num_threads = 0
        self._threads: list[threading.Thread] = []
        self._intake: Intake | None = None
        self.num_turns = 0
        """How often a thread went on taking in: what shows that it gets anywhere."""
        self.whose: str = ""
        """The request that is being taken in right now, outside of the sandbox."""

    def open(self, intake: Intake) -> None:
        """Begin to take in."""
        with self._changed:
            self._intake = intake
            self._grow(intake)

    def close(self) -> None:
        """Take nothing more in."""
        with self._changed:
            self._intake = None
            self._changed.notify_all()

    def join(self, patience_s: float) -> bool:
        """Whether all threads have ended, which is waited for; after `close`."""
        over_s = time.monotonic() + patience_s
        for one in self._threads:
            one.join(max(over_s - time.monotonic(), 0.0))
        return not any(one.is_alive() for one in self._threads)

    def put(self, request: GenerateRequest) -> None:
        """A request has come."""
        with self._changed:
            self._fresh.append(IntakeTask(request))
            self._changed.notify()

    def rehearse(self) -> None:
        """Take in what nobody asked, and wait until that is done: what is found out about a
        template and a tokenizer with the first request is known from then on.
        """
        visit = IntakeTask(REHEARSAL)
        with self._changed:
            self._fresh.append(visit)
            self._changed.notify()
            self._changed.wait_for(lambda: visit.is_over or self._intake is None)

    def drop(self, request_id: str) -> None:
        """Nobody wants this one any more: from now on it is not delivered, nor worked for."""
        with self._changed:
            for visit in self._inside:
                visit.has_left |= visit.request.request_id == request_id
            for queue in (self._fresh, self._late):
                for visit in [v for v in queue if v.request.request_id == request_id]:
                    queue.remove(visit)

    # The threads

    def _grow(self, intake: Intake) -> None:
        """See that one lane more is there than slow requests are in work."""
        if self._num_threads <= self._num_slow:
            self._num_threads += 1
            run = threading.Thread(target=self._run, args=(intake,), name="intake", daemon=True)
            self._threads = [*(one for one in self._threads if one.is_alive()), run]
            run.start()

    def _run(self, intake: Intake) -> None:
        lane = self._sandbox.lane()
        while (visit := self._next()) is not None:
            visit.begin(lane)
            self._take_in(intake, visit)
        lane.end()

    def _next(self) -> IntakeTask | None:
        """What is to be taken in; None when this thread is not needed any more."""
        with self._changed:
            while self._intake is not None and self._num_threads <= self._num_slow + 1:
                if self._fresh:
                    visit = self._share.next(self._fresh)
                    self._share.charge(visit)
                    self._fresh.remove(visit)
                    return self._entered(visit)
                if self._late and self._num_slow < MAX_SLOW:
                    visit = self._late.popleft()
                    self._mark_slow(visit)
                    return self._entered(visit)
                self._changed.wait()
            self._num_threads -= 1
            return None

    def _entered(self, visit: IntakeTask) -> IntakeTask:
        self._inside.add(visit)
        return visit

    def _take_in(self, intake: Intake, visit: IntakeTask) -> None:
        self._here.visit = visit
        self._begin_turn(visit)
        taken: SequenceGroup | None = None
        is_late = False
        try:
            taken = self._admit(intake, visit.request)
        except _HasLeft:
            pass
        except _SetAside:
            is_late = True
        finally:
            self._end_turn()
            self._here.visit = None
        if visit.is_slow and visit.lane is not None:
            visit.lane.end()  # the next one's is not to yield to others
        with self._changed:
            self._inside.discard(visit)
            if visit.is_slow:
                self._num_slow -= 1
                visit.is_slow = False
            visit.is_over = visit.has_left or not is_late
            if not visit.is_over:
                self._late.append(visit)
            is_wanted = not visit.has_left and visit.request is not REHEARSAL
            if taken is not None and is_wanted:
                self._deliver(taken)
            self._changed.notify_all()

    def _begin_turn(self, visit: IntakeTask) -> None:
        self._turn.acquire()
        self.num_turns += 1
        self.whose = visit.request.request_id
        self._work_on((self.whose,))

    def _end_turn(self) -> None:
        self.whose = ""
        self._work_on(())
        self._turn.release()

    def _slow_down(self, visit: IntakeTask) -> None:
        """It takes long: let others pass. Raises _SetAside."""
        with self._changed:
            if self._num_slow >= MAX_SLOW:
                raise _SetAside
            self._mark_slow(visit)
        if visit.lane is not None:
            visit.lane.yield_to_others()

    def _mark_slow(self, visit: IntakeTask) -> None:
        visit.is_slow = True
        self._num_slow += 1
        if self._intake is not None:
            self._grow(self._intake)

    # The bench

    def render(
        self, messages: list[dict[str, object]], tools: object, kwargs: dict[str, object]
    ) -> str:
        """See `preparer.Bench`. Raises OverBudget."""
        if (visit := self._visit) is None:
            return self._bench.render(messages, tools, kwargs)
        outcome = self._call(visit, "render", messages, tools, kwargs)
        assert isinstance(outcome, Rendered)
        return outcome.text.decode("utf-8", "surrogatepass")

    def encode(self, text: str, at: Sequence[int], *, adds_special: bool) -> Marked:
        """See `preparer.Bench`. Raises OverBudget."""
        if (visit := self._visit) is None:
            return self._bench.encode(text, at, adds_special=adds_special)
        outcome = self._call(visit, "encode", text, list(at), adds_special)
        assert isinstance(outcome, Encoded)
        return Marked(array("I", outcome.token_ids).tolist(), list(outcome.positions))

    def matcher(self, grammar: str) -> Compiled:
        """See `preparer.Bench`. Raises OverBudget."""
        if (visit := self._visit) is None:
            return self._bench.matcher(grammar)
        outcome = self._call(visit, "prepare")
        if outcome == Tried():
            outcome = self._call(visit, "matcher", grammar)
        assert isinstance(outcome, Tried)
        if outcome.complaint is not None:
            raise GrammarRefused(outcome.complaint, outcome.reason)
        with self.aside():
            return self._bench.compiled(grammar)

    @contextmanager
    def aside(self) -> Generator[None]:
        """Others are taken in while who is taken in on this thread waits for something else."""
        visit = self._visit
        if visit is not None:
            self._end_turn()
        try:
            yield
        finally:
            if visit is not None:
                self._begin_turn(visit)

    def slow_down(self) -> None:
        """Who is taken in on this thread waits long: let others pass, or begin again later."""
        if (visit := self._visit) is not None and not visit.is_slow:
            self._slow_down(visit)

    @property
    def _visit(self) -> IntakeTask | None:
        return getattr(self._here, "visit", None)

    def _call(self, visit: IntakeTask, name: str, *arguments: object) -> Outcome:
        with self.aside():
            outcome = visit.call(name, arguments, lambda: self._slow_down(visit))
        if not isinstance(outcome, Unfit):
            return outcome
        if outcome.why == "memory":
            raise OverBudget(name, "that takes more memory than there is")
        raise (ValueError if outcome.why == "template" else RuntimeError)(outcome.message)
