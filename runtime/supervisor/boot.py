"""What is loaded when the server starts, and how that went."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

from runtime.config.settings import Settings
from runtime.models.catalog import Catalog
from runtime.types import ModelSpec

Tried = Awaitable[str]


def names_at_boot(settings: Settings, catalog: Catalog) -> list[str]:
    """What is to be loaded, here or not yet: `preload`, else the default model, and pinned ones."""
    pinned = {name for name, one in settings.named_models.items() if one.pinned}
    names = [catalog.default_name] if settings.preload is None else [*settings.preload]
    names += [spec.id for spec in catalog.models() if spec.id in pinned]
    return names + sorted(filter(catalog.may_come, pinned))


def models_at_boot(names: Iterable[str], catalog: Catalog) -> tuple[ModelSpec, ...]:
    """Those of them that are here; of names that are served by one process the first."""
    specs = {name: spec for spec in catalog.models() for name in (*spec.aliases, spec.id)}
    found: dict[str, ModelSpec] = {}
    for spec in filter(None, map(specs.get, names)):
        found.setdefault(spec.engine, spec)
    return tuple(found.values())


class BootLoads:
    """The models to be loaded at boot and what came of each. It belongs to the event loop."""

    def __init__(self) -> None:
        self._outcomes: dict[str, asyncio.Future[str]] = {}

    @property
    def is_over(self) -> bool:
        """Each of them is loaded, or has failed to."""
        return all(one.done() for one in self._outcomes.values())

    def expect(self, specs: Sequence[ModelSpec]) -> Sequence[ModelSpec]:
        """These are going to be loaded; the same."""
        loop = asyncio.get_running_loop()
        self._outcomes = {spec.id: loop.create_future() for spec in specs}
        return specs

    async def load(self, specs: Sequence[ModelSpec], load: Callable[[ModelSpec], Tried]) -> None:
        """One after the other; `load` says why one is not loaded, or nothing."""
        for spec in specs:
            self._outcomes[spec.id].set_result(await load(spec))

    async def outcomes(self) -> AsyncIterator[tuple[str, str]]:
        """The name of each once that was tried, and why it is not loaded, or nothing."""
        for name, outcome in self._outcomes.items():
            yield name, await asyncio.shield(outcome)
