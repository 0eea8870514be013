"""The book of learned prefixes: in memory while it is being learned, in private files for later."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence

import msgspec
import structlog

from runtime import prefixes
from runtime.errors import StoreUnavailable
from runtime.kv_store import KvStore
from runtime.open_store import OpenStore
from runtime.prefixes import Prefix
from runtime.settings import Settings
from runtime.types import ChatPrompt, GenerateRequest
from store import prefixes as files
from store.keyed_names import model_key
from store.prefixes import StoredPrefix

_CANDIDATES = 8
CONFIGURED = "config:"
"""So begins the name of whoever pins what the configuration wants."""

_MAX_SESSIONS = 64
_log = structlog.stdlib.get_logger("hearth.prewarm")
_decode = msgspec.msgpack.Decoder(Prefix).decode


class PrefixBook:
    """By model and name. At most `prewarm_learned` of a model are kept for longer than this run."""

    def __init__(self, settings: Settings, kv: KvStore) -> None:
        self._settings = settings
        self._kv = kv
        self._key = secrets.token_bytes(32)
        self._models: dict[str, dict[str, Prefix]] = {}
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
        """Who pins a prompt of the configuration: another one for each text and model."""
        assert isinstance(request.prompt, ChatPrompt)
        mark = prefixes.mark_of(request.prompt, "", request.cache.tenant, self._secret)
        return f"{CONFIGURED}{request.model}:{mark}"

    @property
    def _secret(self) -> bytes:
        store = self._kv.store
        return store.secret if store is not None else self._key

    def note(self, request: GenerateRequest, now_s: float) -> str | None:
        """A request was answered; the name of its prefix."""
        cache = request.cache
        if not self._settings.prewarm_learned:
            return None
        if cache.ttl_s is None:
            cache = msgspec.structs.replace(cache, ttl_s=self._settings.kv_ttl_of(request.model))
            request = msgspec.structs.replace(request, cache=cache)
        off = frozenset(self._settings.prompt_rules_off(request.model))
        found = prefixes.prefix_of(request, off, self._secret)
        if found is None:
            return None
        known = self._models.setdefault(request.model, {})
        session = self._session(cache.session_id)
        known[found.name] = known.get(found.name, found).used(session, now_s, _MAX_SESSIONS)
        limit = self._settings.prewarm_learned * _CANDIDATES
        while len(known) > limit:
            del known[min(known, key=lambda name: (known[name].worth(now_s), name))]
        return found.name

    def touched(self, model: str, name: str, now_s: float) -> None:
        """Its KV was warmed."""
        if (known := self.get(model, name)) is not None:
            self._models[model][name] = msgspec.structs.replace(known, touched_s=now_s)

    def forget(self, *, session: str | None = None, models: Sequence[str] | None = ()) -> None:
        """Forget what only a conversation used, or of models (None: all). Files are the store's."""
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
        try:
            stored = await self._kv.tend(
                lambda store, _: files.read(store.root, model_hash, model_key(store.secret, model))
            )
        except StoreUnavailable as error:
            _log.warning("prefixes not read", model=model, why=error.message)
            return
        known = self._models.setdefault(model, {})
        for name, one in stored.items():
            try:
                prefix = _decode(one.payload)
            except msgspec.MsgspecError:
                continue
            known.setdefault(name, msgspec.structs.replace(prefix, sessions=one.sessions))
        self._written[model] = dict(known)

    async def save(self) -> None:
        """Have on disk what is worth it, and nothing else; a failure is logged."""
        for model in list(self._models):
            model_hash = self._kv.memory.hash_of(model)
            if model_hash is None:
                continue
            await self.open(model)
            before = self._written.get(model, {})
            after = {one.name: one for one in self.learned(model, time.time())}
            if after != before:
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
