"""`Dashboard`: takes samples, keeps what was saved, and says how everything stands."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence

from api.admin.models import RunningModel, running_models
from api.admin.pools import pools_of
from api.dashboard.views import (
    KeptListing,
    KeptView,
    MemoryUse,
    OpenRequest,
    Saved,
    Snapshot,
)
from api.http.answer import Answer
from api.http.gate import Gate
from api.http.kv_access import KvAccess
from api.observe.savings import PROMPT_TOKENS, SECONDS, TOKENS
from api.observe.trend import Sample
from runtime.cache.conversations import KeptConversation
from runtime.cache.history import History
from runtime.cache.views import ConversationView
from runtime.errors import StoreUnavailable, UnknownModel

MAX_LISTED = 200


class Dashboard:
    """Belongs to the event loop. `tick` is to be called every few seconds, and once at the end."""

    def __init__(self, gate: Gate, cache: KvAccess, history: History) -> None:
        self._gate = gate
        self._cache = cache
        self._history = history
        self._moving = asyncio.Lock()
        """Held while savings are neither waiting nor in the store, or both are added up."""

    async def tick(self) -> None:
        """Close an interval of the trend, and give the store what was saved in it."""
        status = self._gate.supervisor.status()
        self._gate.metrics.trend.sample(
            time.time(),
            num_running=sum(one.num_running for one in status),
            num_waiting=sum(one.num_waiting for one in status),
        )
        await self.keep()

    async def keep(self) -> None:
        """Give the store what was saved; while there is none, it is kept here."""
        savings = self._gate.metrics.savings
        async with self._moving:
            if not (taken := savings.take()):
                return
            try:
                await self._cache.contents.count(taken)
            except StoreUnavailable:
                savings.put_back(taken)

    def samples(self) -> list[Sample]:
        """Speed lately, the oldest first."""
        return self._gate.metrics.trend.samples

    async def snapshot(self) -> Snapshot:
        """How everything stands now."""
        gate = self._gate
        await self._cache.kv.refresh()
        async with self._moving:
            today, total = await self._kept()
            waiting = gate.metrics.savings.waiting()
        samples = self.samples()
        running = running_models(gate)
        return Snapshot(
            at_s=time.time(),
            models=running,
            known_models=[one.spec.id for one in gate.supervisor.status()],
            default_model=self._default(),
            memory=MemoryUse(
                budget_bytes=gate.supervisor.budgets().reserved,
                reserved_bytes=sum(_reserved(running)),
            ),
            tiers=pools_of(gate, self._cache),
            cache=self._cache.kv.status.state,
            history=self._history.health.state,
            history_message=self._history.health.message,
            saved_today=_saved(today, waiting),
            saved_total=_saved(total, waiting),
            requests=[_open_request(name, one) for name, one in gate.open_answers()],
            sample=samples[-1] if samples else None,
        )

    def _default(self) -> str | None:
        with contextlib.suppress(UnknownModel):
            return self._gate.spec(None).id
        return None

    async def conversations(self, search: str) -> KeptListing:
        """Those whose id or model has `search` in it. Raises StoreUnavailable."""
        found = await self._cache.contents.kept()
        wanted = search.lower()
        fitting = [
            one for one in found if wanted in one.view.id or wanted in one.view.model.lower()
        ]
        shown = fitting[:MAX_LISTED]
        seen, now_s = await self._cache.contents.seen(shown), time.time()
        views = [_kept_view(one, view, now_s) for one, view in zip(shown, seen, strict=True)]
        return KeptListing(len(fitting), views)

    async def _kept(self) -> tuple[dict[str, float], dict[str, float]]:
        """The counters of today and of all time."""
        with contextlib.suppress(StoreUnavailable):
            return await self._cache.contents.counters()
        return {}, {}


def _saved(kept_values: Mapping[str, float], waiting: Mapping[str, float]) -> Saved:
    prompt, saved, seconds = (
        kept_values.get(name, 0.0) + waiting.get(name, 0.0)
        for name in (PROMPT_TOKENS, TOKENS, SECONDS)
    )
    return Saved(int(prompt), int(saved), seconds, saved / prompt if prompt else None)


def _reserved(running: Sequence[RunningModel]) -> Iterable[int]:
    """What each process has reserved, whatever number of names it serves."""
    return {min(one.id, *one.shares_with): one.reserved_bytes for one in running}.values()


def _open_request(name: str, answer: Answer) -> OpenRequest:
    return OpenRequest(
        id=name,
        model=answer.model,
        phase="answering" if answer.num_pieces else answer.phase,
        for_s=time.monotonic() - answer.since_s,
        num_prompt_tokens=answer.num_prompt_tokens,
        num_cached_tokens=answer.planned_cache.num_tokens,
        num_pieces=answer.num_pieces,
    )


def _kept_view(one: KeptConversation, view: ConversationView, now_s: float) -> KeptView:
    is_kept = one.is_pinned or one.ttl_s is None
    return KeptView(
        id=view.id,
        model=view.model,
        num_tokens=view.num_tokens,
        num_turns=view.num_turns,
        disk_bytes=view.disk_bytes,
        own_bytes=view.own_bytes,
        tier=view.tier,
        last_used_s=view.last_used_s,
        expires_in_s=None if is_kept else max(0.0, view.last_used_s + (one.ttl_s or 0.0) - now_s),
        is_pinned=one.is_pinned,
        is_named=view.is_named,
    )
