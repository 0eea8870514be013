"""What agents send, made from a seed in the shape that was published of real ones.

ops/bench/METHODOLOGY.md names the sources of these figures, and says which are assumed.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist, median
from typing import NamedTuple

import msgspec

from api.bench.texts import BenchMessage, chooser, prose

MEDIAN_TURNS = 43
MEAN_TURNS = 80.2
MEDIAN_TOKENS_IN = 142_000
MEDIAN_TOKENS_OUT, MEAN_TOKENS_OUT = 444, 523
SUB_AGENT_SHARE = 0.44
PAUSES_S = ((0.0, 0.1), (0.8646, 1.0), (0.9512, 10.0), (1.0, 120.0))
"""Shares of turns, and the seconds within which so many were followed by the next one."""

SHARED_TOKENS = 20_000
"""Assumed: system prompt and tools, the same for every agent and sub-agent."""
SUB_AGENTS, MOST_SUB_AGENTS = 2, 6
SUB_AGENT_TURNS = 10 / MEDIAN_TURNS
"""Assumed: median over sessions that have any, most of one, median of a sub-agent's turns."""
_TURNS_SIGMA = math.sqrt(2 * math.log(MEAN_TURNS / MEDIAN_TURNS))
_OUT_SIGMA = math.sqrt(2 * math.log(MEAN_TOKENS_OUT / MEDIAN_TOKENS_OUT))
"""Of a lognormal distribution with that median and mean."""
_RESULT_SIGMA, _SUB_SIGMA = 1.2, 0.6
_HALVINGS = 24

_LEAST_TURNS, _LEAST_TOKENS_OUT, _LEAST_RESULT = 2, 4, 8
_RECALL_TOKENS = 32
"""Room for an answer that can be checked, in an agent's last turn."""
_SEEDS_APART = 1_000_003


class Shape(msgspec.Struct, frozen=True):
    """What of the published traffic is made: `scale` is of tokens, `pause_scale` of pauses."""

    seed: int
    num_sessions: int
    median_turns: int
    scale: float
    pause_scale: float


class AgentTurn(msgspec.Struct, frozen=True):
    """A tool's result that comes in, the longest answer, and how long the next tool runs."""

    num_new_tokens: int
    max_tokens: int
    pause_s: float


class AgentScript(msgspec.Struct, frozen=True):
    """One agent. After turn `fans_out_after` it waits until its sub-agents have ended."""

    name: str
    number: int
    turns: tuple[AgentTurn, ...]
    fans_out_after: int = 0
    children: tuple[AgentScript, ...] = ()

    def family(self) -> Iterator[AgentScript]:
        """It, and its sub-agents."""
        yield self
        yield from self.children

    def num_tokens(self, scale: float) -> int:
        """Of the longest prompt, if all answers are as long as they may be."""
        answers = sum(turn.max_tokens for turn in self.turns[:-1])
        return _scaled(SHARED_TOKENS, scale) + answers + sum(t.num_new_tokens for t in self.turns)


class TrafficFacts(msgspec.Struct):
    """What a reader should know of the traffic that was made. Tokens are those aimed at."""

    num_sessions: int
    num_sub_agents: int
    num_turns: int
    num_sub_agent_turns: int
    share_with_sub_agents: float
    median_turns: float
    median_tokens_in: int
    median_tokens_out: int
    longest_tokens: int
    new_share: float
    """Tokens that no earlier prompt of the same agent held, of all that are sent."""
    pauses_s: float
    """Sum of all pauses, as they are replayed."""


Quantile = Callable[[float], float]


def traffic(shape: Shape) -> tuple[AgentScript, ...]:
    """All sessions, in the order in which they begin.

    Prompts grow by as much as makes the median of all turns what was published.
    """
    wanted = MEDIAN_TOKENS_IN * shape.scale
    low, high = 0.0, 8 * wanted
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _median_in(_grown(shape, middle), shape) < wanted:
            low = middle
        else:
            high = middle
    return _grown(shape, high)


def _grown(shape: Shape, growth: float) -> tuple[AgentScript, ...]:
    """The same sessions with prompts that grow by so many tokens until a median session's end."""
    choose = chooser(shape.seed)
    counts = [_turns_of(x, shape) for x in spread(shape.num_sessions, _turns_quantile, choose)]
    families = _families(counts, shape, choose)
    total = sum(counts) + sum(sum(children) for children in families)
    dealt = _Dealt(
        iter(spread(total, lognormal(MEDIAN_TOKENS_OUT * shape.scale, _OUT_SIGMA), choose)),
        iter(spread(total, lognormal(1.0, _RESULT_SIGMA), choose)),
        iter(spread(total, pause_quantile, choose)),
    )
    sessions: list[AgentScript] = []
    number = 0
    for index, (count, children) in enumerate(zip(counts, families, strict=True), 1):
        subs = tuple(
            AgentScript(f"{index}.{nth}", number + nth, dealt.turns(turns, growth, shape))
            for nth, turns in enumerate(children, 1)
        )
        after = min(count - 1, max(1, round(count * (0.25 + choose.random() / 2)))) if subs else 0
        turns = dealt.turns(count, growth, shape)
        sessions.append(AgentScript(str(index), number, turns, after, subs))
        number += 1 + len(subs)
    return tuple(sessions)


def spread(count: int, quantile: Quantile, choose: random.Random) -> list[float]:
    """So many values in equal steps of a distribution, shuffled: few keep its shape as well."""
    values = [quantile((number + 0.5) / count) for number in range(count)]
    choose.shuffle(values)
    return values


