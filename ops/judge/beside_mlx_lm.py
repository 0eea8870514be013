"""Greedy text and perplexity beside mlx_lm's."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from ops.judge.bench import Bench, beside
from ops.judge.compare import Divergence, noise
from ops.judge.outcome import Outcome
from ops.judge.reference import Continued
from ops.judge.server import Said
from ops.judge.texts import Prompt, prompts

_AT_ONCE = 4
PERPLEXITY = 1e-3
_SCORED = (("prose", 10), ("code", 15), ("scripts", 20), ("prose", 3))
"""Texts, each a part of the longest prompt in length."""


async def greedy_texts(bench: Bench) -> Outcome:
    """Every second prompt is asked alone, the others four at a time."""
    outcome = Outcome("greedy text")
    asked = prompts(bench.material, bench.amount.num_prompts, bench.amount.longest)
    theirs = asyncio.create_task(_theirs(bench, asked))
    alone = {number: await _ours(bench, asked[number]) for number in range(0, len(asked), 2)}
    gate = asyncio.Semaphore(_AT_ONCE)
    together = range(1, len(asked), 2)
    answers = await asyncio.gather(*(_ours(bench, asked[number], gate) for number in together))
    ours = alone | dict(zip(together, answers, strict=True))
    most, num_tokens = 0.0, 0
    for number, (prompt, their) in enumerate(zip(asked, await theirs, strict=True)):
        where = f"prompt {number + 1} ({prompt.kind}, {ours[number].num_prompt} tokens)"
        if ours[number].num_prompt != their.num_prompt:
            told = f"{ours[number].num_prompt} and {their.num_prompt} tokens in the prompt"
            outcome.count(Divergence(where, told, False))
            continue
        outcome.count(beside(where, ours[number], their))
        most = max(most, noise(ours[number].tokens, their.tokens))
        num_tokens += len(their.tokens)
    told = [ours[number].num_prompt for number in range(len(asked))]
    of_all = f"{len(asked)} prompts of {min(told)} to {max(told)} tokens ({sum(told):,} in all)"
    turns = f"half of them one by one and half {_AT_ONCE} at a time"
    outcome.facts.append(f"{of_all}, {turns}, {num_tokens:,} tokens written")
    outcome.facts.append(f"log probabilities of equal tokens differ by {most:.1e} at most")
    return outcome


async def _ours(bench: Bench, prompt: Prompt, gate: asyncio.Semaphore | None = None) -> Said:
    async with gate or asyncio.Semaphore(1):
        most = {"max_tokens": bench.amount.num_tokens}
        if prompt.messages:
            return await bench.calm.chat({**most, "messages": prompt.messages})
        return await bench.calm.complete({**most, "prompt": prompt.text})


async def _theirs(bench: Bench, asked: Sequence[Prompt]) -> list[Continued]:
    most = bench.amount.num_tokens
    return [
        await bench.reference.answer(one.messages, most)
        if one.messages
        else await bench.reference.complete(one.text, most)
        for one in asked
    ]


async def perplexities(bench: Bench) -> Outcome:
    """Texts are scored as prompts that are echoed."""
    outcome = Outcome("perplexity", table=[["text", "tokens", "Hearth", "mlx_lm", "apart by"]])
    for number, (kind, part) in enumerate(_SCORED):
        text = bench.material.piece(kind, bench.amount.longest // part, number + 50)
        body = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 0}
        answer, theirs = await asyncio.gather(
            bench.calm.complete(body), bench.reference.score(text)
        )
        ours = [one.logprob for one in answer.tokens]
        found, expected = perplexity(ours), perplexity(theirs)
        apart = abs(found / expected - 1)
        row = (kind, str(len(ours) + 1), f"{found:.6f}", f"{expected:.6f}", f"{apart:.1e}")
        outcome.table.append(list(row))
        is_equal = len(ours) == len(theirs) and apart < PERPLEXITY
        told = f"{found:.6f} and {expected:.6f} of {len(ours)} and {len(theirs)} tokens"
        outcome.count(None if is_equal else Divergence(f"text {number + 1}", told, False))
    return outcome


def perplexity(logprobs: Sequence[float]) -> float:
    """The exponent of what a token costs on average."""
    return math.exp(-sum(logprobs) / len(logprobs))
