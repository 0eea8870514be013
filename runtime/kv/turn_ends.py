"""Where turns end: the server is told what on disk is whose. Belongs to the mlx thread.

A slot is its writer's as soon as it is there. What others wrote, and this conversation goes through
as well, is told apart: by that it stays when they are deleted.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.kv.ground import Ground
from runtime.kv.prefix import Run, path_to
from runtime.kv.trail import Trail
from runtime.wire import TurnEnded

Report = Callable[[TurnEnded], None]


def tell_ended(ground: Ground, run: Run, report: Report) -> None:
    """Whose turns ended in a slot of others, once it is published: it is theirs as well."""
    held = ground.hot[run]
    if held.is_saved and held.ended and not ground.is_apart:
        for asker, ended in held.ended.items():
            held.note(asker, ended.num_tokens)
            report(TurnEnded(asker=asker, slot_id=held.id, **ended._asdict()))
        held.ended.clear()


def tell_reached(ground: Ground, trail: Trail, report: Report) -> None:
    """How much of a turn is on disk while the rest of it is not: a crash would leave so much."""
    path = path_to(trail.leaf, ground.hot.num_saved(trail.leaf, trail.num_kept))
    if not path or ground.is_apart or trail.ttl_s == 0:
        return
    run, end = path[-1]
    held = ground.hot[run]
    if run is not trail.leaf and held.note(trail.asker, end):
        told = TurnEnded(
            asker=trail.asker, slot_id=held.id, num_tokens=end, ttl_s=trail.ttl_s, num_turns=0
        )
        report(told)
