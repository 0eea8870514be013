"""Learned prefixes, purely: which system prompts and tools are asked with again and again.

What is worth having in memory before somebody asks is what was used often, lately, and takes long
to compute. Within one model that grows with the text's length, which is known without its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from runtime.prompt.stabilise import stabilise
from runtime.types import CacheParams, ChatPrompt, GenerateRequest, LineRule, Message, Struct
from store.types import DEFAULT_TTL_S, UNKNOWN_HEAD, PromptHead, decayed_hits

MIN_CHARS = 1000
"""Shorter ones are computed before anybody notices."""

MIN_USES = 1.5
"""Twice within the half-life of a use: the first one counts a little less by then."""

KEEP_ALIVE_SHARE = 0.8
KEPT_LIVES = 4
"""So many times as long as it would live unused, a prefix is kept alive for its next use."""

_OPENING = Message(role="user", text=".")
"""Some templates refuse a prompt without a user; only what precedes this message is kept."""


class Prefix(Struct, frozen=True):
    """The head of prompts of one model. Times are wall time; `sessions` are those that used it.

    `num_uses` is as it was at `last_used_s`; `touched_s` is when its KV was last used or warmed.
    `head` is what it is as tokens, once that was seen.
    """

    name: str
    prompt: ChatPrompt
    client: str = ""
    num_uses: float = 0.0
    last_used_s: float = 0.0
    touched_s: float = 0.0
    ttl_s: float | None = None
    sessions: tuple[str, ...] = ()
    tenant: str = ""
    head: PromptHead = UNKNOWN_HEAD

    @property
    def num_chars(self) -> int:
        """What stands for the time that its prefill takes."""
        tools = sum(len(t.parameters) + len(t.description or "") for t in self.prompt.tools)
        return tools + sum(len(message.text) for message in self.prompt.messages)

    @property
    def life_s(self) -> float:
        """How long its KV lives on disk without use."""
        return DEFAULT_TTL_S if self.ttl_s is None else self.ttl_s

    def worth(self, now_s: float) -> float:
        """Uses that are expected, times the length."""
        return decayed_hits(self.num_uses, now_s - self.last_used_s) * self.num_chars

    def used(self, session: str, now_s: float, max_sessions: int) -> Prefix:
        """The same, once more; of too many sessions the oldest are forgotten for one without."""
        names = (*(one for one in self.sessions if one != session), session)
        if len(names) > max_sessions:
            names = ("", *(one for one in names[-max_sessions + 1 :] if one))
        uses = decayed_hits(self.num_uses, now_s - self.last_used_s) + 1.0
        return msgspec.structs.replace(
            self, num_uses=uses, last_used_s=now_s, touched_s=now_s, sessions=names
        )


def prefix_of(
    request: GenerateRequest,
    rules_off: frozenset[str],
    key: bytes,
    own_rules: tuple[LineRule, ...] = (),
) -> Prefix | None:
    """The head of a request's prompt; None where there is none that may and should be learned."""
    prompt, cache = request.prompt, request.cache
    if request.work != "generate" or cache.mode == "off" or cache.ttl_s == 0:
        return None
    if not isinstance(prompt, ChatPrompt):
        return None
    stable = stabilise(prompt.messages, request.client, rules_off, own_rules).messages
    roles = [message.role == "system" for message in stable]
    head = stable[: roles.index(False) if False in roles else len(roles)]
    if any(message.images for message in head):
        return None
    plain = tuple(msgspec.structs.replace(message, breakpoints=()) for message in head)
    tools = tuple(msgspec.structs.replace(tool, keep_s=None) for tool in prompt.tools)
    opening = msgspec.structs.replace(prompt, messages=(*plain, _OPENING), tools=tools)
    found = Prefix(
        name=mark_of(opening, request.client, cache.tenant, key),
        prompt=opening,
        client=request.client,
        ttl_s=cache.ttl_s,
        tenant=cache.tenant,
    )
    return found if found.num_chars >= MIN_CHARS else None


def mark_of(prompt: ChatPrompt, client: str, tenant: str, key: bytes) -> str:
    """Names a prompt, and says nothing of it to who has no `key`; two tenants' are two names."""
    content = msgspec.msgpack.encode((prompt, client, tenant) if tenant else (prompt, client))
    return blake2b(content, digest_size=16, key=key).hexdigest()


def learned(prefixes: Iterable[Prefix], limit: int, now_s: float) -> list[Prefix]:
    """Those that are worth being warm, the most worth first."""
    often = (one for one in prefixes if one.num_uses >= MIN_USES)
    return sorted(often, key=lambda one: (-one.worth(now_s), one.name))[:limit]


def is_due(prefix: Prefix, now_s: float, period_s: float) -> bool:
    """It expires soon unless it is touched, and was really used within some of its lives.

    True when it would be later than 80 % of its life at the next look, `period_s` from now.
    """
    was_used = now_s - prefix.last_used_s < KEPT_LIVES * prefix.life_s
    return was_used and now_s + period_s - prefix.touched_s > KEEP_ALIVE_SHARE * prefix.life_s


def warming_of(prefix: Prefix, request_id: str, model: str) -> GenerateRequest:
    """What has the KV of a prefix computed, or brought back, when nothing else is to be done."""
    return GenerateRequest(
        request_id=request_id,
        model=model,
        prompt=prefix.prompt,
        work="prefill",
        priority="background",
        client=prefix.client,
        cache=CacheParams(mode="prefix", ttl_s=prefix.ttl_s, tenant=prefix.tenant),
    )
