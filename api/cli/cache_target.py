"""Where `hearth cache` does its work: on the store itself, or through the server that owns it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from api.cli.block_cache import BlockCache, open_blocks_of
from api.cli.client import ServerLink
from api.cli.errors import NoServer
from runtime.cache.conversations import Exchanged, ImportRequest, Pinned
from runtime.cache.views import (
    ChainView,
    CollectedView,
    ConversationView,
    RemovalView,
    ShownView,
    StatsView,
    VerifyView,
)
from runtime.config.settings import Settings
from runtime.errors import StoreUnavailable
from runtime.progress import Watch
from store.errors import StoreError, StoreLocked

T = TypeVar("T")


class CacheService(Protocol):
    """What can be asked of a cache. All of it raises HearthError."""

    def conversations(self, model: str | None) -> list[ConversationView]: ...

    def stats(self) -> StatsView: ...

    def chain(self, name: str) -> ChainView: ...

    def remove_conversation(self, name: str) -> RemovalView: ...

    def remove_model(self, name: str) -> RemovalView: ...

    def remove_all(self) -> RemovalView: ...

    def show(self, name: str) -> ShownView: ...

    def pin(self, name: str, model: str | None) -> Pinned: ...

    def unpin(self, name: str) -> Pinned: ...

    def verify(self, watch: Watch) -> VerifyView: ...

    def collect_garbage(self, watch: Watch) -> CollectedView: ...

    def import_(self, wanted: ImportRequest, watch: Watch) -> Exchanged: ...


@contextmanager
def opened_cache(settings: Settings) -> Generator[CacheService]:
    """The store of these settings, through its server when one runs.

    Raises:
        StoreUnavailable: there is no store, it fails, or its server does not answer.
    """
    root = settings.kv_root
    if not root.is_dir():
        raise StoreUnavailable(f"There is no store at {root}. Name its home with --home.")
    try:
        store = open_blocks_of(settings)
    except StoreLocked:
        yield _ServerCache(settings, root)
        return
    except StoreError as error:
        raise StoreUnavailable(f"The store at {root} cannot be opened: {error}.") from error
    try:
        yield BlockCache(store, settings)
    except StoreError as error:
        raise StoreUnavailable(f"The store at {root} fails: {error}.") from error
    finally:
        store.close()


class _Listing(msgspec.Struct):
    root: str
    conversations: list[ConversationView]


class _ServerCache:
    """The server that has the store, over HTTP on this machine."""

    def __init__(self, settings: Settings, root: Path) -> None:
        self._link = ServerLink(settings)
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

    def show(self, name: str) -> ShownView:
        return self._ask("GET", "/conversation", {"conversation": name}, ShownView)

    def pin(self, name: str, model: str | None) -> Pinned:
        query = {"conversation": name} | ({"model": model} if model is not None else {})
        return self._ask("POST", "/pin", query, Pinned)

    def unpin(self, name: str) -> Pinned:
        return self._ask("POST", "/pin", {"conversation": name, "pinned": "false"}, Pinned)

    def verify(self, watch: Watch) -> VerifyView:
        return self._link.watched("/admin/cache/verify", VerifyView, watch)

    def collect_garbage(self, watch: Watch) -> CollectedView:
        return self._link.watched("/admin/cache/gc", CollectedView, watch)

    def import_(self, wanted: ImportRequest, watch: Watch) -> Exchanged:
        body = msgspec.json.encode(wanted)
        return self._link.watched("/admin/cache/import", Exchanged, watch, body)

    def _check(self) -> None:
        """Another server may listen there, with another store."""
        root = Path(self.stats().root)
        if root.resolve() != self._root.resolve():
            raise self._unreachable(f"that server keeps its store at {root}.")

    def _ask(
        self, method: str, path: str, query: Mapping[str, str], kind: type[T], body: bytes = b""
    ) -> T:
        try:
            target = f"/admin/cache{path}"
            return self._link.ask(method, target, kind, query=query, body=body)
        except NoServer as error:
            raise self._unreachable(error.message) from error

    def _unreachable(self, why: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"A server has the store at {self._root}, and at {self._link.url}: {why} "
            "Say which it is: its home with --home, or its address with --host and --port. Or stop "
            "it."
        )
