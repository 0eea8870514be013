"""What is said of conversations in the store: which are meant, and what is done to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from runtime.cache.views import (
    ConversationView,
    RemovalView,
)
from runtime.errors import NothingKept, UnknownModel
from runtime.types import Struct
from store.keyed_names import Whom

MIN_PREFIX = 4
"""A name in lists is recognised by so many of its first letters."""


class KeptConversation(NamedTuple):
    """A conversation, and how long it stays unused: None is for ever.

    `end` is where it ends, in terms of the store. `is_pinned` says that somebody pinned the
    conversation itself.
    """

    view: ConversationView
    model: bytes
    end: str | None
    ttl_s: float | None = None
    is_pinned: bool = False


class Pinned(Struct, frozen=True):
    """Whether a conversation stays; `num_tokens` of it are on disk now."""

    id: str
    is_pinned: bool
    num_tokens: int


class ImportRequest(Struct, frozen=True):
    """What is to be taken in: a file on this machine, by its absolute path, for a model.

    Where the file does not say its tokens, they or the text they come from are given.
    """

    file: str
    model: str
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None


class Exchanged(Struct, frozen=True):
    """What went to a file or came from it; slots that were here already are not new."""

    file: str
    model: str
    num_tokens: int
    num_new_slots: int = 0


class Selection(NamedTuple):
    """Conversations that go by a name, in terms of the store, and who is meant by that."""

    name: str
    found: Sequence[Any]
    whoms: Sequence[Whom]


class ModelSelection(NamedTuple):
    """What somebody means who names a model: names that were asked, or else weights by hash."""

    names: frozenset[str]
    hashes: frozenset[bytes] = frozenset()

    def has(self, view: ConversationView) -> bool:
        """Whether a conversation is one of these."""
        return view.model in self.names or bytes.fromhex(view.model_hash) in self.hashes


class KnownModels(NamedTuple):
    """Names of models that the store has, and what the weights of each model hash go by."""

    asked: Collection[str]
    labels: Mapping[bytes, str]


class StoreJob(NamedTuple):
    """Work on the store that is done now and then; some waits until no request is open."""

    name: str
    every_s: float
    run: Callable[[], Awaitable[object]]
    is_for_idle: bool = False


def meant(
    kept: KnownModels, name: str, configured: str | UnknownModel, known: Collection[str]
) -> ModelSelection:
    """What `name` means: a name that was asked, a model, or the beginning of a hash.

    `configured` is the id that the catalog has for it, or why it has none; `known` are its models.

    Raises:
        UnknownModel: neither is there such a model, nor was there.
    """
    named = {*kept.asked, *kept.labels.values()}
    names = {name} & named
    if isinstance(configured, str):
        names.add(configured)
    if names:
        return ModelSelection(frozenset(names))
    if hashes := models_beginning(kept.labels, name):
        return ModelSelection(frozenset(), frozenset(hashes))
    assert isinstance(configured, UnknownModel)
    raise configured if configured.reason else NothingKept(name, sorted({*known, *named} - {""}))


def models_beginning(models: Iterable[bytes], prefix: str) -> set[bytes]:
    """Those whose hash begins like that, if it is long enough."""
    is_prefix = len(prefix) >= MIN_PREFIX
    return {one for one in models if is_prefix and one.hex().startswith(prefix.lower())}


def total(views: Sequence[RemovalView]) -> RemovalView:
    """What several removals did together."""
    return RemovalView(
        num_conversations=sum(one.num_conversations for one in views),
        num_slots=sum(one.num_slots for one in views),
        is_cut=all(one.is_cut for one in views),
        is_pending=any(one.is_pending for one in views),
    )
