"""Layer caches of mlx-lm and mlx-vlm: how each class is cut into runs and put together again.

The only file that knows cache classes, those of batches among them. A class is *sliceable* when
the KV of any token range can be taken out of it, else it is *checkpointed*: its whole state is
kept at boundaries. A class that is not in the registry is refused by name; its model is served,
its KV is not kept.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import cycle
from typing import Any, Literal, NamedTuple, cast

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache

from runtime.memory import trim_heap

_MAX_THREADS = 4
_CPU = [mx.new_thread_local_stream(mx.cpu) for _ in range(min(_MAX_THREADS, os.cpu_count() or 1))]


Kind = Literal["sliceable", "checkpointed"]

_TOKEN_AXIS = 2
_ROOM_TOKENS = 256
_STEPS = 32
"""What is moved gives memory back in so many steps."""

_LM, _VLM = "mlx_lm.models.cache", "mlx_vlm.models.cache"
_SHARED: dict[str, Kind] = {
    "KVCache": "sliceable",
    "ConcatenateKVCache": "sliceable",
    "QuantizedKVCache": "sliceable",
    "RotatingKVCache": "checkpointed",
    "ChunkedKVCache": "checkpointed",
    "ArraysCache": "checkpointed",
}
_VLM_ONLY: dict[str, Kind] = {
    "BufferedRotatingKVCache": "checkpointed",
    "PoolingCache": "checkpointed",
    "SimpleKVCache": "checkpointed",
    "StaticPrefixKVCache": "checkpointed",
}
OF_VLM = "vlm."
"""What slots call mlx-vlm's classes by."""

_REGISTRY = {_LM: _SHARED, _VLM: _SHARED | _VLM_ONLY}
"""Module -> class. By name, so that a model that reads text only never imports mlx-vlm."""

_BATCH_FORMS: dict[str, dict[str, str]] = {
    _LM: {"BatchKVCache": "KVCache", "BatchRotatingKVCache": "RotatingKVCache"},
    _VLM: {
        "BatchKVCache": "KVCache",
        "BatchRotatingKVCache": "RotatingKVCache",
        "BatchPoolingCache": "PoolingCache",
        "BatchQuantizedKVCache": "QuantizedKVCache",
    },
}
"""What `extract` of a batch's cache gives; ArraysCache and CacheList are their own batch forms."""


class UnsupportedCache(ValueError):
    """A layer cache whose class is not in the registry."""

    def __init__(self, cache: object) -> None:
        super().__init__(type(cache).__name__)


class Leaf(msgspec.Struct, frozen=True):
    """One cache, found by `path` through the layers and the lists in them."""

    path: tuple[int, ...]
    class_name: str
    kind: Kind


class State(NamedTuple):
    """The checkpointed leaves at one position. `skeleton` is JSON text: each leaf's state with
    `{"array": i}` in place of the i-th of `arrays`.
    """

    arrays: list[mx.array]
    skeleton: str

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class KvLayout(msgspec.Struct, frozen=True):
    """What the layer caches of one model are, leaf by leaf."""

    leaves: tuple[Leaf, ...]

    @property
    def needs_state(self) -> bool:
        """Some layers cannot be sliced: KV can be taken up at boundaries only."""
        return any(leaf.kind == "checkpointed" for leaf in self.leaves)


def layout_of(kv: Sequence[Any]) -> KvLayout:
    """The layout of a model's caches.

    Raises:
        UnsupportedCache: one of them is of a class that nobody has shown to survive a restart.
    """
    leaves = tuple(
        Leaf(path, _class_name(cache), _kind(cache))
        for number, layer in enumerate(kv)
        for path, cache in _leaves(layer, (number,))
    )
    return KvLayout(leaves)


def cut(kv: Sequence[Any], layout: KvLayout, start: int, end: int) -> list[mx.array]:
    """The KV of tokens `[start, end)` in all sliceable leaves: arrays `[tokens, heads, dim]`.

    They share nothing with `kv` and are not evaluated yet. A leaf that was never used has no heads.

    Raises:
        ValueError: `kv` holds fewer tokens; what lies behind them is room, not KV.
    """
    return [
        _compact_slice(array, start, end) if array is not None else mx.zeros((end - start, 0, 0))
        for leaf in layout.leaves
        if leaf.kind == "sliceable"
        for array in _arrays(_holding(_at(kv, leaf.path), end))
    ]


