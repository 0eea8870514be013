"""Where `hearth cache` does its work: on the store itself, or through the server that owns it."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import urlencode

import msgspec

from runtime.catalog import Catalog
from runtime.errors import HearthError, StoreUnavailable, UnknownModel
from runtime.inventory import Inventory
from runtime.inventory_views import (
    ChainView,
    ConversationView,
    PublishedView,
    RemovalView,
    StatsView,
    VerifyView,
)
from runtime.open_store import OpenStore
from runtime.settings import Settings
from runtime.store_opening import open_store
from runtime.wire import SlotStaged
from store.errors import StoreError, StoreLocked
from store.recovery import Recovery

T = TypeVar("T")

_TIMEOUT_S = 3600.0
_CONNECT_S = 5.0
_ANY = frozenset({"0.0.0.0", "::", "", "localhost"})  # noqa: S104


class CacheDesk(Protocol):
    """What can be asked of a cache. All of it raises HearthError."""

    def conversations(self, model: str | None) -> list[ConversationView]: ...

    def stats(self) -> StatsView: ...

    def chain(self, name: str) -> ChainView: ...

    def remove_conversation(self, name: str) -> RemovalView: ...

    def remove_model(self, name: str) -> RemovalView: ...

    def remove_all(self) -> RemovalView: ...

    def verify(self) -> VerifyView: ...

    def publish(self, slots: Sequence[SlotStaged]) -> PublishedView: ...


@contextmanager
def opened_desk(settings: Settings) -> Generator[CacheDesk]:
    """The store of these settings, through its server when one runs.

    Raises:
        StoreUnavailable: there is no store, it fails, or its server does not answer.
    """
    root = settings.kv_root
    if not root.is_dir():
        raise StoreUnavailable(f"There is no store at {root}. Name its home with --home.")
    try:
        store = open_store(root, settings.cold_store)
    except StoreLocked:
        yield _ServerDesk(settings, root)
        return
    except StoreError as error:
        raise StoreUnavailable(f"The store at {root} cannot be opened: {error}.") from error
    try:
        Recovery(root, store.database, store.cold, store.clock().wall_s).run()
        yield _StoreDesk(store, settings)
    except StoreError as error:
        raise StoreUnavailable(f"The store at {root} fails: {error}.") from error
    finally:
        store.close()


class _StoreDesk:
    """Nobody else has the store."""

    def __init__(self, store: OpenStore, settings: Settings) -> None:
        self._inventory = Inventory(store)
        self._settings = settings
        self.conversations = self._inventory.conversations
        self.stats = self._inventory.stats
        self.chain = self._inventory.chain
        self.remove_conversation = self._inventory.remove_conversation
        self.remove_all = self._inventory.remove_all
        self.verify = self._inventory.verify
        self.publish = self._inventory.publish

    def remove_model(self, name: str) -> RemovalView:
        models = self._inventory.models_named(name)
        try:
            spec = Catalog(self._settings).resolve(name)
        except UnknownModel:
            if not models:
                raise
        else:
            models |= self._inventory.models_named(spec.id)
            bits = self._settings.kv_bits_of(spec.id)
            models.add(self._inventory.identify(spec, bits))
        return self._inventory.remove_models(models)


class _Listing(msgspec.Struct):
    root: str
    conversations: list[ConversationView]


class _ErrorBody(msgspec.Struct):
    message: str
    code: str | None = None


class _ErrorEnvelope(msgspec.Struct):
    error: _ErrorBody


class _ServerDesk:
    """The server that has the store, over HTTP on this machine."""

    def __init__(self, settings: Settings, root: Path) -> None:
        host = "127.0.0.1" if settings.host in _ANY else settings.host
        self._address = (host, settings.port)
        self._root = root
        self._check()

    def conversations(self, model: str | None) -> list[ConversationView]:
        query = {"model": model} if model is not None else {}
        return self._ask("GET", "", query, _Listing).conversations

    def stats(self) -> StatsView:
        return self._ask("GET", "/stats", {}, StatsView)

    def chain(self, name: str) -> ChainView:
        return self._ask("GET", "/chain", {"conversation": name}, ChainView)

    def remove_conversation(self, name: str) -> RemovalView:
        return self._ask("DELETE", "/conversations", {"conversation": name}, RemovalView)

    def remove_model(self, name: str) -> RemovalView:
        return self._ask("DELETE", "/models", {"model": name}, RemovalView)

    def remove_all(self) -> RemovalView:
        return self._ask("DELETE", "/all", {}, RemovalView)

    def verify(self) -> VerifyView:
        return self._ask("POST", "/verify", {}, VerifyView)

    def publish(self, slots: Sequence[SlotStaged]) -> PublishedView:
        body = msgspec.json.encode({"slots": slots})
        return self._ask("POST", "/publish", {}, PublishedView, body)

    def _check(self) -> None:
        """Another server may listen there, with another store."""
        root = Path(self.stats().root)
        if root.resolve() != self._root.resolve():
            raise self._unreachable(f"that server keeps its store at {root}")

    def _ask(
        self, method: str, path: str, query: Mapping[str, str], kind: type[T], body: bytes = b""
    ) -> T:
        host, port = self._address
        connection = http.client.HTTPConnection(host, port, timeout=_CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(_TIMEOUT_S)
            target = f"/admin/cache{path}" + (f"?{urlencode(query)}" if query else "")
            headers = {"content-type": "application/json"} if body else {}
            connection.request(method, target, body or None, headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException, socket.gaierror) as error:
            raise self._unreachable(f"it does not answer: {error}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise self._refused(content, answer.status)
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as error:
            raise self._unreachable("what answers there is no Hearth of this version") from error

    def _refused(self, content: bytes, status: int) -> HearthError:
        try:
            return HearthError(msgspec.json.decode(content, type=_ErrorEnvelope).error.message)
        except msgspec.MsgspecError:
            return self._unreachable(f"what answers there says {status}")

    def _unreachable(self, why: str) -> StoreUnavailable:
        host, port = self._address
        return StoreUnavailable(
            f"A server has the store at {self._root}, and at {host} port {port} {why}. "
            "Name the address it listens on with --host and --port, or stop it."
        )
