"""What a name means: which model, which process serves it, and whether that is to stay for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from runtime.errors import ModelDownloading, ModelNotDownloaded, UnknownModel
from runtime.models.catalog import Catalog
from runtime.supervisor.model import ModelActor
from runtime.supervisor.scheduler import RequestScheduler
from runtime.types import ModelSpec


class Names:
    """Belongs to the event loop. `pinned` are the names that are to stay loaded."""

    def __init__(
        self, catalog: Catalog, scheduler: RequestScheduler, pinned: Iterable[str]
    ) -> None:
        self._catalog = catalog
        self._scheduler = scheduler
        self._pinned = set(pinned)
        self._coming: set[str] = set()
        """What is to be loaded once it is downloaded."""
        self._known: dict[str, ModelSpec] = {}
        """What was named last, by name."""
        for spec in catalog.models():
            self._note(spec)

    def all(self) -> list[ModelSpec]:
        """Every model that can be named, in the catalog's order, then what else is loaded."""
        specs = {spec.id: spec for spec in self._catalog.models()}
        for spec in self._known.values():
            if self._scheduler.actor(spec.engine).stage != "away":
                specs.setdefault(spec.id, spec)
        return list(specs.values())

    def await_arrivals(self, names: Iterable[str], load: Callable[[ModelSpec], None]) -> None:
        """Begin with downloads, and have loaded what of these names was not here at boot.

        Raises UnknownModel.
        """
        for name in names:
            self._coming_or_here(name)

        def on_arrival(_: str) -> None:
            self._catalog.refresh()
            waiting, self._coming = self._coming, set()
            for spec in filter(None, map(self._coming_or_here, waiting)):
                load(spec)

        if self._catalog.arrivals is not None:
            self._catalog.arrivals.start(on_arrival)

    async def stop(self) -> None:
        """End all downloads."""
        if self._catalog.arrivals is not None:
            await self._catalog.arrivals.stop()

    def _coming_or_here(self, name: str) -> ModelSpec | None:
        """None for one that is loaded once it comes. Raises UnknownModel."""
        try:
            return self.resolve(name)
        except (ModelDownloading, ModelNotDownloaded):
            self._coming.add(name)
            return None

    def of(self, engine: str) -> tuple[str, ...]:
        """All names that the process serves that goes by this one."""
        known = self._known.get(engine)
        return known.names if known is not None else (engine,)

    def actor(self, name: str) -> ModelActor:
        """The actor of the process that serves a name."""
        spec = self._known.get(name)
        return self._scheduler.actor(spec.engine if spec is not None else name)

    def resolve(self, name: str) -> ModelSpec:
        """The catalog's word; what is loaded can be named even when it is gone from the disk.

        Raises as `Catalog.want`.
        """
        try:
            spec = self._catalog.want(name)
        except UnknownModel:
            for known in self._known.values():
                is_meant = name in (known.id, *known.aliases)
                if is_meant and self._scheduler.actor(known.engine).stage == "ready":
                    return known
            raise
        self._note(spec)
        return spec

    def pin(self, spec: ModelSpec, *, is_pinned: bool) -> None:
        """Have a model stay once it is loaded; or no longer for the sake of this name."""
        (self._pinned.add if is_pinned else self._pinned.discard)(spec.id)
        self._note(spec)

    def _note(self, spec: ModelSpec) -> None:
        before = self._known.get(spec.id)
        if before is not None and before.engine != spec.engine:
            self._scheduler.actor(before.engine).pinned.discard(spec.id)
        self._known[spec.id] = spec
        pinned = self._scheduler.actor(spec.engine).pinned
        (pinned.add if spec.id in self._pinned else pinned.discard)(spec.id)
