"""What is done with the KV of runs: by the one process that has all of it.

Where several ranks compute a model each does the same with its part, see `worker.distributed`.
Belongs to the mlx thread.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from runtime.kv import layers, pack
from runtime.kv.layers import KvLayout, UnsupportedCache, layout_of
from runtime.kv.pack import RunKv, Slab

SLAB_BLOCKS = 8
"""Of so many blocks a slab is at the most: one less are copied when one leaves."""


class Caches(Protocol):
    """What is needed of a loaded model."""

    @property
    def stream(self) -> mx.Stream: ...

    @property
    def kv_start(self) -> int:
        """Caches that hold so many tokens have another form than shorter ones."""
        ...

    def new_kv(self, num_tokens: int = 0) -> list[Any]:
        """Empty layer caches for one sequence, of the form that those of so many tokens have."""
        ...


class Span(NamedTuple):
    """The tokens `[start, end)` of a sequence, with the state at their end or without."""

    start: int
    end: int
    has_state: bool


class Parts:
    """Cuts runs out of live caches, puts them together again, packs and loads them.

    `unsupported` is the class of a layer cache, if any, that nobody has shown can be kept.
    """

    def __init__(self, model: Caches) -> None:
        self._model = model
        self.unsupported: str | None = None
        try:
            self._layout = layout_of(model.new_kv())
            self._late_layout = layout_of(model.new_kv(model.kv_start))
        except UnsupportedCache as error:
            self._layout = self._late_layout = KvLayout(())
            self.unsupported = str(error)
        self.needs_state = self._layout.needs_state
        """KV can be taken up at boundaries only."""

    def has(self, kv: Sequence[Any], start: int) -> bool:
        """These caches still have the tokens from `start` on as they are kept.

        Those before `kv_start` they have until they are quantised.
        """
        return start >= self._model.kv_start or layout_of(kv) == self._layout

    def bytes_per_token(self, kv: Sequence[Any]) -> int:
        """What one token takes in the sliceable layers of these caches."""
        return layers.bytes_per_token(kv, self._layout)

    def cut(self, kv: Sequence[Any], spans: Sequence[Span]) -> list[RunKv]:
        """Runs of their own, evaluated. For a state the caches must stand at the span's end."""
        with mx.stream(self._model.stream):
            runs = [self._cut(kv, one) for one in spans]
            mx.eval([array for run in runs for array in run.arrays])
        return runs

    def _cut(self, kv: Sequence[Any], span: Span) -> RunKv:
        state = layers.checkpoint(kv, self._layout) if span.has_state else None
        return RunKv(layers.cut(kv, self._layout, span.start, span.end), state)

    def cut_blocks(self, kv: Sequence[Any], spans: Sequence[Span]) -> list[RunKv]:
        """As `cut`; those without a state that follow each other are views of slabs, where all of
        them is here. One array for several blocks is cut and put together sooner than one for each.
        """
        if not self.can_divide:
            return self.cut(kv, spans)
        with mx.stream(self._model.stream):
            runs = [run for group in _groups(spans) for run in self._cut_at_once(kv, group)]
            mx.eval([array for run in runs for array in run.arrays])
        return runs

    def _cut_at_once(self, kv: Sequence[Any], spans: Sequence[Span]) -> list[RunKv]:
        if len(spans) == 1:
            return [self._cut(kv, spans[0])]
        start = spans[0].start
        slab = Slab(layers.cut(kv, self._layout, start, spans[-1].end))
        ats = [one.start - start for one in spans]
        columns = [mx.split(one, ats[1:]) for one in slab.slices]
        return [
            RunKv([column[number] for column in columns], None, slab=slab, slab_at=at)
            for number, at in enumerate(ats)
        ]

    def on_its_own(self, kv: RunKv) -> RunKv:
        """The same run with arrays of its own."""
        with mx.stream(self._model.stream):
            slices = [_whole_of([one]) for one in kv.slices]
            mx.eval(slices)
        return kv._replace(slices=slices, slab=None, slab_at=0)

    def bare(self, kv: RunKv) -> RunKv:
        """The same run without the state at its end."""
        return kv._replace(state=None)

    @property
    def can_divide(self) -> bool:
        """Runs can be divided: all of them is here."""
        return True

    def assemble(
        self, kv: Sequence[Any], pieces: Sequence[tuple[RunKv, int]], num_room: int
    ) -> None:
        """Fill fresh caches with consecutive runs, each up to its number of tokens.

        `num_room` tokens can be appended before anything has to be copied again.
        """
        state = pieces[-1][0].state if self.needs_state else None
        with mx.stream(self._model.stream):
            slices = _slices_of(pieces)
            slices = [layers.as_held(kv, self._layout, one) for one in slices]
            layers.assemble(kv, self._layout, slices, state, num_room)
            mx.eval(layers.arrays_of(kv))

    def move(self, kv: Sequence[Any], pieces: list[tuple[RunKv, int]], num_room: int) -> None:
        """As `assemble`; `pieces` is emptied, and what nobody else holds of them leaves memory
        while the caches are filled. Only where `can_divide`.
        """
        state = pieces[-1][0].state if self.needs_state else None
        with mx.stream(self._model.stream):
            slices = [layers.as_held(kv, self._layout, one) for one in _slices_of(pieces)]
            pieces.clear()
            layers.move(kv, self._layout, slices, state, num_room)

    def packed(self, kv: RunKv, start: int = 0, which: pack.Which = "all") -> pack.PackedKv:
        """The arrays of a run that begins at `start`, or only its slices or its state, as host
        bytes, without a copy.
        """
        if which == "slices":
            kv = kv._replace(state=None)
        elif which == "state":
            kv = kv._replace(slices=[])
        return pack.PackedKv(pack.pack_layout(self._layout_at(start), kv), pack.pack(kv))

    def load(
        self, layout: str, tensors: Mapping[str, mx.array], start: int, num_tokens: int
    ) -> RunKv:
        """The KV of a file that says this layout, of so many tokens from `start` on.

        Raises:
            SlotDamaged: it was written for other layers, or tensors are missing or misshapen.
        """
        said, own = self._own(layout, tensors)
        return pack.unpack(said, own, self._layout_at(start), num_tokens)

    def _layout_at(self, start: int) -> KvLayout:
        """The form in which a run that begins there is kept."""
        return self._late_layout if start >= self._model.kv_start else self._layout

    def _own(
        self, layout: str, tensors: Mapping[str, mx.array]
    ) -> tuple[str, Mapping[str, mx.array]]:
        """What of a file is this process's."""
        return layout, tensors

    def with_state(self, kv: RunKv, state: RunKv) -> RunKv:
        """A run with the state of another one."""
        return kv._replace(state=state.state)

    def give_back(self) -> None:
        """What was freed is not needed again soon."""
        mx.clear_cache()


