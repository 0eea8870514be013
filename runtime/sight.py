"""What is said of a model's sight: what its files promise, until it was loaded and tried."""

from __future__ import annotations

from typing import Literal

from runtime.model_actor import ModelActor
from runtime.types import ModelSpec, Struct
from runtime.vision_files import BLIND_TYPES, SEEING_TYPES
from store.types import ModelRow


class Sight(Struct, frozen=True):
    """Whether a model can be shown images. `why` it cannot is empty where it was never to."""

    can_see: Literal["yes", "no", "untried"] = "no"
    why: str = ""


def sight_of(spec: ModelSpec, blindness: str | None) -> Sight:
    """`blindness` is what was found when it was loaded: nothing against it, or None if never."""
    if not spec.sees:
        return Sight(why=BLIND_TYPES.get(spec.model_type, ""))
    if blindness:
        return Sight(why=blindness)
    is_known = blindness is not None or spec.model_type in SEEING_TYPES
    return Sight("yes" if is_known else "untried")


def found_blindness(spec: ModelSpec, actor: ModelActor, row: ModelRow | None) -> str | None:
    """What was found when just these files were loaded, by this server or as a former one left it.

    None where nothing is known.
    """
    for worker in (actor.worker, actor.last_worker):
        if worker is not None and worker.ready is not None and _files(worker.spec) == _files(spec):
            return worker.ready.blindness
    if row is None or row.weights_bytes != spec.nbytes or row.last_used_s < spec.created_s:
        return None
    return row.blindness


def _files(spec: ModelSpec) -> tuple[str, int, int, bool]:
    return spec.path, spec.nbytes, spec.created_s, spec.is_vision
