"""Runs become other runs, as their slots do, with what of them is in memory.

A chain of slots became fewer ones, or some blocks of a slot are damaged: these are computed again
when they are asked for, and what follows depends on the tokens before it, not on the bytes that
were damaged. Belongs to the mlx thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from runtime.kv.media import rope_delta
from runtime.kv.pack import RunKv
from runtime.kv.prefix_tree import Run, part_of, path_to
from runtime.kv.state import TierState
from runtime.slot_events import SlotPart
from store.slot_file import Damage, whole_spans
from store.types import SlotHeader

Part = tuple[Run, int]
"""A run of the old chain, and the position at which the chain leaves it."""


def take_over(tier_state: TierState, old: Sequence[Run], new: Run) -> None:
    """Give `new`, which is known already, what the runs that it stands for have.

    Their tokens, their KV if all of it is in memory, who used them, and what hangs on them.
    """
    last = next((one for one in old if (one.end, one.end_hash) == (new.end, new.end_hash)), None)
    if last is None and len(old) == 1 and old[0].start < new.end < old[0].end:
        last = old[0]  # it was cut: what is after the end is to be forgotten
    parts = [part for part in path_to(last, new.end) if part[0] in old and part[0].end > new.start]
    if not parts or parts[0][0].start != new.start:
        return
    hot = tier_state.hot
    if new.token_ids is None and all(run.token_ids is not None for run, _ in parts):
        new.token_ids = array("I", (one for part in parts for one in _tokens(*part)))
        spans = (span for run, leave in parts for span in run.media if span.start < leave)
        new.media = tuple(dict.fromkeys(spans))
        gone = [span for span in parts[-1][0].media if span.end > new.end]
        new.rope_delta = parts[-1][0].rope_delta - rope_delta(gone, parts[-1][0].end)
    for run, leave in parts:
        for asker, end in hot[run].askers.items():
            hot[new].used_by(asker, min(end, leave))
        for child in [one for one in run.children if one not in old and one.start <= leave]:
            hot.tree.move(child, new)
    found = [(_left_at(hot[run].kv, run, leave, new), leave - run.start) for run, leave in parts]
    pieces = [(kv, count) for kv, count in found if kv is not None]
    has_all = len(pieces) == len(parts) and new.token_ids is not None
    if has_all and new.has_state == (pieces[-1][0].state is not None):
        hot.attach(new, tier_state.parts.joined(pieces))


def _left_at(kv: RunKv | None, run: Run, leave: int, new: Run) -> RunKv | None:
    """The state at its end is not that of where it is left, or is not kept any more."""
    is_kept = leave == run.end and (new.has_state or leave != new.end)
    return kv if kv is None or is_kept else kv._replace(state=None)


def _tokens(run: Run, leave: int) -> Sequence[int]:
    return run.token_ids[: leave - run.start] if run.token_ids is not None else ()


def divide(
    tier_state: TierState, run: Run, kv: RunKv, header: SlotHeader, damage: Damage
) -> tuple[SlotPart, ...]:
    """Put what is whole of a slot that was read in the place of its run, in memory.

    The server is to make slots of it. Empty where nothing of it is: the run is still there then.
    """
    held, size = tier_state.hot[run], tier_state.chain.block_size
    is_divisible = tier_state.parts.can_divide and not run.media
    spans = whole_spans(header, damage) if is_divisible else []
    if not spans:
        return ()
    has_state = run.has_state and not damage.tensors
    parts = [part_of(run, start, end, size) for start, end in spans]
    tier_state.forget(run, "damaged")
    told: list[SlotPart] = []
    for part in parts:
        part.has_state = part.has_state and has_state
        new = held.part(part.num_tokens / run.num_tokens)
        new.is_written = True
        new.askers = {
            one: min(end, part.end) for one, end in new.askers.items() if end > part.start
        }
        tier_state.hot.add(part, new)
        start, end = part.start - run.start, part.end - run.start
        tier_state.hot.attach(part, tier_state.parts.part(kv, start, end, has_state=part.has_state))
        told.append(SlotPart(new.id, part.start, part.end))
    return tuple(told)
