"""Everything that is done to the store now and then, done now because somebody asked for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from runtime.cache import maintenance
from runtime.cache.compaction import compact
from runtime.cache.inventory_views import CollectedView
from runtime.cache.maintenance import StoreLimits, usage_of
from runtime.cache.owned import News, OpenStore
from runtime.progress import Progress, Watch
from runtime.slot_events import SlotsDemoted


class GarbageCollection:
    """One run over one store. `loaded` are the models that workers hold."""

    def __init__(
        self,
        limits: StoreLimits,
        loaded: Collection[bytes],
        watch: Watch,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._limits = limits
        self._loaded = loaded
        self._watch = watch
        self._should_stop = should_stop
        self.outcome: CollectedView | None = None
        """What came of it, once it is done."""

    def run(self, store: OpenStore) -> Iterator[News]:
        """Do it, saying which slots are gone as they go. Raises StoreError."""
        before_bytes, merged_before = self._used(store), store.counts["compacted"]
        num_dropped = num_demoted = 0
        steps = self._steps(store)
        for number, (name, work) in enumerate(steps):
            self._watch(Progress(step=name, num_done=number, num_total=len(steps)))
            if self._should_stop():
                return
            for news in work:
                if isinstance(news, SlotsDemoted):
                    num_demoted += len(news.ids)
                elif name != "merge":
                    num_dropped += len(news.ids)
                yield news
        self._watch(Progress(step="done", num_done=len(steps), num_total=len(steps)))
        self.outcome = CollectedView(
            num_dropped=num_dropped,
            num_demoted=num_demoted,
            num_merged=store.counts["compacted"] - merged_before,
            freed_bytes=before_bytes - self._used(store),
        )

    def _steps(self, store: OpenStore) -> list[tuple[str, Iterable[News]]]:
        return [
            ("expire", maintenance.expire(store, self._limits)),
            ("agree", maintenance.sweep_orphans(store, self._should_stop)),
            ("merge", compact(store, lambda: self._loaded, self._should_stop, self._watch)),
            ("tidy", maintenance.tidy(store, self._limits)),
            ("caps", maintenance.keep_within_caps(store, self._limits)),
        ]

    @staticmethod
    def _used(store: OpenStore) -> int:
        usage = usage_of(store)
        return usage.warm_bytes + usage.cold_bytes + usage.other_bytes