def _whole_of(column: Sequence[mx.array]) -> mx.array:
    """The parts as one array of its own: a slice alone would keep all that it is of."""
    if len(column) == 1:
        column = (column[0][:1], column[0][1:])
    return mx.concatenate(list(column))


def _groups(spans: Sequence[Span]) -> list[list[Span]]:
    """What is cut at once: a few spans of one length that follow each other, without states."""
    groups: list[list[Span]] = []
    for one in spans:
        last = groups[-1][-1] if groups else one
        is_like = one.end - one.start == last.end - last.start and last.end == one.start
        is_bare = not (one.has_state or last.has_state)
        if is_like and is_bare and len(groups[-1]) < SLAB_BLOCKS:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _slices_of(pieces: Sequence[tuple[RunKv, int]]) -> list[list[mx.array]]:
    """The slices of consecutive runs, each up to its number of tokens; views of a slab that follow
    each other are one.
    """
    spans: list[tuple[RunKv, int]] = []
    for kv, num_tokens in pieces:
        first, num = spans[-1] if spans else (kv, 0)
        is_next = first.slab is kv.slab and first.slab_at + num == kv.slab_at
        if num and kv.slab is not None and is_next:
            spans[-1] = first, num + num_tokens
        else:
            spans.append((kv, num_tokens))
    return [_beginning(*one) for one in spans]


def _beginning(kv: RunKv, num_tokens: int) -> list[mx.array]:
    start, slices = 0, kv.slices
    if kv.slab is not None and slices and num_tokens > slices[0].shape[0]:
        start, slices = kv.slab_at, kv.slab.slices
    end = start + num_tokens
    return [one[start:end] if end - start < one.shape[0] else one for one in slices]