def checkpoint(kv: Sequence[Any], layout: KvLayout) -> State:
    """The checkpointed leaves as they are now. The arrays are not evaluated yet."""
    arrays: list[mx.array] = []
    skeletons = [
        _skeleton(_needed_state(_at(kv, leaf.path)), arrays)
        for leaf in layout.leaves
        if leaf.kind == "checkpointed"
    ]
    return State(arrays, msgspec.json.encode(skeletons).decode())


def assemble(
    kv: Sequence[Any],
    layout: KvLayout,
    pieces: Sequence[Sequence[mx.array]],
    state: State | None,
    num_room: int,
) -> None:
    """Fill fresh caches with consecutive pieces as `cut` gave them, and with a checkpoint.

    `num_room` tokens can be appended before anything has to be copied again.
    """
    columns = deque(zip(*pieces, strict=True))
    num_tokens = sum(piece[0].shape[0] for piece in pieces if piece)
    for leaf, stream in zip(layout.leaves, cycle(_moving()), strict=False):
        if leaf.kind == "sliceable":
            with mx.stream(stream) if stream is not None else nullcontext():
                for _ in _fill(_at(kv, leaf.path), columns, num_tokens, num_room):
                    pass
    _set_checkpoint(kv, layout, state)


def move(
    kv: Sequence[Any],
    layout: KvLayout,
    pieces: list[Sequence[mx.array]],
    state: State | None,
    num_room: int,
) -> None:
    """As `assemble`, and evaluated; `pieces` is emptied. What nobody else holds of them leaves
    memory array by array, so that what is in memory is never much more than all of it once.
    """
    columns = deque(zip(*pieces, strict=True))
    num_tokens = sum(piece[0].shape[0] for piece in pieces if piece)
    pieces.clear()
    step_bytes = sum(one.nbytes for column in columns for one in column) // _STEPS
    num_bytes = 0
    for leaf in layout.leaves:
        if leaf.kind != "sliceable":
            continue
        for filled in _fill(_at(kv, leaf.path), columns, num_tokens, num_room):
            mx.eval(filled)
            num_bytes += filled.nbytes
            if num_bytes > step_bytes:
                num_bytes = 0
                # Or what has left would be kept for arrays of its size, here and by malloc.
                mx.clear_cache()
                trim_heap()
    _set_checkpoint(kv, layout, state)
    mx.eval(arrays_of(kv))


def _set_checkpoint(kv: Sequence[Any], layout: KvLayout, state: State | None) -> None:
    if state is not None:
        skeletons: list[Any] = msgspec.json.decode(state.skeleton)
        checkpointed = [leaf for leaf in layout.leaves if leaf.kind == "checkpointed"]
        for leaf, skeleton in zip(checkpointed, skeletons, strict=True):
            _set_state(_at(kv, leaf.path), _restored(skeleton, state.arrays))


def as_held(kv: Sequence[Any], layout: KvLayout, piece: Sequence[mx.array]) -> Sequence[mx.array]:
    """A piece as `cut` gave it in the form of these caches: quantised where they are.

    Token by token that gives the same as quantising the caches that it was cut from.
    """
    caches = [_at(kv, leaf.path) for leaf in layout.leaves if leaf.kind == "sliceable"]
    if len(piece) == sum(map(_num_columns, caches)):
        return piece
    columns = iter(piece)
    held: list[mx.array] = []
    for cache in caches:
        if not _is_a(cache, "QuantizedKVCache"):
            held += [next(columns) for _ in range(_num_columns(cache))]
            continue
        for _ in range(2):
            held += _quantised(next(columns), cache.group_size, cache.bits)
    return held


def _quantised(column: mx.array, group_size: int, bits: int) -> Sequence[mx.array]:
    if not column.size:
        return [column] * 3
    return mx.quantize(column, group_size=group_size, bits=bits)


def bytes_per_token(kv: Sequence[Any], layout: KvLayout) -> int:
    """What one token takes in the sliceable leaves of these caches."""
    arrays = [
        array
        for leaf in layout.leaves
        if leaf.kind == "sliceable"
        for array in _arrays(_at(kv, leaf.path))
        if array is not None
    ]
    return sum(a.itemsize * a.shape[1] * a.shape[3] for a in arrays)


