"""What is known of a model at one moment, for everybody who asks.

Of its sight that is what its files promise, until it was loaded and tried.
"""

from __future__ import annotations

from typing import Literal

from runtime.models.vision_files import BLIND_TYPES, SEEING_TYPES
from runtime.supervisor.lifecycle import HELD_BACK, LOADED, ModelState
from runtime.supervisor.model import ModelActor
from runtime.supervisor.swap_cost import SwapCost
from runtime.types import CAPABILITIES, ModelSpec, Struct, TemplateForms, ToolUse
from store.types import ModelRow


class VisionCapability(Struct, frozen=True):
    """Whether a model can be shown images. `why` it cannot is empty where it was never to."""

    can_see: Literal["yes", "no", "untried"] = "no"
    why: str = ""


def vision_capability_of(spec: ModelSpec, blindness: str | None) -> VisionCapability:
    """`blindness` is what was found when it was loaded: nothing against it, or None if never."""
    if not spec.sees:
        return VisionCapability(why=BLIND_TYPES.get(spec.model_type, ""))
    if blindness:
        return VisionCapability(why=blindness)
    is_known = blindness is not None or spec.model_type in SEEING_TYPES
    return VisionCapability("yes" if is_known else "untried")


def vision_fault(spec: ModelSpec, actor: ModelActor, row: ModelRow | None) -> str | None:
    """What was found when just these files were loaded, by this server or as a former one left it.

    None where nothing is known.
    """
    for worker in (actor.worker, actor.last_worker):
        if worker is not None and worker.ready is not None and _files(worker.spec) == _files(spec):
            return worker.ready.blindness
    if row is None or row.weights_bytes != spec.nbytes or row.last_used_s < spec.created_s:
        return None
    return row.blindness


def _template_forms(spec: ModelSpec, actor: ModelActor) -> TemplateForms | None:
    """What was found of its template when just these files were loaded."""
    if "chat" not in spec.capabilities:
        return None
    for worker in (actor.worker, actor.last_worker):
        if worker is not None and worker.ready is not None and _files(worker.spec) == _files(spec):
            return worker.ready.template
    return None


def _files(spec: ModelSpec) -> tuple[str, int, int, bool, str]:
    return spec.path, spec.nbytes, spec.created_s, spec.is_vision, spec.chat_template


class ModelStatus(Struct, frozen=True):
    """What is known of one model. Counts are since the server started, times in seconds from now.

    Requests are counted that ask this very name, and it is pinned or not; all else is the
    process's, which other names of the same weights may share: `with_names`. `expires_in_s` is
    when it is unloaded unless it is used, `retry_in_s` when it is tried again after it failed.
    `has_changed_files`: what is loaded is not what lies on disk.
    """

    spec: ModelSpec
    state: ModelState
    sight: VisionCapability = VisionCapability()
    tool_use: ToolUse = "no"
    template: TemplateForms | None = None
    num_running: int = 0
    num_waiting: int = 0
    pid: int | None = None
    num_starts: int = 0
    num_crashes: int = 0
    last_error: str | None = None
    load_ms: float | None = None
    load_fraction: float | None = None
    reserved_bytes: int = 0
    is_pinned: bool = False
    since_s: float | None = None
    expires_in_s: float | None = None
    retry_in_s: float | None = None
    has_changed_files: bool = False
    unreturned_bytes: int = 0
    """Memory that its ended processes held and that did not come back."""
    swap_cost: SwapCost | None = None
    """What it took lately to have it leave and to have it back."""
    entered: tuple[tuple[ModelState, int], ...] = ()
    """How often it came into each state."""

    @property
    def is_loaded(self) -> bool:
        """A request need not wait for it to be loaded."""
        return self.state in LOADED

    @property
    def with_names(self) -> tuple[str, ...]:
        """The other names that its process serves."""
        return tuple(name for name in self.spec.names if name != self.spec.id)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What it can do, as far as is known."""
        promised = set(self.spec.capabilities)
        if self.sight.can_see == "no":
            promised.discard("vision")
        if self.tool_use != "no":
            promised.add("tools")
        return tuple(one for one in CAPABILITIES if one in promised)


def without_use(status: ModelStatus) -> ModelStatus:
    """The status without what tells how much others use the model, and when."""
    return ModelStatus(
        spec=status.spec,
        state="ready" if status.state == "busy" else status.state,
        sight=status.sight,
        tool_use=status.tool_use,
        template=status.template,
        last_error=status.last_error,
        load_fraction=status.load_fraction,
        is_pinned=status.is_pinned,
    )


def status_of(
    spec: ModelSpec, actor: ModelActor, num_waiting: int, now_s: float, row: ModelRow | None
) -> ModelStatus:
    """The actor's state in words and figures; `row` is what former runs showed."""
    worker = actor.worker
    ready = worker.ready if worker is not None else None
    expires_s = actor.expires_s
    template = _template_forms(spec, actor)
    return ModelStatus(
        spec=spec,
        state=actor.state,
        sight=vision_capability_of(spec, vision_fault(spec, actor, row)),
        tool_use=template.tools if template is not None else spec.tool_use,
        template=template,
        num_running=actor.num_running(spec.id),
        num_waiting=num_waiting,
        pid=worker.pid if worker is not None else None,
        num_starts=actor.num_starts,
        num_crashes=actor.num_crashes,
        last_error=actor.last_error.message if actor.last_error is not None else None,
        load_ms=ready.load_ms if ready is not None else None,
        load_fraction=worker.load_fraction if worker is not None else None,
        reserved_bytes=actor.reserved_bytes,
        is_pinned=spec.id in actor.pinned,
        since_s=now_s - actor.since_s if actor.since_s else None,
        expires_in_s=max(0.0, expires_s - now_s) if expires_s is not None else None,
        retry_in_s=max(0.0, actor.due_s - now_s) if actor.state in HELD_BACK else None,
        has_changed_files=actor.stage != "away" and actor.has_changed_files(),
    )
