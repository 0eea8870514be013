"""KV by blocks without a server that has heads: in memory only, and whose it is is known here."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from runtime.kv.by_blocks.state import KvState
from runtime.kv.by_blocks.tiers import Tiers
from runtime.kv.cursor import CacheCursor
from runtime.kv.deletions import Deletions, goes_through
from runtime.kv_messages import Awaited, Drop, Ended
from runtime.kv_messages import KvReport as Report
from runtime.slot_events import Forget, Forgotten, Hint, HotAsked, HotBudget, HotNow, KvReport
from store.keyed_names import Asker

_MAX_HEADS = 4096


@dataclass(eq=False, slots=True)
class MemoryHead:
    """A conversation as it stood when a turn ended, with the names of all that is kept of it."""

    asker: Asker
    root: bytes
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
        super().__init__(state, None, self._take, checks=checks)
        self._alone = state
        self._deletions = deletions
        self._answer = report
        self._heads: list[MemoryHead] = []

    def begin(self, cursor: CacheCursor) -> None:
        """As `Tiers.begin`; what it is of may have been deleted after it came."""
        self._judge(cursor)
        super().begin(cursor)

    def _judge(self, cursor: CacheCursor) -> None:
        if self._deletions.mean(cursor.recognised._replace(root=None)):
            cursor.delete()

    def _take(self, told: Report) -> None:
        """A head was told: keep it in the place of the one that it goes on from."""
        if not isinstance(told, Ended):
            return
        token_ids, chain = array("I", told.token_ids), self._alone.chain
        cursor = CacheCursor(token_ids=token_ids, root=told.root)
        cursor.extend(chain, token_ids)
        names = {*cursor.block_hashes, *(cursor.name_at(chain, end) for end in told.ends)}
        end = cursor.name_at(chain, len(token_ids))
        path = (*cursor.block_hashes, *(() if end in cursor.block_hashes else (end,)))
        for one in [one for one in self._heads if one.asker == told.asker]:
            if one.root == told.root and one.token_ids == token_ids[: len(one.token_ids)]:
                names |= one.names
                self._heads.remove(one)
        self._heads.append(
            MemoryHead(told.asker, told.root, token_ids, frozenset({*names, end}), path)
        )
        if len(self._heads) > _MAX_HEADS:
            there = (one for one in self._heads if any(name in self.memory for name in one.names))
            self._heads = list(there)[-_MAX_HEADS:]

    def hear(self, news: object) -> None:
        """As `Tiers.hear`, and what servers tell where there is no disk."""
        match news:
            case Forget():
                self._forget(news)
            case Hint(whom=whom, secret=secret):
                meant = [one for one in self._heads if whom.means(one.asker, secret)]
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
        for cursor in self._cursors:
            self._judge(cursor)
        chain = news.whom.chain
        gone = [
            one
            for one in self._heads
            if news.whom.may_mean(one.asker, news.secret)
            and (chain is None or goes_through(chain, one.token_ids))
        ]
        self._heads = [one for one in self._heads if one not in gone]
        owned = Counter(name for one in self._heads for name in one.names)
        names = {name for one in gone for name in one.names if name not in owned}
        num_pieces = sum(name in self.memory for name in names)
        super().hear(Drop(number=news.number, names=tuple(names)))
        self._answer(Forgotten(number=news.number, num_forgotten=num_pieces))

    def _of_sessions(self, session_ids: Collection[str]) -> tuple[tuple[Asker, int], ...]:
        """How many of their first tokens these conversations have in memory, if any."""
        found: dict[Asker, int] = {}
        for one in self._heads:
            if one.asker.session_id in session_ids:
                num_tokens = 0
                for name in one.path:
                    piece = self.memory.get(name)
                    if piece is None or piece.start != num_tokens:
                        break
                    num_tokens = piece.end
                found[one.asker] = max(found.get(one.asker, 0), num_tokens)
        return tuple((asker, num_tokens) for asker, num_tokens in found.items() if num_tokens)
