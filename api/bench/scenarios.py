"""What is asked of one server in one round, and what came of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from api.bench.ask import AskFailed, Target, TimedAnswer, ask
from api.bench.peers import Peer
from api.bench.recipes import RecipeError
from api.bench.texts import (
    Question,
    ScriptedConversation,
    conversation,
    counting,
    counts_rightly,
    short_question,
)

ANSWER_TOKENS = 48
STREAM_TOKENS = 250
_BEGUN = 30
"""Pieces of text after which a stream counts as running."""
_SHOWN = 200
SETTLE_S = 3.0
"""Quiet before a swap and before `kill -9`: whoever works behind the answers has this long."""


class Measurement(msgspec.Struct):
    """One measurement. `failure` says why there is none; `is_right` judges the text."""

    scenario: str
    ttft_ms: float | None = None
    tokens_per_s: float | None = None
    longest_gap_ms: float | None = None
    kept: float | None = None
    cpu_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    is_right: bool = True
    said: str | None = None
    failure: str | None = None


class Round(msgspec.Struct):
    """One life of one server. `arrivals_ms` are those of the streams beside a long prompt."""

    peer: str
    number: int
    boots_s: list[float] = []
    samples: list[Measurement] = []
    arrivals_ms: list[float] = []
    resident_bytes: int = 0


class Sizes(msgspec.Struct, frozen=True):
    """How much is asked, and whether what is said is compared with what should be."""

    num_characters: int
    num_streams: int
    judges: bool = True


class Asking:
    """Asks one server and writes down what came."""

    def __init__(self, peer: Peer, into: Round, sizes: Sizes, say: Callable[[str], None]) -> None:
        self._peer = peer
        self._round = into
        self._sizes = sizes
        self._say = say
        self._seed = 1000 * (into.number + 1)

    def everything(self) -> None:
        """All scenarios, in the order in which they are told."""
        if not self._boot("start"):
            return
        if self._peer.can_restart:
            self._add(Measurement("start", ttft_ms=round(self._round.boots_s[0] * 1000, 1)))
        talk = self._conversation()
        turn, said = self._one_conversation(talk)
        if self._peer.second is not None:
            turn, said = self._swap(self._peer.second, talk, turn, said)
        self._streams("1 stream", 1)
        self._streams("streams", self._sizes.num_streams)
        self._beside()
        self._round.resident_bytes = self._peer.resident_bytes()
        if self._peer.can_restart:
            self._lives(talk, turn, said)

    def _boot(self, scenario: str) -> bool:
        try:
            self._round.boots_s.append(round(self._peer.start(), 2))
        except (AskFailed, RecipeError) as error:
            self._add(Measurement(scenario, is_right=False, failure=error.message))
            return False
        return True

    def _conversation(self) -> ScriptedConversation:
        (seed,) = self._seeds(1)
        return conversation(self._sizes.num_characters, seed)

    def _one_conversation(self, talk: ScriptedConversation) -> tuple[Question, str]:
        said = self._ask("cold", talk.first)
        self._ask("retry", talk.first)
        turn = talk.first.then(said, talk.door)
        said = self._ask("follow-up", turn)
        self._ask("sibling", talk.sibling)
        self._ask("mid-edit", talk.edited(turn))
        return turn, said

    def _swap(
        self, second: Target, talk: ScriptedConversation, turn: Question, said: str
    ) -> tuple[Question, str]:
        """Another model, and back to the conversation."""
        time.sleep(SETTLE_S)
        self._ask("swap", short_question(self._seed), second)
        time.sleep(SETTLE_S)
        turn = turn.then(said, talk.code)
        return turn, self._ask("back", turn)

    def _lives(self, talk: ScriptedConversation, turn: Question, said: str) -> None:
        """The conversation goes on after `kill -9`, the first end of this server, and a restart."""
        time.sleep(SETTLE_S)
        self._peer.kill()
        if self._boot("kill"):
            turn = turn.then(said, talk.door)
            said = self._ask("kill", turn)
            self._peer.stop()
        if self._boot("restart"):
            self._ask("restart", turn.then(said, talk.code))

    def _ask(self, scenario: str, question: Question, target: Target | None = None) -> str:
        """Ask one thing; the text, or if there is none what it should have held."""
        before = self._peer.cpu_s()
        try:
            answer = ask(target or self._peer.target, question.messages, ANSWER_TOKENS)
        except AskFailed as error:
            self._add(Measurement(scenario, is_right=False, failure=error.message))
            return question.needle
        is_right = not self._sizes.judges or question.is_answered_by(answer.text)
        sample = Measurement(
            scenario,
            ttft_ms=round(answer.ttft_ms, 1),
            cpu_s=round(self._peer.cpu_s() - before, 2) if self._peer.can_restart else None,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens or 0,
            output_tokens=answer.output_tokens,
            is_right=is_right,
            said=None if is_right else answer.text[:_SHOWN],
        )
        self._add(sample)
        return answer.text

    def _streams(self, scenario: str, num_streams: int) -> None:
        """That many long answers at once, from the first piece of any to the last of all."""
        with ThreadPoolExecutor(num_streams) as pool:
            running = [pool.submit(self._count, seed) for seed in self._seeds(num_streams)]
        try:
            answers = [one.result() for one in running]
        except AskFailed as error:
            self._add(Measurement(scenario, is_right=False, failure=error.message))
            return
        begun = min(one.arrivals_s[0] for one in answers)
        ended = max(one.arrivals_s[-1] for one in answers)
        num_tokens = sum(one.output_tokens or len(one.arrivals_s) for one in answers)
        sample = Measurement(scenario, tokens_per_s=round(num_tokens / (ended - begun), 1))
        self._add(self._judged(sample, answers))

    def _beside(self) -> None:
        """A long prompt that nobody knows, while streams run."""
        num_streams = self._sizes.num_streams
        begun = threading.Semaphore(0)
        long = self._conversation().first
        with ThreadPoolExecutor(num_streams) as pool:
            seeds = self._seeds(num_streams)
            running = [pool.submit(self._count, seed, begun) for seed in seeds]
            for _ in running:
                begun.acquire()
            try:
                answer = ask(self._peer.target, long.messages, ANSWER_TOKENS)
                answers = [one.result() for one in running]
            except AskFailed as error:
                self._add(Measurement("beside", is_right=False, failure=error.message))
                return
        self._round.arrivals_ms = sorted(
            round((at - answer.sent_s) * 1000, 1) for one in answers for at in one.arrivals_s
        )
        sample = self._judged(_beside_sample(answer, answers), answers)
        if self._sizes.judges:
            sample.is_right = sample.is_right and long.is_answered_by(answer.text)
        self._add(sample)

    def _seeds(self, number: int) -> range:
        """As many that no prompt was made from."""
        self._seed += number
        return range(self._seed - number + 1, self._seed + 1)

    def _count(self, seed: int, begun: threading.Semaphore | None = None) -> TimedAnswer:
        """One stream; `begun` is released once, when it runs or cannot."""
        tell = threading.Event()

        def on_arrival(num_arrivals: int) -> None:
            if begun is not None and num_arrivals == _BEGUN:
                tell.set()
                begun.release()

        try:
            return ask(self._peer.target, counting(seed), STREAM_TOKENS, on_arrival)
        finally:
            if begun is not None and not tell.is_set():
                begun.release()

    def _judged(self, sample: Measurement, answers: list[TimedAnswer]) -> Measurement:
        wrong = [one.text for one in answers if not counts_rightly(one.text)]
        if wrong and self._sizes.judges:
            sample.is_right, sample.said = False, wrong[0][:_SHOWN]
        return sample

    def _add(self, sample: Measurement) -> None:
        self._round.samples.append(sample)
        self._say(f"{self._peer.recipe.name}, round {self._round.number + 1}: {told(sample)}")


def _beside_sample(long: TimedAnswer, streams: list[TimedAnswer]) -> Measurement:
    """What the streams lost from the long prompt's sending to its first token."""
    since, until = long.sent_s, long.arrivals_s[0]
    gaps = [
        later - earlier
        for one in streams
        for earlier, later in zip(one.arrivals_s, one.arrivals_s[1:], strict=False)
        if later > since and earlier < until
    ]
    alone = sum(len([at for at in one.arrivals_s if at <= since]) for one in streams)
    beside = sum(len([at for at in one.arrivals_s if since < at <= until]) for one in streams)
    quiet_s = since - min(one.arrivals_s[0] for one in streams)
    ended = max(one.arrivals_s[-1] for one in streams)
    busy_s = min(until, ended) - since
    return Measurement(
        "beside",
        ttft_ms=round(long.ttft_ms, 1),
        longest_gap_ms=round(max(gaps, default=0.0) * 1000, 1),
        kept=round((beside / busy_s) / (alone / quiet_s), 3) if busy_s > 0 else None,
        prompt_tokens=long.prompt_tokens,
        cached_tokens=long.cached_tokens or 0,
    )


def told(sample: Measurement) -> str:
    """A sample in one line."""
    if sample.failure is not None:
        return f"{sample.scenario} failed: {sample.failure}"
    figures = [
        f"{sample.ttft_ms:.0f} ms to the first token" if sample.ttft_ms is not None else "",
        f"{sample.tokens_per_s:.0f} tokens/s" if sample.tokens_per_s is not None else "",
        f"longest gap {sample.longest_gap_ms:.0f} ms" if sample.longest_gap_ms is not None else "",
        "" if sample.is_right else f"WRONG TEXT: {sample.said!r}",
    ]
    return f"{sample.scenario}: {', '.join(one for one in figures if one)}"


def num_samples(peer: Peer) -> int:
    """How many a round of this server has when all goes well."""
    return 8 + 2 * (peer.second is not None) + 3 * peer.can_restart
