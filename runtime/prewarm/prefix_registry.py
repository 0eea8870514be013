"""The registry of learned prefixes: in memory while they are learned, then in private files."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec
import structlog

from runtime.cache.deletion_log import Models, Receipt
from runtime.cache.either import KvStore
from runtime.config.settings import Settings
from runtime.errors import StoreUnavailable
from runtime.prewarm import prefixes
from runtime.prewarm.prefixes import Prefix
from runtime.slot_events import Forget
from runtime.types import ChatPrompt, GenerateRequest
from store import prefixes as files
from store.keyed_names import Asker, Whom, conversation_key, model_key
from store.prefixes import PrefixFiles, StoredPrefix, goes_with
from store.types import PromptHead

_CANDIDATES = 8
CONFIGURED = "config:"
"""So begins the name of whoever pins what the configuration wants."""

_MAX_SESSIONS = 64
_MAX_NOTES = 64
"""So many requests at once; a use that is not counted among so many makes no difference."""

_log = structlog.stdlib.get_logger("hearth.prewarm")
_decode = msgspec.msgpack.Decoder(Prefix).decode


class Answered(NamedTuple):
    """A request that was answered: when it came, and the head of its prompt, as far as known."""

    request: GenerateRequest
    received: Receipt
    head: PromptHead


class PrefixRegistry:
    """By model and name. At most `prewarm_learned` of a model are kept for longer than this run.

    It belongs to the event loop; what takes as long as a prompt is done in threads.
    """

    def __init__(self, settings: Settings, kv: KvStore) -> None:
        self._settings = settings
        self._kv = kv
        self._key = secrets.token_bytes(32)
        self._models: dict[str, dict[str, Prefix]] = {}
        self._notes: set[asyncio.Task[None]] = set()
        self._storing = asyncio.Lock()
        """Held while what is in memory and the files are brought together."""
        self._written: dict[str, dict[str, Prefix]] = {}

    def get(self, model: str, name: str) -> Prefix | None:
        return self._models.get(model, {}).get(name)

    def names(self, model: str) -> Iterable[str]:
        """Of all that is known of a model."""
        return self._models.get(model, {}).keys()

    def learned(self, model: str, now_s: float) -> list[Prefix]:
        """Those that are worth being warm, the most worth first."""
        known = self._models.get(model, {}).values()
        return prefixes.learned(known, self._settings.prewarm_learned, now_s)

    def due(self, model: str, now_s: float, period_s: float) -> list[Prefix]:
        """Those that expire unless they are touched now."""
        return [one for one in self.learned(model, now_s) if prefixes.is_due(one, now_s, period_s)]

    def source_of(self, request: GenerateRequest) -> str:
        """Who pins a prompt of the configuration: another one for each text and model.

        It takes as long as the prompt is.
        """
        assert isinstance(request.prompt, ChatPrompt)
        mark = prefixes.mark_of(request.prompt, "", request.cache.tenant, self._secret)
        return f"{CONFIGURED}{request.model}:{mark}"

    def means(self, whom: Whom, request: GenerateRequest) -> bool:
        """Whether a deletion means a request, as far as that is known without its tokens."""
        return whom.means(Asker(request.model, request.cache.session_id), self._secret)

    @property
    def _secret(self) -> bytes:
        store = self._kv.store
        return store.secret if store is not None else self._key

    def note(self, answered: Answered, now_s: float, then: Callable[[str], None]) -> None:
        """A request was answered; `then` is given the name of its prefix, if it is learned."""
        if not self._settings.prewarm_learned or len(self._notes) >= _MAX_NOTES:
            return
        task = asyncio.get_running_loop().create_task(self._learn(answered, now_s, then))
        self._notes.add(task)
        task.add_done_callback(self._notes.discard)

    async def _learn(self, answered: Answered, now_s: float, then: Callable[[str], None]) -> None:
        request, received, head = answered
        cache = request.cache
        if cache.ttl_s is None:
            cache = msgspec.structs.replace(cache, ttl_s=self._settings.kv_ttl_of(request.model))
            request = msgspec.structs.replace(request, cache=cache)
        off = frozenset(self._settings.prompt_rules_off(request.model))
        own = self._settings.own_rules_for(request.client)
        found = await asyncio.to_thread(prefixes.prefix_of, request, off, self._secret, own)
        if found is None:
            return
        found = msgspec.structs.replace(found, head=head)
        session = self._session(cache.session_id)

        def is_meant(news: Forget) -> bool:
            return self._goes(found, request.model, session, news.whom)

        if not self._kv.is_deleted(received, is_meant):
            self._add(request.model, found, session, now_s)
            then(found.name)

    def _add(self, model: str, found: Prefix, session: str, now_s: float) -> None:
        known = self._models.setdefault(model, {})
        used = known.get(found.name, found).used(session, now_s, _MAX_SESSIONS)
        head = found.head if found.head.num_tokens else used.head
        known[found.name] = msgspec.structs.replace(used, head=head)
        limit = self._settings.prewarm_learned * _CANDIDATES
        while len(known) > limit:
            del known[min(known, key=lambda name: (known[name].worth(now_s), name))]

    def touched(self, model: str, name: str, now_s: float) -> None:
        """Its KV was warmed."""
        if (known := self.get(model, name)) is not None:
            self._models[model][name] = msgspec.structs.replace(known, touched_s=now_s)

    def forget(self, whom: Whom, models: Models = None) -> None:
        """Forget what only those used who are deleted, with these models. Files are the store's."""
        for model in list(self._models):
            model_hash = self._kv.hash_of(model)
            if models is None or model_hash in models:
                self._forget(model, whom)
            elif model_hash is None:  # which of them it is will be seen by its files
                del self._models[model]
                self._written.pop(model, None)

    def _forget(self, model: str, whom: Whom) -> None:
        known = self._models[model]
        for one in list(known.values()):
            left = tuple(name for name in one.sessions if not self._goes(one, model, name, whom))
            if not left:
                del known[one.name]
            elif left != one.sessions:
                known[one.name] = msgspec.structs.replace(one, sessions=left)

    def _goes(self, prefix: Prefix, model: str, session: str, whom: Whom) -> bool:
        """Whether the use of a prefix by somebody, as files name him, goes with a deletion."""
        is_meant = whom.means_key(model, _key_of(session), self._secret)
        return is_meant and (whom.chain is None or goes_with(prefix.head, whom.chain))

    async def forget_stored(self, whom: Whom, models: Models = None) -> None:
        """The same once files are gone: what was read of them meanwhile, or being written."""
        async with self._storing:
            self.forget(whom, models)
        await self.save()

    async def open(self, model: str) -> None:
        """Take in what was learned of a model that is loaded now, once."""
        model_hash = self._kv.hash_of(model)
        if model_hash is None:
            return
        async with self._storing:
            if model not in self._written:
                await self._read(model, model_hash)

    async def _read(self, model: str, model_hash: bytes) -> None:
        def read(at: PrefixFiles) -> dict[str, Prefix]:
            return dict(_decoded(files.read(at.root, model_hash, model_key(at.secret, model))))

        try:
            found = await self._kv.tend_prefixes(read)
        except StoreUnavailable as error:
            _log.warning("prefixes not read", model=model, why=error.message)
            return
        known = self._models.setdefault(model, {})
        for name, prefix in found.items():
            known.setdefault(name, prefix)
        self._written[model] = dict(known)

    async def save(self) -> None:
        """Have on disk what is worth it, and nothing else; a failure is logged."""
        await asyncio.gather(*self._notes, return_exceptions=True)
        for model in list(self._models):
            model_hash = self._kv.hash_of(model)
            if model_hash is None:
                continue
            await self.open(model)
            async with self._storing:
                before = self._written.get(model, {})
                after = {one.name: one for one in self.learned(model, time.time())}
                is_same = after.keys() == before.keys()
                if not is_same or any(one is not before[name] for name, one in after.items()):
                    await self._write(model, model_hash, before, after)

    async def _write(
        self, model: str, model_hash: bytes, before: dict[str, Prefix], after: dict[str, Prefix]
    ) -> None:
        def work(at: PrefixFiles) -> None:
            asked = model_key(at.secret, model)
            for name, prefix in after.items():
                if before.get(name) != prefix:
                    payload = msgspec.msgpack.encode(prefix)
                    stored = StoredPrefix(prefix.sessions, payload, prefix.head)
                    num_bytes = len(msgspec.msgpack.encode(stored))
                    with at.room(num_bytes) as has_room:
                        if has_room:
                            files.write(at.root, model_hash, asked, name, stored)
            for name in before.keys() - after.keys():
                files.remove(at.root, model_hash, asked, name)

        try:
            await self._kv.tend_prefixes(work)
        except StoreUnavailable as error:
            _log.warning("prefixes not written", model=model, why=error.message)
        else:
            self._written[model] = after

    def _session(self, session_id: str | None) -> str:
        """What stands for a conversation in files; "" for those without a name."""
        return "" if session_id is None else conversation_key(self._secret, session_id).hex()


def _key_of(session: str) -> bytes:
    """The key of a conversation as files name it; they once named some otherwise."""
    with suppress(ValueError):
        return bytes.fromhex(session)
    return session.encode()


def _decoded(stored: Mapping[str, StoredPrefix]) -> Iterator[tuple[str, Prefix]]:
    """Those that can be read, by name."""
    for name, one in stored.items():
        with suppress(msgspec.MsgspecError):
            yield name, msgspec.structs.replace(_decode(one.payload), sessions=one.sessions)
