"""What clients say of the time after an answer: they are away for a while, or for good.

A hint is heeded in the memory of this worker only, and by what eviction weighs: nothing is evicted
by it, and nothing is kept that would not fit.
"""

from __future__ import annotations

from runtime.kv.cursor import CacheCursor
from runtime.kv.hot import HotTier
from runtime.kv.prefix_tree import path_to
from runtime.slot_events import Hint


def heed(hot: HotTier, cursor: CacheCursor) -> None:
    """A request was answered, and said what comes after it."""
    if cursor.pause_s is not None:
        runs = (run for run, _ in path_to(cursor.leaf, cursor.num_kept))
        hot.await_return(runs, cursor.pause_s)
    if cursor.is_last:
        hot.release(lambda asker: asker == cursor.asker)


def heed_between(hot: HotTier, hint: Hint) -> None:
    """The same was said of a conversation between two requests."""
    whom, secret = hint.whom, hint.secret
    if hint.pause_s is not None:
        hot.await_return(hot.used_by(lambda asker: whom.means(asker, secret)), hint.pause_s)
    if hint.is_over:
        hot.release(lambda asker: whom.means(asker, secret))
