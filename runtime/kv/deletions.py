"""Numbered deletions: what came before one is not kept, nor found, if that is what was deleted.

The server numbers deletions. Each request carries the number that held when it came, before
anything of it was looked at, and whoever is about to keep something of it asks here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from runtime.kv_messages import Forget
from store.block_names import num_common
from store.keyed_names import NOBODY, Asker, Chain

_STRAY_TOKENS = 8
"""Of the end of an answer: its KV may end before its last one, or a client give them otherwise."""


class Recognised(NamedTuple):
    """By what it is known whose a request is, and after which deletion it came.

    A conversation without a session id is known by its tokens. So many as `num_said` end with the
    last turn of ours among them, and `beginning` names how it began, up to the first answer; both
    are empty where that is not known. `root` is what its blocks' names begin with, None: any.
    """

    asker: Asker = NOBODY
    came_after: int = 0
    token_ids: Sequence[int] = ()
    beginning: bytes = b""
    num_said: int = 0
    root: bytes | None = None


class Deletions:
    """Those that something in flight may have come before.

    One thread adds, the one that hears what the worker is told; any may ask.
    """

    def __init__(self) -> None:
        self._kept: tuple[Forget, ...] = ()
        self._floor = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, news: Forget) -> None:
        """A deletion with a larger number than those before; again it is nothing new."""
        self._floor = max(self._floor, news.floor)
        kept = (one for one in self._kept if self._floor < one.number != news.number)
        self._kept = (*kept, news)

    def mean(self, one: Recognised) -> bool:
        """Whether what this is of was deleted after it had come.

        What came before all that is known here is taken for deleted.
        """
        kept = self._kept  # before the floor, which rises before anything leaves
        if one.came_after < self._floor:
            return True
        return any(concerns(news, one) for news in kept if one.came_after < news.number)


def concerns(news: Forget, one: Recognised) -> bool:
    """Whether a deletion means what this is of, whenever it came."""
    whom = news.whom
    if whom.chain is None:
        return whom.means(one.asker, news.secret)
    return one.asker == Asker(whom.model or "") and _is_of_chain(whom.chain, one)


def _is_of_chain(chain: Chain, one: Recognised) -> bool:
    """Whether it goes on from what nobody but the chain has.

    Who only begins with the same system prompt does not, nor who goes on from a turn that leaves
    the chain. Where neither is known, half of that or a block of it decides.
    """
    if not one.token_ids:  # whose it is cannot be told
        return True
    if one.root not in (None, chain.root):
        return False
    own = array("I", chain.token_ids)
    num_same, num_own = num_common(own, one.token_ids), len(own) - chain.num_shared
    goes_on = one.num_said > 0 and abs(one.num_said - len(own)) <= _STRAY_TOKENS
    if goes_on and num_same >= len(own) - _STRAY_TOKENS:
        return True
    if num_same <= chain.num_shared:
        return False
    if num_same >= len(own) - _num_stray(chain, len(own)):
        return True
    if one.num_said > num_same + 1:
        return False
    if one.beginning and chain.beginning:
        return one.beginning == chain.beginning
    is_within = num_same >= len(one.token_ids) - 1
    return is_within or num_same - chain.num_shared >= min(chain.block_size, num_own // 2)


def _num_stray(chain: Chain, num_tokens: int) -> int:
    return min(_STRAY_TOKENS, (num_tokens - chain.num_shared) // 2)