def row_sizes(kv: Sequence[Any]) -> tuple[int, tuple[tuple[int, int], ...], int]:
    """What these caches, which hold some tokens, take: bytes of each token; of each token within
    windows, with their lengths; and bytes whatever the number of tokens.
    """
    per_token, fixed, windows = 0, 0, dict[int, int]()
    for _, cache in (leaf for number, one in enumerate(kv) for leaf in _leaves(one, (number,))):
        if not hasattr(cache, "keys"):
            fixed += _nbytes(_state(cache))
            continue
        arrays = (
            [one for one in _arrays(cache) if one is not None] if cache.keys is not None else []
        )
        each = sum(one.nbytes // one.shape[_TOKEN_AXIS] for one in arrays)
        window = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
        if window:
            windows[window] = windows.get(window, 0) + each
        else:
            per_token += each
    return per_token, tuple((each, window) for window, each in sorted(windows.items())), fixed


def arrays_of(kv: Sequence[Any]) -> list[Any]:
    """What has to be evaluated so that these caches are in memory."""
    return [
        _state(leaf) for number, cache in enumerate(kv) for _, leaf in _leaves(cache, (number,))
    ]


def _kind(cache: object) -> Kind:
    kind = _REGISTRY.get(type(cache).__module__, {}).get(type(cache).__name__)
    if kind is None:
        raise UnsupportedCache(cache)
    return kind


def _class_name(cache: object) -> str:
    """As slots have it: the two packages' classes of one name keep their states differently."""
    name = type(cache).__name__
    return f"{OF_VLM}{name}" if _is_vlm(cache) else name


def _is_vlm(cache: object) -> bool:
    return type(cache).__module__ == _VLM


def _is_a(cache: object, name: str) -> bool:
    return type(cache).__name__ == name and type(cache).__module__ in _REGISTRY


def _leaves(cache: Any, path: tuple[int, ...]) -> list[tuple[tuple[int, ...], Any]]:
    if _is_a(cache, "CacheList"):
        return [
            found
            for number, child in enumerate(cache.caches)
            for found in _leaves(child, (*path, number))
        ]
    return [(path, cache)]


def _at(kv: Sequence[Any], path: tuple[int, ...]) -> Any:
    cache: Any = kv[path[0]]
    for number in path[1:]:
        cache = cache.caches[number]
    return cache


def _holding(cache: Any, num_tokens: int) -> Any:
    if cache.keys is not None and cache.offset < num_tokens:
        raise ValueError(f"{num_tokens} tokens are asked of a cache that holds {cache.offset}")
    return cache


def _arrays(cache: Any) -> list[mx.array | None]:
    """The arrays `[1, heads, tokens, dim]` of a sliceable cache: keys, then values."""
    if cache.keys is None:
        return [None] * _num_columns(cache)
    if isinstance(cache.keys, mx.array):
        return [cache.keys, cache.values]
    return [*cache.keys, *cache.values]


def _num_columns(cache: Any) -> int:
    return 6 if _is_a(cache, "QuantizedKVCache") else 2


def _compact_slice(array: mx.array, start: int, end: int) -> mx.array:
    if array.shape[1] == 1:
        # Such a slice is contiguous already, so only a gather makes it a copy of its own.
        return mx.take(array[0, 0], mx.arange(start, end), axis=0)[:, None]
    return mx.contiguous(array[0, :, start:end].swapaxes(0, 1))


def _fill(
    cache: Any, columns: deque[tuple[mx.array, ...]], num_tokens: int, room: int
) -> Iterator[mx.array]:
    """Give a fresh sliceable cache its columns, which are the next ones; what each becomes."""
    num_columns = min(_num_columns(cache), len(columns))
    if not num_columns or not columns[0][0].shape[1]:
        for _ in range(num_columns):
            columns.popleft()
        return
    if _is_a(cache, "ConcatenateKVCache"):
        room = 0
    else:
        room += _ROOM_TOKENS - (num_tokens + room) % _ROOM_TOKENS
    joined: list[mx.array] = []
    for _ in range(num_columns):
        joined.append(_joined(columns.popleft(), room))
        yield joined[-1]
    if _is_a(cache, "QuantizedKVCache"):
        cache.keys, cache.values = tuple(joined[:3]), tuple(joined[3:])
    else:
        cache.keys, cache.values = joined
    cache.offset = num_tokens


def _joined(column: Sequence[mx.array], num_room: int) -> mx.array:
    """Token-major pieces `[tokens, heads, dim]` as one `[1, heads, tokens + room, dim]`."""
    parts = [piece.swapaxes(0, 1)[None] for piece in column]
    if num_room:
        _, num_heads, dim = column[0].shape
        parts.append(mx.zeros((1, num_heads, num_room, dim), column[0].dtype))
    return mx.concatenate(parts, axis=_TOKEN_AXIS)


def _state(cache: Any) -> Any:
    """All that a cache is, in lists. mlx-vlm leaves some of it out of `state`: its snapshot has it.

    A cache of an unknown class has what it says.
    """
    if not _is_vlm(cache):
        return cache.state
    return [[name, value] for name, value in sorted(cache.prefix_cache_snapshot().items())]


def _set_state(cache: Any, state: Any) -> None:
    if _is_vlm(cache):
        cache.prefix_cache_restore(dict(state))
    else:
        cache.state = state


def _needed_state(cache: Any) -> Any:
    """A cache's state without rows that have left the window: a slice of prefill leaves many."""
    state = _state(cache)
    if not _is_a(cache, "RotatingKVCache") or cache.keys is None or cache.keep:
        return state
    keys, values, size = cache.keys, cache.values, cache.max_size
    num_rows = keys.shape[_TOKEN_AXIS]
    index = int(cache.meta_state[3]) if _is_vlm(cache) else state[5]
    if not size < num_rows == index:
        return state
    rows = keys[..., -size:, :], values[..., -size:, :]
    if _is_vlm(cache):
        meta = cache.meta_state
        return [["meta_state", [*meta[:3], str(size)]], ["state", rows]]
    return *rows, *state[2:5], size


def _nbytes(state: Any) -> int:
    if isinstance(state, list | tuple):
        return sum(map(_nbytes, cast("Sequence[Any]", state)))
    return state.nbytes if isinstance(state, mx.array) else 0


def _skeleton(value: Any, arrays: list[mx.array]) -> Any:
    if isinstance(value, mx.array):
        arrays.append(_compact(value))
        return {"array": len(arrays) - 1}
    if isinstance(value, list | tuple):
        return [_skeleton(one, arrays) for one in cast("Sequence[Any]", value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedCache(value)


def _compact(array: mx.array) -> mx.array:
    """A copy that keeps no larger array alive: a batch's row may be a view of the whole batch."""
    if not array.size or not array.ndim:
        return mx.contiguous(array)
    return mx.take(array, mx.arange(array.shape[0]), axis=0)


def _restored(skeleton: Any, arrays: Sequence[mx.array]) -> Any:
    if isinstance(skeleton, dict):
        # A new object: caches assign into the arrays they hold.
        return mx.contiguous(arrays[cast("dict[str, int]", skeleton)["array"]])
    if isinstance(skeleton, list):
        return [_restored(one, arrays) for one in cast("list[Any]", skeleton)]
    return skeleton


def _moving() -> list[mx.ThreadLocalStream] | list[None]:
    """What to spread moving KV over; None stands for the default stream.

    On a CPU each has a thread: most of that work is touching memory for the first time.
    """
    return _CPU if mx.default_device() == mx.Device(mx.cpu) else [None]


class _Rows(BatchKVCache):
    """The rows of a batch, which may end apart: each can give back its last tokens.

    While they end together it does what upstream's does, with one row in that one's own arrays; and
    where nothing has to be hidden from one token of each, there is no mask.
    """

    keeps_shapes = False
    """Attention over several tokens is given the room behind them as well, and a mask for it."""

    def __init__(self, left_padding: list[int]) -> None:
        super().__init__(left_padding)
        self._padding = left_padding
        """The same as `left_padding`, known without waiting for the device."""
        self._ends: list[int] | None = None
        """Where the tokens of each row end, when they do not end together at `_idx`."""

    @classmethod
    def of(cls, cache: KVCache) -> _Rows:
        """One row, in its own arrays and the room behind its tokens."""
        rows = cls([0])
        rows.keys, rows.values = cache.keys, cache.values
        rows.offset, rows._idx = rows.offset + cache.offset, cache.offset
        return rows

    def take_back(self, counts: list[int]) -> None:
        """Forget so many of the last tokens of each row."""
        ends = self._ends or [self._idx] * len(counts)
        self._end_at([end - count for end, count in zip(ends, counts, strict=True)])
        self.offset = self.offset - mx.array(counts)

    def _end_at(self, ends: list[int]) -> None:
        self._idx = max(ends)
        self._ends = None if min(ends) == self._idx else ends

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        num_rows, _, num_tokens, _ = keys.shape
        gives_room = self._gives_room(num_tokens)
        if gives_room or self._ends is not None:
            self._make_room(num_tokens)
        if self._ends is None:
            held = super().update_and_fetch(keys, values)
        else:
            assert self.keys is not None
            assert self.values is not None
            at = self._ends_on_device + mx.arange(num_tokens)
            rows = mx.arange(num_rows)[:, None]
            self.keys[rows, :, at] = keys.swapaxes(1, 2)
            self.values[rows, :, at] = values.swapaxes(1, 2)
            self.offset = self.offset + num_tokens
            self._end_at([end + num_tokens for end in self._ends])
            held = self.keys_and_values()
        return (self.keys, self.values) if gives_room else held

    def _gives_room(self, num_tokens: int) -> bool:
        return self.keeps_shapes and num_tokens > 1 and not self.empty()

    @property
    def _ends_on_device(self) -> mx.array:
        """The same as `_ends`, `[rows, 1]`."""
        return (self.left_padding + self.offset)[:, None]

    def _make_room(self, num_tokens: int) -> None:
        lacking = self._num_lacking(num_tokens)
        if lacking:
            assert self.keys is not None
            assert self.values is not None
            room = [(0, 0), (0, 0), (0, lacking), (0, 0)]
            self.keys, self.values = mx.pad(self.keys, room), mx.pad(self.values, room)

    def _num_lacking(self, num_tokens: int) -> int:
        """By how many tokens the arrays have to grow for so many more."""
        assert self.keys is not None
        lacking = self._idx + num_tokens - self.keys.shape[_TOKEN_AXIS]
        return lacking + -lacking % _ROOM_TOKENS if lacking > 0 else 0

    def make_mask(  # pyright: ignore[reportIncompatibleMethodOverride] - as plain caches have it
        self,
        N: int,  # noqa: N803
        return_array: bool = False,
        window_size: int | None = None,
        **kwargs: Any,
    ) -> mx.array | None:
        gives_room = self._gives_room(N)
        if self._ends is None and not gives_room:
            if N == 1 and window_size is None and not any(self._padding):
                return None
            return super().make_mask(N, return_array, window_size=window_size, **kwargs)
        at = (self._ends_on_device + mx.arange(N))[:, None, :, None]
        columns = mx.arange(self._idx + N)
        if gives_room:
            assert self.keys is not None
            columns = mx.arange(self.keys.shape[_TOKEN_AXIS] + self._num_lacking(N))
        mask = (columns <= at) & (self.left_padding[:, None, None, None] <= columns)
        return mask if window_size is None else mask & (at < columns + window_size)

    def filter(self, batch_indices: Sequence[int]) -> None:
        ends, self._ends = self._ends, None
        if ends is not None:
            self._idx = max(ends[number] for number in batch_indices)
        before = self._idx
        super().filter(batch_indices)
        self._padding = [self._padding[number] for number in batch_indices]
        self._padding = [padding - min(self._padding) for padding in self._padding]
        if ends is not None:
            shift = before - self._idx
            self._end_at([ends[number] - shift for number in batch_indices])

    def extend(self, other: _Rows) -> None:
        ends = [*self._all_ends, *other._all_ends]
        before = self._idx, other._idx
        is_apart = self._ends is not None or other._ends is not None
        super().extend(other)
        shifts = [self._idx - one for one in before]
        paddings = zip(shifts, (self._padding, other._padding), strict=True)
        self._padding = [padding + shift for shift, each in paddings for padding in each]
        if is_apart:
            num_ours = len(ends) - other.offset.size
            self._end_at([e + shifts[n >= num_ours] for n, e in enumerate(ends)])

    @property
    def _all_ends(self) -> list[int]:
        return self._ends or [self._idx] * self.offset.size

    def extract(self, idx: int) -> KVCache:
        """One row as a view: whoever keeps its KV copies what is new in it.

        A row that is alone leaves with the arrays, and the room behind its tokens.
        """
        assert self.keys is not None
        assert self.values is not None
        row = KVCache()
        padding, end = cast("list[int]", self.left_padding.tolist())[idx], self._all_ends[idx]
        row.keys, row.values, row.offset = self.keys, self.values, end - padding
        if padding or len(self.keys) > 1:
            row.keys = self.keys[idx : idx + 1, :, padding:end]
            row.values = self.values[idx : idx + 1, :, padding:end]
        return row


class _RoomyRows(_Rows):
    """Rows for a device that has to plan attention anew for each number of keys."""

    keeps_shapes = True


def plans_attention() -> bool:
    """Whether this device makes a plan for attention over several tokens, for each number of keys.

    mlx's CUDA backend has cuDNN do it: 45 ms for a plan, where a step takes 10.
    """
    return mx.cuda.is_available() and mx.default_device() != mx.Device(mx.cpu)


def can_take_back(kv: Sequence[Any]) -> bool:
    """Whether rows of a batch of such caches can give back tokens, each its own number.

    Windows that have gone round and states that were summed up cannot be undone.
    """
    return all(type(cache) is KVCache for cache in kv)


def take_back(kv: Sequence[Any], counts: list[int]) -> None:
    """Forget so many of the last tokens of each row in the caches of a batch."""
    if any(counts):
        for cache in kv:
            cache.take_back(counts)


def add_rows(kv: Sequence[Any], others: Sequence[Any]) -> None:
    """Put the rows of another batch's caches behind those of this one."""
    for cache, other in zip(kv, others, strict=True):
        cache.extend(other)


def keep_rows(kv: Sequence[Any], numbers: Sequence[int]) -> None:
    """Leave of a batch's caches these rows only."""
    for cache in kv:
        cache.filter(numbers)


def shorten(kv: Sequence[Any], num_tokens: int) -> None:
    """Forget what the caches of one sequence hold beyond so many tokens, where they can."""
    for cache in kv:
        if type(cache) is KVCache and cache.offset > num_tokens:
            cache.trim(cache.offset - num_tokens)


def can_go_on(kv: Sequence[Any]) -> bool:
    """Whether these are caches of a sequence alone, all of whose tokens can be forgotten again.

    Those of a row that was taken out of a batch are views without room behind their tokens.
    """
    return all(
        type(cache) is KVCache
        and cache.keys is not None
        and cache.offset < cache.keys.shape[_TOKEN_AXIS]
        for cache in kv
    )


def num_bytes(kv: Sequence[Any]) -> int:
    """What the arrays of plain caches take, with the room in them."""
    return sum(cache.nbytes for cache in kv)


def handed_over(kv: Sequence[Any], *, keeps_shapes: bool = False) -> list[Any]:
    """The caches of one sequence as those of a batch, which writes behind their tokens.

    Upstream's `merge` copies, and so does the first token after it, as it leaves no room. With
    `keeps_shapes` a step of several tokens sees arrays of the same shape until their room is full.
    """
    rows = _RoomyRows if keeps_shapes else _Rows
    return [_handed_over(cache, rows) for cache in kv]


def merged(kvs: Sequence[Sequence[Any]], *, keeps_shapes: bool = False) -> list[Any]:
    """Copies of several sequences' caches as those of one batch."""
    rows = _RoomyRows if keeps_shapes else _Rows
    return [_merged(list(caches), rows) for caches in zip(*kvs, strict=True)]


def _merged(caches: list[Any], rows: type[_Rows]) -> Any:
    kind = type(caches[0])
    if kind is CacheList:
        children = zip(*(cast("Sequence[Any]", cache.caches) for cache in caches), strict=True)
        return CacheList(*(_merged(list(one), rows) for one in children))
    if kind is KVCache:
        is_empty = all(cache.keys is None for cache in caches)
        return rows([0] * len(caches)) if is_empty else rows.merge(caches)
    return kind.merge(caches)


def _handed_over(cache: Any, rows: type[_Rows]) -> Any:
    if type(cache) is CacheList:
        children = cast("Sequence[Any]", cache.caches)
        return CacheList(*(_handed_over(child, rows) for child in children))
    if type(cache) is KVCache:
        return rows.of(cache)
    return cache.merge([cache])