def lognormal(middle: float, sigma: float) -> Quantile:
    """The quantiles of the lognormal distribution with that median."""
    normal = NormalDist()
    return lambda share: middle * math.exp(sigma * normal.inv_cdf(share))


def pause_quantile(share: float) -> float:
    """Seconds of a pause: straight lines between the published points, over the logarithm."""
    for (low, shortest), (high, longest) in itertools.pairwise(PAUSES_S):
        if share <= high:
            return shortest * (longest / shortest) ** ((share - low) / (high - low))
    raise ValueError(f"{share} is no share")


_turns_quantile = lognormal(1.0, _TURNS_SIGMA)


def _turns_of(times_median: float, shape: Shape) -> int:
    return max(_LEAST_TURNS, round(shape.median_turns * times_median))


def _families(counts: Sequence[int], shape: Shape, choose: random.Random) -> list[list[int]]:
    """The sub-agents of each session, as numbers of turns."""
    with_some = set(choose.sample(range(len(counts)), round(SUB_AGENT_SHARE * len(counts))))
    widths = iter(spread(len(with_some), lognormal(SUB_AGENTS, _SUB_SIGMA), choose))
    sizes = [
        min(MOST_SUB_AGENTS, max(1, round(next(widths)))) if index in with_some else 0
        for index in range(len(counts))
    ]
    turns = iter(spread(sum(sizes), lognormal(SUB_AGENT_TURNS, _SUB_SIGMA), choose))
    return [[_turns_of(next(turns), shape) for _ in range(size)] for size in sizes]


class _Dealt(NamedTuple):
    """The values of all turns, dealt out agent by agent."""

    answers: Iterator[float]
    weights: Iterator[float]
    pauses: Iterator[float]

    def turns(self, count: int, growth: float, shape: Shape) -> tuple[AgentTurn, ...]:
        """Of an agent whose prompts grow by the same in all, whatever it answers itself."""
        answers = [max(_LEAST_TOKENS_OUT, round(next(self.answers))) for _ in range(count)]
        answers[-1] = max(answers[-1], _RECALL_TOKENS)
        weights = [next(self.weights) for _ in range(count)]
        pauses = [next(self.pauses) * shape.pause_scale for _ in range(count)]
        results = growth * min(1.0, count / shape.median_turns) - sum(answers[:-1])
        return tuple(
            AgentTurn(max(_LEAST_RESULT, round(results * weight / sum(weights))), answer, pause)
            for answer, weight, pause in zip(answers, weights, pauses, strict=True)
        )


def facts(shape: Shape, sessions: Sequence[AgentScript]) -> TrafficFacts:
    """What was made, in figures."""
    agents = [one for session in sessions for one in session.family()]
    sent = _all_in(sessions, shape)
    turns = [turn for one in agents for turn in one.turns]
    children = [child for session in sessions for child in session.children]
    new = sum(one.num_tokens(shape.scale) - _scaled(SHARED_TOKENS, shape.scale) for one in agents)
    return TrafficFacts(
        num_sessions=len(sessions),
        num_sub_agents=len(children),
        num_turns=len(turns),
        num_sub_agent_turns=sum(len(child.turns) for child in children),
        share_with_sub_agents=round(sum(bool(one.children) for one in sessions) / len(sessions), 3),
        median_turns=median(len(one.turns) for one in sessions),
        median_tokens_in=round(median(sent)),
        median_tokens_out=round(median(turn.max_tokens for turn in turns)),
        longest_tokens=max(one.num_tokens(shape.scale) for one in agents),
        new_share=round(new / sum(sent), 4),
        pauses_s=round(sum(turn.pause_s for turn in turns), 1),
    )


def _median_in(sessions: Sequence[AgentScript], shape: Shape) -> float:
    return median(_all_in(sessions, shape))


def _all_in(sessions: Sequence[AgentScript], shape: Shape) -> list[int]:
    """The length of every prompt."""
    agents = (one for session in sessions for one in session.family())
    return [tokens for one in agents for tokens in _tokens_in(one, shape.scale)]


def _tokens_in(script: AgentScript, scale: float) -> Iterator[int]:
    tokens = _scaled(SHARED_TOKENS, scale)
    for turn in script.turns:
        tokens += turn.num_new_tokens
        yield tokens
        tokens += turn.max_tokens


def _scaled(num_tokens: int, scale: float) -> int:
    return round(num_tokens * scale)


class Texts:
    """The words of the traffic: the same for the same seed and length, in whatever order."""

    def __init__(self, shape: Shape, characters_per_token: float) -> None:
        self._shape = shape
        self._per_token = characters_per_token
        self.system = BenchMessage(
            "system",
            "You are a helpful assistant with tools.\n\n"
            + self._prose(shape.seed, _scaled(SHARED_TOKENS, shape.scale)),
        )

    def door(self, script: AgentScript) -> str:
        """A number that this agent's first message tells, and its last one asks for."""
        return str(chooser(self._seed(script, -1)).randint(1000, 9999))

    def message(self, script: AgentScript, number: int) -> BenchMessage:
        """What comes in before turn `number`, counted from 0."""
        tokens = script.turns[number].num_new_tokens
        text = self._prose(self._seed(script, number), tokens)
        parts = [text if number else f"The door number is {self.door(script)}.\n\n{text}"]
        if number:
            parts.insert(0, "Tool result:")
        if number == len(script.turns) - 1:
            parts.append("What is the door number?")
        return BenchMessage("user", "\n\n".join(parts))

    def _seed(self, script: AgentScript, number: int) -> int:
        return (self._shape.seed * _SEEDS_APART + script.number + 1) * _SEEDS_APART + number

    def _prose(self, seed: int, num_tokens: int) -> str:
        return prose(chooser(seed), int(num_tokens * self._per_token))
