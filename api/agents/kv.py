"""Where an agent's KV is, and making it follow a history that is gone."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from api.agents.schemas import KvStatus, KvView
from api.deps import Gate
from runtime.errors import StoreUnavailable, UnknownConversation
from runtime.inventory_views import ConversationView

_STATUS: dict[str, KvStatus] = {"warm": "warm", "cold": "cold", "mixed": "cold", "none": "none"}

log = structlog.stdlib.get_logger("hearth.agents")


class AgentKv:
    """The KV of sessions. Without a KV store nothing is known of the disk."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def views(self, sessions: Sequence[str]) -> dict[str, list[KvView]]:
        """For each session its KV with every model, the latest used first."""
        try:
            found = await self._gate.tend(lambda inventory: inventory.of_sessions(sessions))
        except StoreUnavailable:
            return {session: [] for session in sessions}
        return {session: [_view(one) for one in views] for session, views in found.items()}

    async def remove(self, session: str) -> bool:
        """Delete the KV of a session, on disk and in memory; False when that must wait."""
        try:
            await self._gate.tend(lambda inventory: inventory.remove_conversation(session))
        except UnknownConversation:
            return True
        except StoreUnavailable as error:
            log.warning("kv_not_deleted", why=error.message)
            return False
        return True


def _view(found: ConversationView) -> KvView:
    return KvView(
        model=found.model,
        status=_STATUS[found.tier],
        tokens=found.num_tokens,
        disk_bytes=found.disk_bytes,
        last_used_at=found.last_used_s,
    )
