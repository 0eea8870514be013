"""Compaction items: what asks for one, what it says, and what of the items before it stays.

An item holds its summary itself, encoded: nothing is looked up, so it says what its sender sent,
and whoever makes one up says no more by it than with a message of the user's.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from api.http.body import decoded_at
from api.http.expansion import Expansion
from api.http.refusal import refuse
from api.openai.response_schemas import CompactionItem, ItemHead
from api.responses.items import MAX_SEALED_BYTES, Item, head_of, seal, unseal
from runtime.errors import InvalidRequest

TRIGGER = "compaction_trigger"
TRIGGER_ITEM = msgspec.Raw(b'{"type":"compaction_trigger"}')
KINDS = frozenset({"compaction", "compaction_summary", "context_compaction"})
"""The first is what we write; Codex has written the others."""

SUMMARY_SEAL = "hearth-summary1:"


def new_compaction_id() -> str:
    return f"cmp_{secrets.token_hex(16)}"


def sealed_summary(summary: str) -> str:
    """The summary as `encrypted_content`."""
    return seal(summary, SUMMARY_SEAL)


def summary_in(item: Item, expansion: Expansion) -> str:
    """The summary that a compaction item holds.

    Raises:
        InvalidRequest: it holds none that can be read here, or too long a one. Without it the
            model would go on as if nothing had been said, so it is not left out.
    """
    sealed = decoded_at(item.raw, CompactionItem, item.path).encrypted_content
    path = f"{item.path}.encrypted_content"
    summary = unseal(sealed, expansion, path, SUMMARY_SEAL) if sealed else None
    if summary is None:
        why = "was not written by this server, or is damaged" if sealed else "is missing"
        refuse(
            path,
            f"{why}: send a compaction item as this server gave it, or what it stands for.",
        )
    return summary


class Live(NamedTuple):
    """The items that the model is to read, and whether they are to be summed up."""

    items: list[Item]
    is_to_be_compacted: bool


def live(items: Sequence[Item]) -> Live:
    """What of a conversation is read: its last summary stands for what the model said, called and
    was answered by tools before it; what its user and its developer said before it stays.

    Raises:
        InvalidRequest: a trigger is not the last item, or there is nothing to be summed up.
    """
    heads = [head_of(item) for item in items]
    triggers = [i for i, head in enumerate(heads) if head.type == TRIGGER]
    if triggers and triggers != [len(items) - 1]:
        refuse(items[triggers[0]].path, f"is a {TRIGGER}, which must be the last item, once.")
    if triggers == [0]:
        refuse(items[0].path, f"is a {TRIGGER}, and there is nothing before it to be summed up.")
    summaries = (i for i in range(len(items) - 1, -1, -1) if heads[i].type in KINDS)
    last = next((i for i in summaries if i == len(items) - 1 or _is_readable(items[i])), 0)
    kept = [item for item, head in zip(items[:last], heads, strict=False) if _stays(head)]
    end = triggers[0] if triggers else len(items)
    return Live([*kept, *items[last:end]], bool(triggers))


def compaction_item(summary: str) -> Item:
    """A summary as an item of the next request."""
    fields = CompactionItem(type="compaction", encrypted_content=sealed_summary(summary))
    return Item(msgspec.Raw(msgspec.json.encode(fields)), "compaction")


def compacted(items: Sequence[Item], summary: Item) -> list[Item]:
    """The items that go on with a summary of these."""
    return live([*items, summary]).items


def _is_readable(item: Item) -> bool:
    """One that was sent before and cannot be read stands for nothing."""
    try:
        summary_in(item, Expansion(MAX_SEALED_BYTES))
    except InvalidRequest:
        return False
    return True


def _stays(head: ItemHead) -> bool:
    return head.type == "message" and head.role in ("system", "developer", "user")
