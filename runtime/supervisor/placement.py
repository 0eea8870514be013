"""Placement, purely: how much memory a model takes, whether it can fit, who shrinks for whom.

Memory is admitted by what was promised, not by what the allocator says at the moment: each model
that has a process holds a reservation for its weights, the KV of running requests, the peak of a
prefill and the least hot tier. What is left over is lent to running requests and hot tiers, and
comes back from these first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from runtime.config.settings import ModelSettings
from runtime.kv_sizes import MIN_HOT_BYTES
from runtime.types import ModelSpec, Struct
from store.types import ModelRow

GPU_SHARE = 0.85
"""Of the memory that a GPU has of its own: screens and other programs take some."""

MEMORY_SHARE = 0.65
"""Of the machine's memory, where the device says nothing: the rest is for everybody else."""

RUNNING_CONTEXT_SHARE = 0.25
"""Requests that run at one time are expected to fill so much of one context together."""

_RETURNED_SHARE = 0.7
_PROCESS_BYTES = 256 << 20
_PREFILL_SHARE = 0.1
_MIN_PREFILL_BYTES = 2 << 30
_READ_BYTES_PER_S = 1e9
START_S = 3.0
"""What it takes to have a model loaded beside reading its weights, where none ever was."""


class Need(Struct, frozen=True):
    """What a model takes: bytes of memory when loaded, and the seconds of one swap to it."""

    num_bytes: int
    swap_s: float


class LoadCapacity(Struct, frozen=True):
    """How much may be loaded at a time; `num_models` is None without a limit of their number.

    Either may be negative: then nothing fits before that much has left.
    """

    num_bytes: int
    num_models: int | None = None

    def without(self, reservations: Iterable[int]) -> LoadCapacity:
        """What is left beside these models, by their bytes."""
        taken = list(reservations)
        left = None if self.num_models is None else self.num_models - len(taken)
        return LoadCapacity(num_bytes=self.num_bytes - sum(taken), num_models=left)

    def with_back(self, reservations: Iterable[int]) -> LoadCapacity:
        """What there is once these models have left."""
        given = list(reservations)
        left = None if self.num_models is None else self.num_models + len(given)
        return LoadCapacity(num_bytes=self.num_bytes + sum(given), num_models=left)

    def holds(self, num_bytes: int) -> bool:
        """One more model of that size fits."""
        return num_bytes <= self.num_bytes and (self.num_models is None or self.num_models >= 1)


class Profile(Struct, frozen=True):
    """What is known of a model before it is loaded. None is what nobody measured or can tell.

    `peak_bytes` is the most that former runs used, weights included, the hot tier not; `load_ms`
    what it took to have it in another's place, `start_s` what of that is not reading its weights.
    Of `num_ranks` that share a model each holds its part, and so many as are `here` hold it on
    this machine; a peak is that of one of them.
    """

    weights_bytes: int
    context: int
    kv_bytes_per_token: int | None = None
    image_bytes: int = 0
    peak_bytes: int | None = None
    load_ms: float | None = None
    start_s: float = START_S
    num_ranks: int = 1
    num_ranks_here: int = 1

    @classmethod
    def of(cls, spec: ModelSpec, row: ModelRow | None, own: ModelSettings | None = None) -> Profile:
        """What the model's files say, what the store remembers of its former runs, its ranks.

        A draft model's weights and KV are its target's: it never comes or goes without it.
        """
        kv_bytes, draft = spec.kv_bytes_per_token, spec.draft
        if draft is not None and kv_bytes is not None:
            kv_bytes += draft.kv_bytes_per_token or 0
        return cls(
            weights_bytes=spec.nbytes + (draft.nbytes if draft is not None else 0),
            context=spec.context,
            kv_bytes_per_token=kv_bytes,
            image_bytes=spec.image_bytes,
            peak_bytes=row.peak_bytes if row is not None else None,
            load_ms=row.load_ms if row is not None else None,
            num_ranks=own.ranks if own is not None else 1,
            num_ranks_here=own.num_ranks_here if own is not None else 1,
        )


def memory_budget(memory_bytes: int, gpu_bytes: int | None = None) -> int:
    """What all models together may take, where nobody said, of a machine's memory or its GPU's."""
    if gpu_bytes is not None:
        return int(gpu_bytes * GPU_SHARE)
    return int(memory_bytes * MEMORY_SHARE)


def reservation(profile: Profile, min_hot_bytes: int = MIN_HOT_BYTES) -> int:
    """The least memory that a model needs to be served.

    Without a measured peak a prefill is taken to need a tenth of the weights, or 2 GiB, but never
    more than half of them; an image is encoded before it, not beside it. A peak counts only where
    it exceeds the KV that is expected: the runs that were measured may have been short.
    """
    shared_bytes = _here(profile, profile.weights_bytes + _work_bytes(profile))
    return shared_bytes + profile.num_ranks_here * _PROCESS_BYTES + min_hot_bytes


