"""The registry of learned prefixes: in memory while they are learned, then in private files."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec
import structlog

from runtime.cache.owned import OpenStore
from runtime.cache.service import KvStore
from runtime.config.settings import Settings
from runtime.errors import StoreUnavailable
from runtime.prewarm import prefixes
from runtime.prewarm.prefixes import Prefix
from runtime.types import ChatPrompt, GenerateRequest
from store import prefixes as files
from store.keyed_names import model_key
from store.prefixes import StoredPrefix

_CANDIDATES = 8
CONFIGURED = "config:"
"""So begins the name of whoever pins what the configuration wants."""

_MAX_SESSIONS = 64
_MAX_NOTES = 64
"""So many requests at once; a use that is not counted among so many makes no difference."""

_log = structlog.stdlib.get_logger("hearth.prewarm")
_decode = msgspec.msgpack.Decoder(Prefix).decode


class PrefixRegistry:
    """By model and name. At most `prewarm_learned` of a model are kept for longer than this run.

    It belongs to the event loop; what takes as long as a prompt is done in threads.
    """

    def __init__(self, settings: Settings, kv: KvStore) -> None:
        self._settings = settings
        self._kv = kv
        self._key = secrets.token_bytes(32)
        self._models: dict[str, dict[str, Prefix]] = {}
        self._notes: dict[asyncio.Task[None], GenerateRequest] = {}
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

    @property
    def _secret(self) -> bytes:
        store = self._kv.store
        return store.secret if store is not None else self._key

    def note(self, request: GenerateRequest, now_s: float, then: Callable[[str], None]) -> None:
        """A request was answered; `then` is given the name of its prefix, if it is learned."""
        if not self._settings.prewarm_learned or len(self._notes) >= _MAX_NOTES:
            return
        task = asyncio.get_running_loop().create_task(self._learn(request, now_s, then))
        self._notes[task] = request
        task.add_done_callback(lambda _: self._notes.pop(task, None))

    async def _learn(
        self, request: GenerateRequest, now_s: float, then: Callable[[str], None]
    ) -> None:
        cache = request.cache
        if cache.ttl_s is None:
            cache = msgspec.structs.replace(cache, ttl_s=self._settings.kv_ttl_of(request.model))
            request = msgspec.structs.replace(request, cache=cache)
        off = frozenset(self._settings.prompt_rules_off(request.model))
        own = self._settings.own_rules_for(request.client)
        found = await asyncio.to_thread(prefixes.prefix_of, request, off, self._secret, own)
        if found is not None:
            self._add(request.model, found, self._session(cache.session_id), now_s)
            then(found.name)

    def _add(self, model: str, found: Prefix, session: str, now_s: float) -> None:
        known = self._models.setdefault(model, {})
        known[found.name] = known.get(found.name, found).used(session, now_s, _MAX_SESSIONS)
        limit = self._settings.prewarm_learned * _CANDIDATES
        while len(known) > limit:
            del known[min(known, key=lambda name: (known[name].worth(now_s), name))]

    def touched(self, model: str, name: str, now_s: float) -> None:
        """Its KV was warmed."""
        if (known := self.get(model, name)) is not None:
            self._models[model][name] = msgspec.structs.replace(known, touched_s=now_s)

    def forget(self, *, session: str | None = None, models: Sequence[str] | None = ()) -> None:
        """Forget what only a conversation used, or of models (None: all). Files are the store's."""
        for note, request in self._notes.items():
            is_of_models = models is None or request.model in models
            if is_of_models or (session is not None and request.cache.session_id == session):
                note.cancel()
        for model in list(self._models) if models is None else models:
            self._models.pop(model, None)
            self._written.pop(model, None)
        if session is None:
            return
        name = self._session(session)
        for known in self._models.values():
            for one in list(known.values()):
                left = tuple(other for other in one.sessions if other != name)
                if left:
                    known[one.name] = msgspec.structs.replace(one, sessions=left)
                else:
                    del known[one.name]

    async def open(self, model: str) -> None:
        """Take in what was learned of a model that is loaded now, once."""
        model_hash = self._kv.memory.hash_of(model)
        if model in self._written or model_hash is None:
            return

        def read(store: OpenStore, _: object) -> dict[str, Prefix]:
            stored = files.read(store.root, model_hash, model_key(store.secret, model))
            return dict(_decoded(stored))

        try:
            found = await self._kv.tend(read)
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
            model_hash = self._kv.memory.hash_of(model)
            if model_hash is None:
                continue
            await self.open(model)
            before = self._written.get(model, {})
            after = {one.name: one for one in self.learned(model, time.time())}
            is_same = after.keys() == before.keys()
            if not is_same or any(one is not before[name] for name, one in after.items()):
                await self._write(model, model_hash, before, after)

    async def _write(
        self, model: str, model_hash: bytes, before: dict[str, Prefix], after: dict[str, Prefix]
    ) -> None:
        def work(store: OpenStore, _: object) -> None:
            asked = model_key(store.secret, model)
            for name, prefix in after.items():
                if before.get(name) != prefix:
                    stored = StoredPrefix(prefix.sessions, msgspec.msgpack.encode(prefix))
                    num_bytes = len(msgspec.msgpack.encode(stored))
                    if store.disk.reserve(f"prefix-{name}", num_bytes, is_small=True):
                        files.write(store.root, model_hash, asked, name, stored)
                    store.disk.release(f"prefix-{name}")
            for name in before.keys() - after.keys():
                files.remove(store.root, model_hash, asked, name)

        try:
            await self._kv.tend(work)
        except StoreUnavailable as error:
            _log.warning("prefixes not written", model=model, why=error.message)
        else:
            self._written[model] = after

    def _session(self, session_id: str | None) -> str:
        """What stands for a conversation in files; "" for those without a name."""
        store = self._kv.store
        if session_id is None:
            return ""
        return store.conversation_key(session_id).hex() if store is not None else session_id


def _decoded(stored: Mapping[str, StoredPrefix]) -> Iterator[tuple[str, Prefix]]:
    """Those that can be read, by name."""
    for name, one in stored.items():
        with suppress(msgspec.MsgspecError):
            yield name, msgspec.structs.replace(_decode(one.payload), sessions=one.sessions)
