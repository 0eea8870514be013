"""What one worker is told of deletions: when, which of them, and what it has yet to answer.

It belongs to the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from runtime.cache.deletion_log import Models
from runtime.kv.deletions import may_go_through
from runtime.slot_events import Forget, Forgotten
from store.keyed_names import Asker, Whom
from store.types import SlotHeader

_MAX_UNANSWERED = 100
"""Deletions. A worker that owes more answers is told of the further ones at once, and that all of
its conversations were deleted."""


class ToldDeletions:
    """`send` tells the worker, `answer` whoever waits for one that does not mean its model."""

    def __init__(self, send: Callable[[Forget], None], answer: Callable[[Forgotten], None]) -> None:
        self._send = send
        self._answer = answer
        self._model: bytes | None = None
        """The hash of its model; None: it may be any."""
        self._awaits_name = True
        self._of_some: list[tuple[Forget, Models]] = []
        """Deletions of some models: until its own is known nobody can say whether it is meant."""
        self._unanswered: dict[int, Forget] = {}
        self._further: Forget | None = None
        """Stands for all deletions that it was not told of, as it owes so many answers."""

    def begin(self, known: Iterable[tuple[Forget, Models]]) -> None:
        """It loads: tell it what was deleted before that. Nobody waits for an answer."""
        for news, models in known:
            if not self._puts_off(news, models) and self._is_meant(models):
                self._send(news)

    def named(self, model: bytes | None) -> None:
        """The hash of its model is known, or stays unknown: what waited for that is told."""
        self._model, self._awaits_name = model, False
        waiting, self._of_some = self._of_some, []
        for news, models in waiting:
            self.tell(news, models)

    def tell(self, news: Forget, models: Models) -> None:
        """Something was deleted, with these models or any."""
        if self._puts_off(news, models):
            return
        if not self._is_meant(models):
            self._answer(Forgotten(news.number, 0))
        elif len(self._unanswered) < _MAX_UNANSWERED and self._further is None:
            self._tell(news)
        else:
            self._further = Forget(news.number, Whom(), news.secret, news.floor)

    def answered(self, number: int) -> None:
        """It has forgotten what that deletion means."""
        self._unanswered.pop(number, None)
        if self._further is not None and not self._unanswered:
            news, self._further = self._further, None
            self._tell(news)

    def mean(
        self, asker: Asker, is_waited_for: Callable[[int], bool], header: SlotHeader | None
    ) -> bool:
        """Whether it was told to forget what was asked so and has yet to do it.

        Who deletes a chain waits for what comes of it, until that takes too long. From then on
        what has no session id is taken for the chain's unless its `header` says otherwise.
        """
        if self._further is not None:
            return True
        return any(
            one.whom.means(asker, one.secret)
            or (
                not is_waited_for(one.number)
                and one.whom.may_mean(asker, one.secret)
                and (header is None or may_go_through(one, header))
            )
            for one in self._unanswered.values()
        )

    def _tell(self, news: Forget) -> None:
        self._unanswered[news.number] = news
        self._send(news)

    def _is_meant(self, models: Models) -> bool:
        return models is None or self._model is None or self._model in models

    def _puts_off(self, news: Forget, models: Models) -> bool:
        """Whether it is told when its model is known: nothing of it can be written before."""
        waits = models is not None and self._awaits_name
        if waits and len(self._of_some) < _MAX_UNANSWERED:
            self._of_some.append((news, models))
            return True
        return False
