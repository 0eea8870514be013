"""Plays the traffic against one server, and writes down what every turn took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from api.bench.agents.gate import Gate, Happening, ReplayEnded
from api.bench.agents.traffic import AgentScript, Texts
from api.bench.ask import AskFailed, ask
from api.bench.peers import Peer
from api.bench.texts import BenchMessage, short_question

_NO_ANSWER = "(no answer)"
_WATCH_S = 0.25


class TurnRecord(msgspec.Struct, omit_defaults=True):
    """One turn. `cached_tokens` is None where the server does not tell.

    `after` names what had happened to the server since this agent's turn before.
    """

    agent: str
    turn: int
    sent_s: float
    ttft_ms: float | None = None
    end_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    is_sub_agent: bool = False
    after: str | None = None
    is_right: bool | None = None
    failure: str | None = None


class ServerRun(msgspec.Struct):
    """All turns of one server in one round. Bytes are None where the system does not tell.

    `ended_early` says why there are fewer turns than the traffic has; `wall_s` is there at the end.
    """

    peer: str
    number: int
    boots_s: list[float] = []
    wall_s: float | None = None
    cpu_s: float | None = None
    written_bytes: int | None = None
    peak_resident_bytes: int | None = None
    happened: list[str] = []
    ended_early: str | None = None
    turns: list[TurnRecord] = []


class ReplayPlan(msgspec.Struct, frozen=True):
    """How the traffic is played: shares of the turns after which something happens, or None."""

    num_at_once: int
    restart_at: float | None = None
    swap_at: float | None = None


class Replay:
    """One server, played to the end or until the time is up."""

    def __init__(
        self,
        peer: Peer,
        sessions: Sequence[AgentScript],
        texts: Texts,
        plan: ReplayPlan,
        into: ServerRun,
    ) -> None:
        self._peer = peer
        self._sessions = sessions
        self._texts = texts
        self._plan = plan
        self._run = into
        self._begun_s = 0.0
        self._gate = Gate((), None)

    def play(
        self,
        deadline_s: float | None,
        on_turn: Callable[[TurnRecord], None],
        on_look: Callable[[], None],
    ) -> None:
        """Start the server, send every turn, stop it. `on_look` comes a few times a second.

        Raises:
            RecipeError: it cannot be started.
            AskFailed: it does not answer at all.
        """
        self._gate = Gate(self._happenings(), deadline_s)
        watch = _Watch(self._peer, self._run, on_look)
        with watch:
            try:
                self._run.boots_s.append(round(self._peer.start(), 2))
                self._begun_s = time.perf_counter()
                with ThreadPoolExecutor(self._plan.num_at_once) as pool:
                    played = [pool.submit(self._agent, one, on_turn) for one in self._sessions]
                for one in played:
                    one.result()
                self._run.wall_s = round(time.perf_counter() - self._begun_s, 1)
            except (KeyboardInterrupt, SystemExit):
                self._gate.end("it was interrupted")
                raise
            finally:
                self._run.ended_early = self._gate.ended
                self._run.happened = self._gate.happened
                self._peer.stop()

    def _happenings(self) -> list[Happening]:
        num_turns = sum(len(one.turns) for session in self._sessions for one in session.family())
        found: list[Happening] = []
        if self._plan.restart_at is not None and self._peer.can_restart:
            found.append(Happening("restart", int(num_turns * self._plan.restart_at), self._again))
        if self._plan.swap_at is not None and self._peer.second is not None:
            found.append(Happening("swap", int(num_turns * self._plan.swap_at), self._swap))
        return found

    def _again(self) -> None:
        self._peer.stop()
        self._run.boots_s.append(round(self._peer.start(), 2))

    def _swap(self) -> None:
        """Something to the second model, so that the first one has to come back."""
        assert self._peer.second is not None
        ask(self._peer.second, short_question(0).messages, 4)

    def _agent(
        self,
        script: AgentScript,
        on_turn: Callable[[TurnRecord], None],
        *,
        is_sub_agent: bool = False,
        happened: int = 0,
    ) -> None:
        """One agent's turns; what the server said is what the next prompt holds."""
        messages = [self._texts.system]
        for number, turn in enumerate(script.turns):
            messages.append(self._texts.message(script, number))
            try:
                before, happened = happened, self._gate.enter()
            except ReplayEnded:
                return
            record = TurnRecord(
                script.name,
                number,
                round(time.perf_counter() - self._begun_s, 3),
                is_sub_agent=is_sub_agent,
                after=self._gate.happened[-1] if number and happened > before else None,
            )
            text = self._ask(script, record, messages, turn.max_tokens)
            self._gate.leave(is_answered=record.failure is None)
            self._run.turns.append(record)
            on_turn(record)
            messages.append(BenchMessage("assistant", text or _NO_ANSWER))
            if number + 1 == script.fans_out_after:
                self._fan_out(script, on_turn, happened)
            if number + 1 < len(script.turns):
                time.sleep(turn.pause_s)

    def _fan_out(
        self, script: AgentScript, on_turn: Callable[[TurnRecord], None], happened: int
    ) -> None:
        """The sub-agents run all at once, beside whatever else runs."""
        with ThreadPoolExecutor(len(script.children)) as pool:
            played = [
                pool.submit(self._agent, one, on_turn, is_sub_agent=True, happened=happened)
                for one in script.children
            ]
        for one in played:
            one.result()

    def _ask(
        self,
        script: AgentScript,
        record: TurnRecord,
        messages: Sequence[BenchMessage],
        max_tokens: int,
    ) -> str:
        """Fill the record; the text that came. An answer without text counts by its end."""
        try:
            answer = ask(self._peer.target, tuple(messages), max_tokens, may_be_empty=True)
        except AskFailed as error:
            record.failure = error.message
            return ""
        came_s = answer.arrivals_s[0] if answer.arrivals_s else answer.end_s
        record.ttft_ms = round((came_s - answer.sent_s) * 1000, 1)
        record.end_s = round(answer.end_s - self._begun_s, 3)
        record.prompt_tokens = answer.prompt_tokens
        record.cached_tokens = answer.cached_tokens
        record.output_tokens = answer.output_tokens
        if record.turn == len(script.turns) - 1:
            record.is_right = self._texts.door(script) in answer.text
        return answer.text


class _Watch:
    """Looks at the server's processes a few times a second, while it runs and while it stops.

    What a process writes after the last look at it is missing.
    """

    def __init__(self, peer: Peer, into: ServerRun, on_look: Callable[[], None]) -> None:
        self._peer = peer
        self._run = into
        self._on_look = on_look
        self._written: dict[int, int] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._is_over.wait(_WATCH_S):
            self._look()
            self._on_look()

    def _look(self) -> None:
        """Of each life of the server the most that was seen: ended processes count in it."""
        pid = self._peer.pid
        if pid is None:
            return
        resident = self._peer.resident_bytes()
        self._run.peak_resident_bytes = max(self._run.peak_resident_bytes or 0, resident)
        self._run.cpu_s = round(self._peer.cpu_s(), 1)
        written = self._peer.written_bytes()
        if written is not None:
            self._written[pid] = max(self._written.get(pid, 0), written)
            self._run.written_bytes = sum(self._written.values())
