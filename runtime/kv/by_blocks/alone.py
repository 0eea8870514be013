"""KV by blocks without a server that has heads: in memory only, and whose it is is known here."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass

from runtime.kv.by_blocks.state import KvState
from runtime.kv.by_blocks.tiers import Tiers
from runtime.kv.cursor import CacheCursor
from runtime.kv.deletions import Deletions, goes_through
from runtime.kv_messages import Awaited
from runtime.slot_events import Forget, Forgotten, Hint, HotAsked, HotBudget, HotNow, KvReport
from store.keyed_names import Asker

_FEW_HEADS = 64


@dataclass(eq=False, slots=True)
class MemoryHead:
    """A conversation as it stood when a turn ended, with the names of all that is kept of it."""

    asker: Asker
    token_ids: array[int]
    names: frozenset[bytes]
    path: tuple[bytes, ...]
    """The names of its blocks and of its end, in their order."""


class TiersAlone(Tiers):
    """As `Tiers`; the heads that they tell are kept here, and deletions looked up in them."""

    def __init__(
        self,
        state: KvState,
        deletions: Deletions,
        report: Callable[[KvReport], None],
        *,
        checks: bool = False,
    ) -> None:
        super().__init__(state, None, deletions, lambda _: None, checks=checks)
        self._alone = state
        self._answer = report
        self._heads: dict[tuple[Asker, bytes], MemoryHead] = {}
        """By the names of their ends."""
        self._most_heads = _FEW_HEADS

    def _tell_in_memory(self, cursor: CacheCursor, end: int, continues: bytes) -> None:
        """Keep the head in the place of the one that it goes on from."""
        chain, asker = self._alone.chain, cursor.asker
        last = cursor.name_at(chain, end)
        path = tuple(dict.fromkeys((*cursor.block_hashes[: end // chain.block_size], last)))
        names = {*path, *(cursor.name_at(chain, one) for one in cursor.ends if one <= end)}
        for key in ((asker, continues), (asker, last)):
            if (before := self._heads.pop(key, None)) is not None:
                names |= before.names
        token_ids = array("I", cursor.token_ids[:end])
        self._heads[asker, last] = MemoryHead(asker, token_ids, frozenset(names), path)
        if len(self._heads) > self._most_heads:  # of most nothing may be in memory any more
            for key, one in [*self._heads.items()]:
                if not any(name in self.memory for name in one.names):
                    del self._heads[key]
            self._most_heads = 2 * len(self._heads) + _FEW_HEADS

    def hear(self, news: object) -> None:
        """As `Tiers.hear`, and what servers tell where there is no disk."""
        match news:
            case Forget():
                self._forget(news)
            case Hint(whom=whom, secret=secret):
                heads = self._heads.values()
                meant = [one for one in heads if whom.means(one.asker, secret)]
                for one in meant:
                    if news.is_over:
                        super().hear(Awaited(names=one.path))
                    elif news.pause_s is not None:
                        super().hear(Awaited(names=one.path, pause_s=news.pause_s))
            case HotAsked(number=number, sessions=sessions):
                self._answer(HotNow(number=number, sessions=self._of_sessions(sessions)))
            case HotBudget():
                super().hear(news)
            case _:
                pass  # nothing else is told without a disk

    def _forget(self, news: Forget) -> None:
        """Drop what nobody has but who is deleted; it is among `deletions` already."""
        chain, size = self._alone.chain, self._alone.chain.block_size
        names: set[bytes] = set()
        for cursor in self._cursors:
            self._judge(cursor)
            if cursor.mode == "off":
                names.update(cursor.block_hashes[: cursor.num_kept // size])
                names.update(cursor.name_at(chain, end) for end in cursor.ends)
        for key, one in [*self._heads.items()]:
            if self._is_meant(news, one):
                names |= self._heads.pop(key).names
        for one in self._heads.values():
            names -= one.names
        num_pieces = self._drop(names)
        self._answer(Forgotten(number=news.number, num_forgotten=num_pieces))

    def _is_meant(self, news: Forget, head: MemoryHead) -> bool:
        chain = news.whom.chain
        is_of = news.whom.may_mean(head.asker, news.secret)
        return is_of and (chain is None or goes_through(chain, head.token_ids))

    def _of_sessions(self, session_ids: Collection[str]) -> tuple[tuple[Asker, int], ...]:
        """How many of their first tokens these conversations have in memory, if any."""
        found: dict[Asker, int] = {}
        for one in self._heads.values():
            if one.asker.session_id in session_ids:
                num_tokens = 0
                for name in one.path:
                    piece = self.memory.get(name)
                    if piece is None or piece.start != num_tokens:
                        break
                    num_tokens = piece.end
                found[one.asker] = max(found.get(one.asker, 0), num_tokens)
        return tuple((asker, num_tokens) for asker, num_tokens in found.items() if num_tokens)
