"""A slot of which some blocks are damaged: the others become runs of their own, as they are.

What is damaged is computed again when it is asked for; what follows depends on the tokens before
it, not on the bytes that were damaged. Belongs to the mlx thread.
"""

from __future__ import annotations

import os

from runtime.kv.ground import Ground
from runtime.kv.hot import Held
from runtime.kv.pack import RunKv
from runtime.kv.prefix import Run, part_of
from runtime.wire import SlotPart
from store.slot_format import Damage, whole_spans
from store.types import SlotHeader


def divide(
    ground: Ground, run: Run, kv: RunKv, header: SlotHeader, damage: Damage
) -> tuple[SlotPart, ...]:
    """Put what is whole of a slot that was read in the place of its run, in memory.

    The server is to make slots of it. Empty where nothing of it is: the run is still there then.
    """
    held, size = ground.hot[run], ground.chain.block_size
    is_divisible = ground.parts.can_divide and not run.media
    spans = whole_spans(header, damage) if is_divisible else []
    if not spans:
        return ()
    has_state = run.has_state and not damage.tensors
    parts = [part_of(run, start, end, size) for start, end in spans]
    ground.forget(run, "damaged")
    told: list[SlotPart] = []
    for part in parts:
        part.has_state = part.has_state and has_state
        share = part.num_tokens / run.num_tokens
        new = Held(
            id=os.urandom(16).hex(),
            is_written=True,
            last_used_s=held.last_used_s,
            hits=held.hits,
            recompute_ms=held.recompute_ms * share,
            ttl_class=held.ttl_class,
            ttl_s=held.ttl_s,
            askers={
                asker: min(end, part.end) for asker, end in held.askers.items() if end > part.start
            },
        )
        ground.hot.add(part, new)
        start, end = part.start - run.start, part.end - run.start
        ground.hot.attach(part, ground.parts.part(kv, start, end, has_state=part.has_state))
        told.append(SlotPart(new.id, part.start, part.end))
    return tuple(told)
