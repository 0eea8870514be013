"""A draft model: a small one, whose greedy answers its target accepts as far as they are right.

It computes the rows of one batch that ask, in caches of its own. They hold a window of each row's
last tokens, are never kept, and follow what the row has said: wrong guesses are given back.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import mlx.core as mx

from runtime.kv.layers import add_rows, can_take_back, handed_over, keep_rows, take_back
from runtime.worker.model import LoadedModel, best_slice
from runtime.worker.proposals import num_accepted
from runtime.worker.sequence import Sequence
from runtime.worker.speculation import StepCosts

_WINDOW_TOKENS = 2048
"""Of what was said before a row joins so much is computed for it."""

_MOST_TOKENS = 4096
"""Of a row that has more its window is begun anew."""

_MOST_AT_ONCE = 16


class Said(NamedTuple):
    """All that a row has said, its prompt before it, and the token that comes next."""

    token_ids: list[int]
    next_id: int

    def behind(self, at: int) -> list[int]:
        """What comes from a position on."""
        return [*self.token_ids[at:], self.next_id]


@dataclass(slots=True, eq=False)
class _Row:
    """What the draft's caches hold of a row: its tokens `[start, end)`, then what was guessed."""

    sequence: Sequence
    start: int
    end: int
    guessed: list[int] = field(default_factory=list[int])


@dataclass(slots=True, eq=False)
class _Coming:
    """A row whose window is being computed: its tokens `[start, end)` are in `kv`."""

    start: int
    end: int
    kv: list[Any]


class DraftRows:
    """The rows of one batch, as the draft model knows them. Belongs to the mlx thread."""

    def __init__(self, draft: LoadedModel, vocab_size: int, costs: StepCosts) -> None:
        """Proposes none but the first `vocab_size` tokens, and says in `costs` what each takes."""
        self._draft = draft
        self._vocab_size = vocab_size
        self._costs = costs
        self._rows: list[_Row] = []
        self._coming: dict[Sequence, _Coming] = {}
        self._caches: list[Any] = []

    def is_ready(self, sequence: Sequence) -> bool:
        """Its window is there."""
        return any(row.sequence is sequence for row in self._rows)

    def prepare(self, sequence: Sequence, token_ids: list[int]) -> bool:
        """Compute some more of a row's window, a slice at most; whether there was anything to do.

        `token_ids` are all that it has said, with its prompt.
        """
        row = next((row for row in self._rows if row.sequence is sequence), None)
        if row is not None and row.end - row.start <= _MOST_TOKENS:
            return False
        if row is not None:
            self.forget(sequence)
        one = self._coming.get(sequence)
        if one is None:
            start = max(0, len(token_ids) - _WINDOW_TOKENS)
            one = self._coming[sequence] = _Coming(start, start, self._draft.new_kv())
        end = min(len(token_ids), one.end + best_slice())
        if end > one.end:
            self._draft.prefill(token_ids[one.end : end], one.kv)
        one.end = end
        if len(token_ids) - end < _MOST_AT_ONCE:
            del self._coming[sequence]
            self._join(sequence, one)
        return True

    def _join(self, sequence: Sequence, one: _Coming) -> None:
        with mx.stream(self._draft.stream):
            caches = handed_over(one.kv, keeps_shapes=self._draft.keeps_shapes)
            if self._rows:
                add_rows(self._caches, caches)
            else:
                self._caches = caches
        self._rows.append(_Row(sequence, one.start, one.end))

    def forget(self, sequence: Sequence) -> None:
        """It has left."""
        self._coming.pop(sequence, None)
        kept = [number for number, row in enumerate(self._rows) if row.sequence is not sequence]
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[number] for number in kept]
        if not kept:
            self._caches = []
            return
        with mx.stream(self._draft.stream):
            keep_rows(self._caches, kept)

    def propose(self, asked: Mapping[Sequence, Said], num_tokens: int) -> dict[Sequence, list[int]]:
        """What it says next for each of these rows, so many tokens of each; they are ready."""
        begun_s = time.perf_counter()
        with mx.stream(self._draft.stream):
            self._give_back(asked)
            logits = self._follow(asked)
            steps = [mx.argmax(logits[..., : self._vocab_size], axis=-1)]
            for _ in range(num_tokens - 1):
                logits = self._draft.model(steps[-1][:, None], cache=self._caches)[:, -1]
                steps.append(mx.argmax(logits[..., : self._vocab_size], axis=-1))
            found = cast("list[list[int]]", mx.stack(steps, axis=1).tolist())
            num_back = [0 if row.sequence in asked else num_tokens - 1 for row in self._rows]
            take_back(self._caches, num_back)
        self._costs.saw(len(self._rows), 1, (time.perf_counter() - begun_s) / num_tokens)
        proposals: dict[Sequence, list[int]] = {}
        for row, token_ids in zip(self._rows, found, strict=True):
            if row.sequence in asked:
                row.guessed = token_ids[:-1]
                proposals[row.sequence] = token_ids
        return proposals

    def _give_back(self, asked: Mapping[Sequence, Said]) -> None:
        """Forget what was guessed and not said. The next token is always computed anew."""
        counts: list[int] = []
        for row in self._rows:
            said = asked[row.sequence].token_ids if row.sequence in asked else []
            num_held = row.end + len(row.guessed)
            if said:
                since = said[row.end :]
                row.end = min(row.end, len(said))
                row.end += num_accepted(row.guessed[: len(since)], since)
            counts.append(num_held - row.end)
            row.guessed = []
        take_back(self._caches, counts)

    def _follow(self, asked: Mapping[Sequence, Said]) -> mx.array:
        """Compute what was said since: the logits `[rows, vocab]` behind the last of it."""
        lacking = [
            asked[row.sequence].behind(row.end) if row.sequence in asked else []
            for row in self._rows
        ]
        last: list[mx.array | None] = [None] * len(self._rows)
        at = 0
        while any(len(one) > at for one in lacking):
            parts = [one[at : at + _MOST_AT_ONCE] for one in lacking]
            width = max(map(len, parts))
            inputs = mx.array([[*one, *[0] * (width - len(one))] for one in parts])
            logits = self._draft.model(inputs, cache=self._caches)
            take_back(self._caches, [width - len(one) for one in parts])
            for number, part in enumerate(parts):
                if part:
                    last[number] = logits[number, len(part) - 1]
            at += _MOST_AT_ONCE
        for row, one in zip(self._rows, lacking, strict=True):
            row.end += len(one)
        some = next(one for one in last if one is not None)
        return mx.stack([some if one is None else one for one in last])


def why_no_draft(target: LoadedModel, draft: LoadedModel) -> str | None:
    """Why one model cannot draft for another, or None if it can."""
    if draft.vision_model is not None:
        return "it is a vision model"
    if not can_take_back(draft.new_kv()):
        return "some of its layers keep more than plain KV, so that wrong guesses cannot be undone"
    ours = cast("dict[str, int]", target.tokenizer.get_vocab())
    theirs = cast("dict[str, int]", draft.tokenizer.get_vocab())
    if ours != theirs:
        differing = sum(ours.get(token) != token_id for token, token_id in theirs.items())
        return (
            f"its tokenizer is another: {len(theirs)} tokens, of which {differing} have other "
            f"numbers among the {len(ours)} of its target"
        )
    return None