def rows_reserve(profile: Profile) -> int:
    """What of a reservation is for the KV of running requests: all but the peak of a prefill."""
    rest_bytes = _work_bytes(profile) - _prefill_bytes(profile)
    return _here(profile, max(_expected_kv_bytes(profile), rest_bytes))


def _work_bytes(profile: Profile) -> int:
    kv_bytes = _expected_kv_bytes(profile)
    if profile.peak_bytes is None:
        return kv_bytes + _prefill_bytes(profile)
    return max(profile.peak_bytes * profile.num_ranks - profile.weights_bytes, kv_bytes)


def _expected_kv_bytes(profile: Profile) -> int:
    return int((profile.kv_bytes_per_token or 0) * profile.context * RUNNING_CONTEXT_SHARE)


def _prefill_bytes(profile: Profile) -> int:
    floor_bytes = min(_MIN_PREFILL_BYTES, profile.weights_bytes // 2)
    guess_bytes = max(int(profile.weights_bytes * _PREFILL_SHARE), floor_bytes)
    return max(guess_bytes, profile.image_bytes)


def _here(profile: Profile, num_bytes: int) -> int:
    """The part of the ranks on this machine."""
    return num_bytes * profile.num_ranks_here // profile.num_ranks


def need(profile: Profile, min_hot_bytes: int = MIN_HOT_BYTES) -> Need:
    """What the swap policy is told of a model."""
    swap_s = profile.weights_bytes / _READ_BYTES_PER_S + profile.start_s
    if profile.load_ms is not None:
        swap_s = profile.load_ms / 1000
    return Need(num_bytes=reservation(profile, min_hot_bytes), swap_s=swap_s)


def start_s(rows: Iterable[ModelRow]) -> float:
    """What the quickest of these models' starts took beside reading its weights, in seconds.

    That is its process, which is any model's: one that was never loaded takes about as long.
    """
    starts = (
        row.load_ms / 1000 - (row.weights_bytes or 0) / _READ_BYTES_PER_S
        for row in rows
        if row.load_ms is not None
    )
    return max(min(starts, default=START_S), 0.0)


class Unreturned(Struct, frozen=True):
    """Memory that a process held and that was not available again after its end.

    `free_bytes` is what models could have had at that time.
    """

    model: str
    num_bytes: int
    free_bytes: int


def still_missing(held: Iterable[Unreturned], free_bytes: int) -> tuple[Unreturned, ...]:
    """What has not come back since, by what models could have now."""
    return tuple(
        one for one in held if free_bytes < one.free_bytes + int(one.num_bytes * _RETURNED_SHARE)
    )


def room_left(room: LoadCapacity, held: Iterable[Unreturned], free_bytes: int) -> LoadCapacity:
    """The room without what is missing, but never less of it than there really is."""
    missing = sum(one.num_bytes for one in held)
    num_bytes = max(room.num_bytes - missing, min(free_bytes, room.num_bytes))
    return LoadCapacity(num_bytes=num_bytes, num_models=room.num_models)


def hot_budgets(wishes: Mapping[str, int], spare_bytes: int) -> dict[str, int]:
    """How large the hot tier of each loaded model may be, by its model; wishes are in bytes.

    `spare_bytes` is what the reservations leave of the budget, each with its least hot tier. It
    is lent in proportion to what each wishes beyond that; a model that arrives takes its share.
    """
    beyond = {model: max(wish - MIN_HOT_BYTES, 0) for model, wish in wishes.items()}
    total = sum(beyond.values())
    lent = min(max(spare_bytes, 0), total)
    return {
        model: min(MIN_HOT_BYTES, wishes[model]) + (more * lent // total if total else 0)
        for model, more in beyond.items()
    }


def kv_pools(
    reserves: Mapping[str, int], hot: Mapping[str, int], spare_bytes: int
) -> dict[str, int]:
    """What each loaded model may take for running requests and its hot tier together, by model.

    `reserves` are those of `rows_reserve`, `hot` the hot tiers as `hot_budgets` deals them out of
    `spare_bytes`; what these leave of it is shared alike.
    """
    lent = sum(max(num_bytes - MIN_HOT_BYTES, 0) for num_bytes in hot.values())
    rest = max(spare_bytes - lent, 0) // max(len(hot), 1)
    return {
        model: reserves[model] + max(num_bytes, MIN_HOT_BYTES) + rest
        for model, num_bytes in hot.items()
    }
