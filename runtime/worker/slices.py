"""How many tokens a slice of prefill is to have on this device for this model, purely.

Which number computes fastest depends on both, and moves a model by some per cent, either way. It
is found out once, by computing the same tokens in slices of several sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

SIZES = (256, 512, 1024, 2048, 4096)
MAX_SLICE_S = 1.0
"""A longer slice is neither timed nor chosen: who comes next would wait for it."""

SPAN_TOKENS = 2048
"""Each size computes so many tokens at the least, from an empty cache on."""

_MAX_GROWTH = 2
"""Times the device's own size: what one slice takes beside its KV grows with it."""

NUM_ROUNDS = 3
_GAIN = 1.05
_ALIKE = 1.02
_HOPELESS = 1.25


def sizes_to_time(default: int, tokens_per_s: float) -> tuple[int, ...]:
    """Those to be compared where `default` is the device's own; none where there is no choice."""
    most = min(default * _MAX_GROWTH, tokens_per_s * MAX_SLICE_S)
    sizes = tuple(size for size in SIZES if size <= most)
    return sizes if default in sizes and len(sizes) > 1 else ()


def choose_slice(times_s: Mapping[int, Sequence[float]], default: int) -> int:
    """By the seconds that each size took for the same tokens, in one round after the other.

    The default stays unless a twentieth is gained in every round: what else the machine did in
    one is not learned. Of those as fast as the fastest the shortest is chosen, because others get
    their turn between two slices.
    """
    base = times_s[default]
    gaining = {
        size: median(each)
        for size, each in times_s.items()
        if base
        and len(each) == len(base)
        and all(one * _GAIN <= theirs for one, theirs in zip(each, base, strict=True))
    }
    fastest = min(gaining.values(), default=0.0)
    return min((one for one in gaining if gaining[one] <= fastest * _ALIKE), default=default)


class SliceTrial:
    """Which slice to time next, and what all took. Pure: times are told to it."""

    def __init__(self, sizes: Sequence[int], default: int) -> None:
        self.span_tokens = max(SPAN_TOKENS, *sizes)
        self._default = default
        self._times_s: dict[int, list[float]] = {size: [] for size in sizes}
        self._round = list(sizes)
        self._num_rounds = 0
        self._seconds = 0.0
        self.start = 0
        """Where the next slice begins; at 0 in empty caches."""

    @property
    def size(self) -> int | None:
        """Tokens of the next slice; None when there is nothing more to time."""
        return self._round[0] if self._round else None

    @property
    def chosen(self) -> int:
        """The size that the times speak for so far."""
        return choose_slice(self._times_s, self._default)

    def on_slice(self, seconds: float) -> None:
        """The next slice took so long."""
        self._seconds += seconds
        self.start += self._round[0]
        if self.start < self.span_tokens:
            return
        self._times_s[self._round.pop(0)].append(self._seconds)
        self.again()
        if not self._round:
            self._end_round()

    def again(self) -> None:
        """The slices of the present size come once more from the first on."""
        self.start, self._seconds = 0, 0.0

    def _end_round(self) -> None:
        self._num_rounds += 1
        fastest = min(min(each) for each in self._times_s.values())
        for size in [one for one in self._times_s if one != self._default]:
            if min(self._times_s[size]) > fastest * _HOPELESS:
                del self._times_s[size]
        if self._num_rounds < NUM_ROUNDS and len(self._times_s) > 1:
            # Forwards and backwards in turn: a device that becomes slower favours nobody.
            self._round = sorted(self._times_s, reverse=self._num_rounds % 2 == 1)
