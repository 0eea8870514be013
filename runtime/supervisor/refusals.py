"""Why a request cannot wait, or waited in vain: in words, with what to do about it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from runtime.errors import NoRoom, Overloaded, QueueTimeout
from runtime.supervisor.calls import QueuedRequest


def check_number(tenant: str, owners: Collection[str], limit: int, what: str, setting: str) -> None:
    """See that a tenant may have one more, where these tenants have one each.

    A tenant that has less than an equal share of the limit is let in although others took all.

    Raises:
        Overloaded: the limit is reached.
    """
    num_own = sum(owner == tenant for owner in owners)
    if len(owners) >= limit and num_own >= limit // len({tenant, *owners}):
        raise Overloaded(f"{len(owners)} {what}, the limit ({setting}) is {limit}.")


def too_late(call: QueuedRequest, now_s: float) -> QueueTimeout:
    """It waited for as long as it may."""
    waited_s = now_s - call.since_s
    return QueueTimeout(
        f"The request waited for {waited_s:.0f} s (max_wait_s) and the model {call.model} "
        "had no time for it. Try again later, or ask for a model that is loaded.",
        retry_after_s=30,
    )


def no_room(model: str, pinned: Iterable[str], missing_bytes: int) -> NoRoom:
    """What is pinned keeps the model out, or memory that former processes did not give back."""
    if missing_bytes:
        return NoRoom(
            f"The model {model} does not fit: {missing_bytes / 1e9:.2f} GB that processes of "
            "models held did not come back (/running). Should that stay so, only a "
            "restart of the machine gives it back.",
            retry_after_s=60,
        )
    return NoRoom(
        f"The model {model} does not fit beside what is pinned ({', '.join(sorted(pinned))}). "
        "Unpin one (POST /admin/models/NAME/unpin) or raise memory_budget or "
        "max_loaded_models.",
        retry_after_s=60,
    )
