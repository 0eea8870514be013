"""`python -m tests.contract.restarted before|after DIR CASE…`: the two lives of one store.

`before` runs a conversation, keeps it on disk, and goes on from several positions with the caches
that it still has. `after` is another process, which has nothing but the files. Both write the
logits of every slice and step.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import trim_prompt_cache

from runtime.slot_events import KnownSlot
from tests.contract.lives import live
from tests.kv_sessions import Session, load
from tests.tiny_models import FAMILIES, write_model

PROMPT_TOKENS, OUTPUT_TOKENS, NEW_TOKENS, SAID_TOKENS = 150, 21, 50, 3
END = PROMPT_TOKENS + OUTPUT_TOKENS
BOUNDARIES = (24, 64, 77)
POSITIONS = (*BOUNDARIES, PROMPT_TOKENS - 1, END)
"""Inside a block before a window of 32 has wrapped, a block's border after it, inside a block, the
same prompt again, and the next turn, for which a window has turned token by token."""
BETWEEN = 100
CASES: dict[str, tuple[str, int | None]] = {
    **{family: (family, None) for family in FAMILIES},
    "qwen3 in 4 bits": ("qwen3", 4),
    "qwen3 in 8 bits": ("qwen3", 8),
    "gemma3_text in 8 bits": ("gemma3_text", 8),
}
"""Each family's model with the KV that it has, and some with quantised KV."""


def ids(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(10, 400), k=num_tokens)


SAID = ids(0, END)


def prompt_from(position: int) -> list[int]:
    """A prompt that follows what was said up to this position and no further."""
    new = ids(position, NEW_TOKENS)
    if position < END:
        new[0] = (SAID[position] + 1) % 400
    return [*SAID[:position], *new]


class Case(NamedTuple):
    """Going on from one position: what was taken up, and the logits by name."""

    use: dict[str, Any]
    logits: dict[str, mx.array]


def go_on(session: Session, position: int, kv: list[Any] | None = None, start: int = 0) -> Case:
    """Continue from the live caches given, which stand at `start`, or from what is restored."""
    cursor = session.cursor(prompt_from(position))
    if kv is None:
        kv, start = session.take_up(cursor)
    computed = session.compute(cursor, kv, start, keeps=False)
    logits = {f"{position}.{end}": one for end, one in computed.items()}
    for number, token_id in enumerate([cursor.token_ids[-1], *ids(9, SAID_TOKENS)]):
        logits[f"{position}.said.{number}"] = session.forward([token_id], kv)
    return Case(msgspec.to_builtins(cursor.use) | {"start": start}, logits)


def before(folder: Path, family: str) -> dict[str, Any]:
    name, bits = CASES[family]
    changes = {"head_dim": 64} if bits else {}
    model = load(write_model(folder / "model", name, **changes), bits)
    session = Session(model, folder / "store")
    copies: dict[int, list[Any]] = {}
    needs_state = session.tiers.needs_state
    cursor = session.cursor(SAID[:PROMPT_TOKENS], boundaries=BOUNDARIES if needs_state else ())
    kv, _ = session.take_up(cursor)
    for end in (*BOUNDARIES, PROMPT_TOKENS - 1):
        part = session.cursor(SAID[: end + 1], boundaries=cursor.boundaries)
        session.compute(part, kv, max(copies, default=0))
        copies[end] = model.copy_kv(kv)
    session.answer(cursor, kv, SAID[PROMPT_TOKENS:])
    copies[END] = model.copy_kv(kv)
    logits: dict[str, mx.array] = {}
    last = model.copy_kv(copies[BOUNDARIES[-1]])
    for position in POSITIONS:
        logits |= go_on(session, position, copies[position], position).logits
    if needs_state:
        logits |= go_on(session, BETWEEN, last, BOUNDARIES[-1]).logits
    else:
        trim_prompt_cache(kv, END - BETWEEN)
        logits |= go_on(session, BETWEEN, kv, BETWEEN).logits
    mx.save_safetensors(str(folder / "before.safetensors"), logits)
    known = session.publish()
    (folder / "slots.json").write_bytes(msgspec.json.encode(known))
    return {"needs_state": needs_state}


def after(folder: Path, family: str) -> dict[str, Any]:
    model = load(folder / "model", CASES[family][1])
    known = msgspec.json.decode((folder / "slots.json").read_bytes(), type=list[KnownSlot])
    uses: dict[str, Any] = {}
    logits: dict[str, mx.array] = {}
    for position in (*POSITIONS, BETWEEN):
        session = Session(model, folder / "store")
        session.tiers.learn(known)
        case = go_on(session, position)
        again = go_on(session, position)
        assert again.use["tier"] == "hot"
        assert again.use["start"] == case.use["start"]
        for name, one in case.logits.items():
            assert mx.array_equal(one, again.logits[name]), f"hot is not warm: {name}"
        uses[str(position)] = case.use
        logits |= case.logits
    mx.save_safetensors(str(folder / "after.safetensors"), logits)
    return {"uses": uses}


if __name__ == "__main__":
    live(before, after)
