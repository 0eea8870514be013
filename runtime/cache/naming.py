"""By what hash a worker's model is known in the store: looked up, or read beside the worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from runtime.cache.channel import WorkerChannel
from runtime.cache.lifecycle import StoreLife
from runtime.cache.opened import BlockStore
from runtime.config.settings import Settings
from runtime.models.identified import Identity, introduce, say_unknown
from runtime.models.identity import ModelFiles, NotIdentified, Stopped
from store.errors import StoreError

_SMALL_BYTES = 1 << 30
"""Read before anybody notices."""

Reader = Callable[[Identity, Callable[[], bool]], bytes]
"""As `Identity.read`."""


_log = structlog.stdlib.get_logger("hearth.store")


class Naming:
    """It belongs to the event loop; what blocks is done in threads."""

    def __init__(self, settings: Settings, life: StoreLife, read: Reader = Identity.read) -> None:
        self._settings = settings
        self._life = life
        self._read_weights = read

    async def of(self, channel: WorkerChannel) -> bytes | None:
        """The hash of what a worker reads, which the store knows then; None: it has none (yet).

        What is remembered is known at once. The rest is read beside the worker, and is what that
        has read if no file changed from before until both have.
        """
        if channel.model is None:
            channel.model = await self._find(channel)
        model, spec = channel.model, channel.spec
        if model is None:
            channel.is_nameless()
        else:
            await self._life.attempt(
                lambda one: introduce(one.records, one.clock.now_s, spec, model)
            )
        return model

    async def _find(self, channel: WorkerChannel) -> bytes | None:
        store, files, spec = self._life.store, channel.files, channel.spec
        if store is None or files is None:
            return None
        start_s = time.monotonic()
        form = self._settings.kv_form_of(spec.id)
        identity = Identity(store.records, store.clock.now_s, spec, form, files)
        model = await self._life.attempt(lambda _: identity.known())
        is_read = model is None
        if is_read:
            may_find = await self._life.attempt(lambda store: _has_kv_of(store, spec.engine))
            is_awaited = bool(may_find) or spec.nbytes < _SMALL_BYTES
            channel.is_being_named(is_awaited=is_awaited)
            model = await self._read(channel, identity, files)
        if model is not None:
            seconds = round(time.monotonic() - start_s, 3)
            _log.debug("model_identified", model=spec.engine, seconds=seconds, is_read=is_read)
        return model

    async def _read(
        self, channel: WorkerChannel, identity: Identity, files: ModelFiles
    ) -> bytes | None:
        def should_stop() -> bool:
            return channel.is_closed or self._life.stopping.is_set()

        try:
            model = await asyncio.to_thread(self._read_weights, identity, should_stop)
            await channel.until_loaded()
            if await asyncio.to_thread(files.is_unchanged):
                return model
            say_unknown(channel.spec, NotIdentified("its files changed after they were loaded"))
        except (OSError, NotIdentified) as error:
            say_unknown(channel.spec, error)
        except StoreError as error:
            self._life.fail(error.reason, str(error))
        except Stopped:
            pass
        return None


def _has_kv_of(store: BlockStore, label: str) -> bool:
    """Whether there is anything of a model that was loaded under this name."""
    return store.has_any({row.hash for row in store.records.models() if row.label == label})
