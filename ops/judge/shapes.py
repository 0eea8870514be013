"""Answers that follow schemas, stop strings, and characters that lie across tokens."""

from __future__ import annotations

import asyncio
import json

import jsonschema

from ops.judge.bench import LOST, Bench, beside
from ops.judge.compare import Divergence
from ops.judge.outcome import Outcome
from ops.judge.schemas import Schema, schemas
from ops.judge.server import Said, Server
from ops.judge.texts import WORLD

_AT_ONCE = 4
_SCHEMA_TOKENS = 200
_CUTS = (1, 2, 3, 5, 6)


async def structured(bench: Bench) -> Outcome:
    """Answers are judged by `jsonschema`."""
    outcome = Outcome("JSON schemas")
    gate = asyncio.Semaphore(_AT_ONCE)
    asked = dict(list(schemas().items())[: bench.amount.num_schemas])

    async def answered(name: str, schema: Schema) -> Divergence | None:
        async with gate:
            return judged(name, schema, await bench.calm.chat(_schema_body(name, schema)))

    for one in await asyncio.gather(*(answered(*one) for one in asked.items())):
        outcome.count(one)
    outcome.facts.append(f"{len(asked)} schemas, {_AT_ONCE} requests at a time")
    return outcome


def _schema_body(name: str, schema: Schema) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": f"Give me an example of: {name}."}],
        "max_tokens": _SCHEMA_TOKENS,
        "logprobs": False,
        "top_logprobs": None,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "example", "schema": schema, "strict": True},
        },
    }


def judged(name: str, schema: Schema, answer: Said) -> Divergence | None:
    """None where the answer is whole and follows the schema."""
    if answer.finish != "stop":
        return Divergence(name, f"it ended with {answer.finish}: {answer.text!r}", False)
    try:
        jsonschema.validate(json.loads(answer.text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return Divergence(name, f"{error}: {answer.text!r}", False)
    return None


async def pieces(bench: Bench) -> Outcome:
    """Texts in many scripts are continued: streamed, cut after each of a few tokens, stopped."""
    outcome = Outcome("text across tokens")
    theirs = await asyncio.gather(
        *(bench.reference.complete(text, bench.amount.num_tokens) for text in WORLD.values())
    )
    num_lost = 0
    for (script, text), their in zip(WORLD.items(), theirs, strict=True):
        body: dict[str, object] = {"prompt": text, "max_tokens": bench.amount.num_tokens}
        whole = await bench.calm.complete(body)
        streamed = await bench.calm.complete(body, stream=True)
        outcome.count(beside(f"{script}, whole", whole, their))
        outcome.count(_equal(f"{script}, streamed", streamed.text, whole.text))
        outcome.count(_losses(f"{script}, pieces", streamed, whole))
        num_lost += whole.text.count(LOST)
        if whole.text not in (their.text, f" {their.text}"):
            continue  # another text has other tokens: it was told above
        for cut in _CUTS:
            answer = await bench.calm.complete({**body, "max_tokens": cut}, stream=cut % 2 == 0)
            expected = their.cuts[min(cut, len(their.cuts) - 1)]
            outcome.count(_equal(f"{script}, {cut} tokens", answer.text, expected))
        await _stops(outcome, bench.calm, script, body, whole.text)
    outcome.facts.append(
        f"{len(WORLD)} texts; the {num_lost} characters U+FFFD in them are mlx_lm's as well: an "
        "answer was cut inside of a character"
    )
    return outcome


async def _stops(
    outcome: Outcome, server: Server, script: str, body: dict[str, object], text: str
) -> None:
    for stop in stops_of(text):
        expected = text[: text.index(stop)]
        for is_streamed in (False, True):
            answer = await server.complete({**body, "stop": [stop]}, stream=is_streamed)
            where = f"{script}, stopped by {stop!r}, streamed: {is_streamed}"
            outcome.count(_equal(where, answer.text, expected))


def stops_of(text: str) -> list[str]:
    """A character in the middle of the text, and three in its last third; none that is broken."""
    whole = text.rstrip(LOST)
    if len(whole) < 6:
        return []
    middle, late = len(whole) // 2, len(whole) * 2 // 3
    return [whole[middle], whole[late : late + 3]]


def _equal(where: str, found: str, expected: str) -> Divergence | None:
    cut, whole = found.rstrip(LOST), expected.rstrip(LOST)
    is_cut = found != cut and expected != whole and cut in (whole, f" {whole}")
    if found in (expected, f" {expected}") or is_cut:
        return None
    return Divergence(where, f"{found!r} and not {expected!r}", False)


def _losses(where: str, streamed: Said, whole: Said) -> Divergence | None:
    """A piece of a stream has no broken character that the whole has not."""
    found, expected = sum(one.count(LOST) for one in streamed.pieces), whole.text.count(LOST)
    return None if found == expected else Divergence(where, f"{found} U+FFFD, {expected}", False)
