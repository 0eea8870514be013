"""`python -m tests.contract.restarted before|after DIR CASE…`: the two lives of one store.

`before` runs a conversation, keeps it, and goes on from several positions: with the caches that it
still has, and with what it has in memory, which must give the same bytes. `after` is another
process, which has nothing but the files. Both write the logits of every slice and step.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import trim_prompt_cache

from tests.contract.lives import live
from tests.kv_sessions import BLOCK_TOKENS, Session, load
from tests.tiny_models import FAMILIES, write_model

PROMPT_TOKENS, OUTPUT_TOKENS, NEW_TOKENS, SAID_TOKENS = 150, 21, 50, 3
END = PROMPT_TOKENS + OUTPUT_TOKENS
BOUNDARIES = (24, 64, 77, 144)
POSITIONS = (24, 64, 77, 100, PROMPT_TOKENS - 1, 165, END)
"""Inside a block before a window of 32 has wrapped, a block's border after it, inside a block, and
where nobody asked for a state, the same again, inside the last answer, and the next turn, for which
a window has turned token by token."""
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


def in_memory(position: int, *, needs_state: bool) -> int:
    """So much of a prompt that follows what was said up to there is known in memory."""
    if not needs_state:
        return position
    return max(at for at in (*BOUNDARIES, PROMPT_TOKENS - 1, END) if at <= position)


def on_disk(position: int, *, needs_state: bool) -> int:
    """As much of it is on disk: whole blocks, and the end of the conversation."""
    end = END - END % BLOCK_TOKENS
    if position == END or (position > end and not needs_state):
        return position
    border = position - position % BLOCK_TOKENS
    if not needs_state:
        return border
    return max(at - at % BLOCK_TOKENS for at in BOUNDARIES if at - at % BLOCK_TOKENS <= border)


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
    needs_state = session.tiers.needs_state
    cursor = session.cursor(SAID[:PROMPT_TOKENS], boundaries=BOUNDARIES if needs_state else ())
    kv, _ = session.take_up(cursor)
    copies: dict[int, list[Any]] = {}
    for end in sorted({*cursor.boundaries, PROMPT_TOKENS - 1}):
        part = session.cursor(SAID[: end + 1], boundaries=cursor.boundaries)
        session.compute(part, kv, max(copies, default=0))
        copies[end] = model.copy_kv(kv)
    session.answer(cursor, kv, SAID[PROMPT_TOKENS:])
    copies[END] = model.copy_kv(kv)

    def live_at(start: int) -> list[Any]:
        if start in copies:
            return model.copy_kv(copies[start])
        kv = model.copy_kv(copies[END])
        trim_prompt_cache(kv, END - start)
        return kv

    logits: dict[str, mx.array] = {}
    for position in POSITIONS:
        start = in_memory(position, needs_state=needs_state)
        case = go_on(session, position)
        assert (case.use["start"], case.use["tier"]) == (start, "hot")
        check_same(case, go_on(session, position, live_at(start), start))
        start = on_disk(position, needs_state=needs_state)
        logits |= go_on(session, position, live_at(start), start).logits
    mx.save_safetensors(str(folder / "before.safetensors"), logits)
    session.close()
    return {"needs_state": needs_state}


def check_same(one: Case, other: Case) -> None:
    assert one.logits.keys() == other.logits.keys()
    for name, logits in one.logits.items():
        assert mx.array_equal(logits, other.logits[name]), name


def after(folder: Path, family: str) -> dict[str, Any]:
    model = load(folder / "model", CASES[family][1])
    uses: dict[str, Any] = {}
    logits: dict[str, mx.array] = {}
    for position in POSITIONS:
        session = Session(model, folder / "store")
        case = go_on(session, position)
        again = go_on(session, position)
        assert again.use["tier"] == "hot"
        assert again.use["start"] == case.use["start"]
        check_same(case, again)
        uses[str(position)] = case.use
        logits |= case.logits
        session.close()
    mx.save_safetensors(str(folder / "after.safetensors"), logits)
    return {"uses": uses}


if __name__ == "__main__":
    live(before, after)
