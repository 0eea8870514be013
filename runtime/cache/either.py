"""The store of runs, or the one by blocks, as the settings say, for whoever uses both alike."""

from __future__ import annotations

from runtime.cache import service
from runtime.cache.by_blocks.contents import BlockContents
from runtime.cache.by_blocks.service import BlockKvStore
from runtime.cache.contents import KvContents
from runtime.cache.run_contents import RunContents
from runtime.config.settings import Settings

KvStore = service.KvStore | BlockKvStore


def kv_store_of(settings: Settings) -> KvStore:
    """The store that the settings choose."""
    return BlockKvStore(settings) if settings.kv_blocks else service.KvStore(settings)


def contents_of(kv: KvStore, settings: Settings) -> KvContents:
    """What lies in it."""
    if isinstance(kv, BlockKvStore):
        return BlockContents(kv, settings)
    return RunContents(kv, settings)
