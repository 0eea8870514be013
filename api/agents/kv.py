"""Where an agent's KV is, and making it follow a history that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

import structlog

from api.agents.schemas import KvStatus, KvView
from api.http.kv_access import KvAccess
from runtime.cache.conversations import KeptConversation
from runtime.cache.views import ConversationView
from runtime.errors import StoreUnavailable, UnknownConversation

_STATUS: dict[str, KvStatus] = {"warm": "warm", "cold": "cold", "mixed": "cold", "none": "none"}

log = structlog.stdlib.get_logger("hearth.agents")


class AgentKv:
    """The KV of sessions. Without a KV store nothing is known of the disk."""

    def __init__(self, cache: KvAccess) -> None:
        self._cache = cache
        self._contents = cache.contents

    async def views(self, sessions: Sequence[str]) -> dict[str, list[KvView]]:
        """For each session its KV with every model, the latest used first.

        Hot is what the model's worker says it has in memory, also where nothing of it is on disk;
        the rest is as it lies there.
        """
        kept: dict[str, list[KeptConversation]] = {session: [] for session in sessions}
        with suppress(StoreUnavailable):
            kept |= await self._contents.of_sessions(sessions)
        every = [one for found in kept.values() for one in found]
        seen, held = await asyncio.gather(self._contents.seen(every), self._contents.held(sessions))
        views = iter(seen)
        return {
            session: _merged([next(views) for _ in found], held[session])
            for session, found in kept.items()
        }

    async def branch(self, source: str, copy: str, ends: Mapping[str, int]) -> None:
        """Let a session share another's KV up to these tokens, by model; or not, if that fails."""
        try:
            await self._contents.branch(source, copy, ends)
        except StoreUnavailable as error:
            log.warning("kv_not_shared", why=error.message)

    async def remove(self, session: str) -> bool:
        """Delete the KV of a session, on disk and in memory; False when that must wait."""
        try:
            removed = await self._cache.remove_conversation(session)
        except UnknownConversation:
            return True
        except StoreUnavailable as error:
            log.warning("kv_not_deleted", why=error.message)
            return False
        return not removed.is_pending


def _merged(kept: Sequence[ConversationView], held: Mapping[str, int]) -> list[KvView]:
    """What is on disk, and before it what is in memory alone; `held` are tokens by model."""
    views = [
        _view(one, is_hot=one.tier == "hot" or held.get(one.model, 0) >= one.num_tokens)
        for one in kept
    ]
    known = {view.model for view in views}
    only = [KvView(model, "hot", tokens) for model, tokens in held.items() if model not in known]
    return [*only, *views]


def _view(found: ConversationView, *, is_hot: bool) -> KvView:
    return KvView(
        model=found.model,
        status="hot" if is_hot else _STATUS[found.tier],
        tokens=found.num_tokens,
        durable_tokens=found.num_durable,
        disk_bytes=found.disk_bytes,
        last_used_at=found.last_used_s,
    )
