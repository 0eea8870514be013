"""What matching, restoring and committing share: the runs, the model's layers, rates, counters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.kv.cursor import CacheCursor
from runtime.kv.deletions import Deletions, goes_through
from runtime.kv.hot import HotTier
from runtime.kv.idle_cache import IdleCaches
from runtime.kv.losses import Losses
from runtime.kv.parts import Caches, Parts
from runtime.kv.prefix_tree import PrefixTree, Run, part_of, path_to, tokens_to
from runtime.kv.rates import Rates
from runtime.slot_events import Forget
from runtime.types import MissReason
from runtime.wire import KvCounts
from store.block_names import HashChain
from store.keyed_names import Asker

_MAX_GHOSTS = 200_000


@dataclass(slots=True)
class TierState:
    """State of one model's tiers; everything in it belongs to the mlx thread."""

    model: Caches
    chain: HashChain
    model_hash: bytes
    parts: Parts
    hot: HotTier
    unsupported: str | None = None
    """The class of a layer cache, or kind of model, that nobody has shown can be kept."""
    keeps_pictures: bool = True
    """KV of prompts with pictures is kept as well."""
    is_apart: bool = False
    """There is to be a disk, and what it has of this model is not known, or not all of it."""
    rates: Rates = field(default_factory=Rates)
    counts: KvCounts = field(default_factory=KvCounts)
    ghosts: OrderedDict[bytes, MissReason] = field(
        default_factory=OrderedDict["bytes", "MissReason"]
    )
    losses: Losses = field(default_factory=Losses)
    deletions: Deletions = field(default_factory=Deletions)
    idle_caches: IdleCaches = field(default_factory=IdleCaches)
    max_hot_bytes: int = 0
    left_bytes: int | None = None
    """What running requests leave to the hot tier of the memory for both; None: enough."""
    _former: tuple[HashChain, OrderedDict[bytes, MissReason]] | None = None
    _tenants: set[str] = field(default_factory=set["str"])

    @staticmethod
    def of(
        model: Caches,
        chain: HashChain,
        model_hash: bytes,
        hot_bytes: int,
        parts: Parts | None = None,
    ) -> TierState:
        """Nothing known yet; without `parts` this process has all of the model."""
        parts = parts or Parts(model)
        hot = HotTier(PrefixTree(chain), hot_bytes)
        unsupported = parts.unsupported
        return TierState(model, chain, model_hash, parts, hot, unsupported, max_hot_bytes=hot_bytes)

    @property
    def needs_state(self) -> bool:
        """KV can be taken up at boundaries only."""
        return self.parts.needs_state

    def name(self, cursor: CacheCursor) -> None:
        """Give a request its names."""
        self._tenants.add(cursor.tenant)
        cursor.rename(self.chain)

    def rename(self, chain: HashChain, model_hash: bytes) -> list[Run]:
        """Have everything in memory bear the names of another chain.

        Gives what is only on disk, or of a tenant that nobody has named: it is forgotten.
        """
        roots = {self.chain.root_of(one): chain.root_of(one) for one in ("", *self._tenants)}
        strange = [run for run in self.hot.tree if run.root not in roots]
        forgotten = list(dict.fromkeys([*self.hot.apart(), *strange]))
        for run in forgotten:
            if run in self.hot:
                self.forget(run, "evicted")
        self.hot.rename(chain, roots.__getitem__)
        self._former, self.ghosts = (self.chain, self.ghosts), OrderedDict()
        self.losses.clear()
        self.chain, self.model_hash = chain, model_hash
        return forgotten

    def ghost_of(self, cursor: CacheCursor, position: int) -> MissReason | None:
        """Why the block of a prompt that is at this position is not there any more, if it was."""
        number = position // self.chain.block_size
        if number < len(cursor.block_hashes) and (ghost := self._ghost_of(cursor, number)):
            return ghost
        if ghost := self._ghost_within(cursor, position):
            return ghost
        is_lost = self.losses.has(self.chain, cursor, position)
        return "not_yet_durable" if is_lost else None

    def _ghost_within(self, cursor: CacheCursor, position: int) -> MissReason | None:
        """The same of a run that ended within this block."""
        size = self.chain.block_size
        begun = position - position % size
        number = begun // size
        above = cursor.block_hashes[number - 1] if number else cursor.root or self.chain.root
        ends = range(position + 1, min(begun + size, len(cursor.token_ids) + 1))
        names = (self.chain.end_hash(above, cursor.token_ids[begun:end]) for end in ends)
        return next((self.ghosts[name] for name in names if name in self.ghosts), None)

    def _ghost_of(self, cursor: CacheCursor, number: int) -> MissReason | None:
        if (reason := self.ghosts.get(cursor.block_hashes[number])) or self._former is None:
            return reason
        chain, ghosts = self._former
        token_ids = cursor.token_ids[: (number + 1) * chain.block_size]
        names = chain.block_hashes(token_ids, root=chain.root_of(cursor.tenant))
        return ghosts.get(names[number])

    def forget(self, run: Run, reason: MissReason) -> None:
        """Drop a run, and remember why it is missed."""
        self.hot.drop(run)
        self._remember([run], reason)
        self.idle_caches.let_go(self.hot.__contains__)

    def judge(self, cursor: CacheCursor) -> None:
        """Keep nothing of it, from now on, if what it is of was deleted after it had come."""
        known = cursor.recognised
        if not self.model_hash:  # nothing has the names that it has in the store
            known = known._replace(root=None)
        if self.deletions.mean(known):
            cursor.delete()

    def forget_deleted(self, news: Forget) -> tuple[list[Run], list[str]]:
        """Forget what only those used who are deleted and is not published, as `HotTier.forget`.

        It is among `deletions` already: who is told of it first adds it there, and nobody else.
        """
        self.losses.forget(news.whom, news.secret)
        chain = news.whom.chain

        def is_meant(asker: Asker) -> bool:
            return news.whom.may_mean(asker, news.secret)

        def is_theirs(run: Run) -> bool:
            is_named_so = chain is None or not self.model_hash or run.root == chain.root
            return is_named_so and (chain is None or goes_through(chain, tokens_to(run)))

        told = self.hot.forget(is_meant, is_theirs if chain is not None else None)
        self._remember(told.runs, "deleted")
        for run in told.longer:
            held = self.hot[run]
            part = self.shorten(run, held.reach(), "deleted")
            self.hot.others += [part] if part is not None and held.is_queued else []
        self.idle_caches.let_go(self.hot.__contains__)
        gone = [run for run in (*told.runs, *told.longer) if run not in self.hot]
        return gone, told.unwritten

    def lose_file(self, run: Run, reason: MissReason) -> None:
        """A run is no longer on disk; what was deleted leaves memory as well.

        What others said too was theirs when the conversation was forgotten. Whose the rest is is
        not known: written again it would be nobody's to delete.
        """
        held = self.hot[run]
        held.is_queued = held.is_queued and not held.is_saved
        held.is_written = held.is_saved = False
        held.noted.clear()
        if held.kv is None:
            self.forget(run, reason)
        else:
            going_on = (one.start for one in run.children if self.hot[one].askers)
            end = held.reach(with_nameless=reason != "deleted")
            self.shorten(run, max(end, *going_on, 0), reason)

    def shorten(self, run: Run, end: int, reason: MissReason) -> Run | None:
        """Keep in memory the whole blocks of a run up to a position, and forget the rest.

        What is kept is another run, not on disk any more. Nothing changes where the run ends
        before.
        """
        if end >= run.end:
            return None
        held, kv, size = self.hot[run], self.hot[run].kv, self.chain.block_size
        end -= end % size
        self.forget(run, reason)
        if kv is None or end <= run.start or run.media or not self.parts.can_divide:
            return None
        part = part_of(run, run.start, end, size)
        self.hot.add(part, held.part(part.num_tokens / run.num_tokens))
        self.hot.attach(part, self.parts.part(kv, 0, part.num_tokens, has_state=False))
        return part

    def set_budget(self, num_bytes: int) -> None:
        """The hot tier may have so much at the most."""
        self.max_hot_bytes = num_bytes
        self.leave_beside_rows(self.left_bytes)

    def leave_beside_rows(self, num_bytes: int | None, following: Sequence[Run] = ()) -> None:
        """So much is left to it beside running requests; None: enough.

        `following` are taken up next: the idle cache of them is among what requests have.
        """
        self.idle_caches.want(following)
        self.left_bytes, most_bytes = num_bytes, self.max_hot_bytes
        budget_bytes = most_bytes if num_bytes is None else min(most_bytes, num_bytes)
        if budget_bytes == self.hot.budget_bytes:
            self.fit_idle_caches()
            return
        is_less = budget_bytes < self.hot.num_bytes
        self.hot.budget_bytes = budget_bytes
        self.shrink()
        if is_less:
            self.parts.give_back()

    def shrink(self) -> None:
        """Keep the hot tier's budget, and remember what is missed for it."""
        forgotten = self.hot.shrink()
        self._remember(forgotten, "evicted")
        if forgotten:
            self.idle_caches.let_go(self.hot.__contains__)
        self.fit_idle_caches()

    def keep_idle(self, cursor: CacheCursor, kv: Sequence[Any]) -> None:
        """Whoever goes on from the end of a cursor is given these caches, if all of it is kept.

        Pictures have more in them than tokens say, and of the caches of ranks only a part is here.
        """
        is_plain = not cursor.media and self.parts.can_divide
        if is_plain and cursor.leaf in self.hot and cursor.num_kept == len(cursor.token_ids):
            self.idle_caches.keep(path_to(cursor.leaf, cursor.num_kept), [*kv])
            self.fit_idle_caches()

    def fit_idle_caches(self) -> None:
        """They have what running requests and the hot tier leave of the memory for both."""
        both_bytes = self.max_hot_bytes if self.left_bytes is None else self.left_bytes
        self.idle_caches.fit(both_bytes - self.hot.num_bytes)

    def _remember(self, forgotten: list[Run], reason: MissReason) -> None:
        for run in forgotten:
            for name in (*run.block_hashes, run.end_hash):
                self.ghosts[name] = reason
        while len(self.ghosts) > _MAX_GHOSTS:
            self.ghosts.popitem(last=False)
