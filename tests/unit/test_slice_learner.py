"""Slices are timed while nothing arrives, at nobody's expense, and once."""

import queue
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from typing_extensions import override

from runtime.kv_messages import Brought, Opened, SliceLearned
from runtime.worker.arrivals import Arrival, Quit
from runtime.worker.row_memory import RowFootprint
from runtime.worker.scheduler import Scheduler
from runtime.worker.slice_learner import MIN_COMPUTED_TOKENS, SliceLearner, Surroundings
from runtime.worker.slices import SPAN_TOKENS
from tests.kv_sessions import Session

HERE = "this device"
UNKNOWN, NEWS = Opened(b"m", b"s"), Brought(names=(), asked=())


class Counted:
    """A model whose caches count the tokens that they hold. News arrive with its n-th slice."""

    vocab_size = 100
    kv_start = 0

    def __init__(self, inbox: queue.SimpleQueue[Arrival], news: dict[int, Arrival]) -> None:
        self.stream = mx.default_stream(mx.default_device())
        self.slices: list[tuple[int, int]] = []
        self._inbox, self._news = inbox, news

    def new_kv(self, num_tokens: int = 0) -> list[Any]:
        return [KVCache()]

    def prefill(self, token_ids: list[int], kv: list[Any]) -> None:
        assert all(0 <= one < self.vocab_size for one in token_ids)
        self.slices.append((kv[0].offset, len(token_ids)))
        kv[0].update_and_fetch(*(mx.zeros((1, 1, len(token_ids), 1)) for _ in range(2)))
        if (arrival := self._news.get(len(self.slices))) is not None:
            self._inbox.put(arrival)


class Broken(Counted):
    def prefill(self, token_ids: list[int], kv: list[Any]) -> None:
        super().prefill(token_ids, kv)
        self._inbox.put(NEWS)
        raise RuntimeError("it cannot")


class Inbox(queue.SimpleQueue[Arrival]):
    """Where somebody comes sooner or later, if they are waited for without an end."""

    @override
    def get(self, block: bool = True, timeout: float | None = None) -> Arrival:
        return NEWS if timeout is None and self.empty() else super().get(block, timeout)


class Bench:
    """A learner whose model has read so many tokens at 100,000 per second; what it reported."""

    def __init__(
        self,
        news: dict[int, Arrival] | None = None,
        num_computed: int = MIN_COMPUTED_TOKENS,
        kind: type[Counted] = Counted,
    ) -> None:
        self.inbox = Inbox()
        self.reports: list[SliceLearned] = []
        self.model = kind(self.inbox, news or {})
        self.tiers = Session(self.model).tiers
        self.tiers.counts.num_computed_tokens = num_computed
        self.scheduler = Scheduler(max_batch=1, max_slice=256, block_s=1.0)
        self.scheduler.prefill_rate = 100_000.0
        around = Surroundings(self.model, self.scheduler, self.tiers, self._on_report)
        self.learner = SliceLearner(around, HERE, 256, quiet_s=0.001)

    def _on_report(self, report: SliceLearned) -> None:
        self.reports.append(report)
        self.inbox.put(Quit())

    def times_nothing(self) -> bool:
        """It waits for who comes, however long that takes, and computes nothing."""
        return self.learner.wait(self.inbox) is NEWS and not self.model.slices


def test_what_was_learned_is_used_and_reported_and_not_learned_again():
    bench = Bench()
    bench.learner.heed(UNKNOWN, is_idle=True)
    assert isinstance(bench.learner.wait(bench.inbox), Quit)
    (report,) = bench.reports
    assert report in [SliceLearned(size, HERE, was=256) for size in (256, 512)]
    assert all(at + size <= SPAN_TOKENS for at, size in bench.model.slices)
    num_slices = len(bench.model.slices)
    assert bench.learner.wait(bench.inbox) is NEWS
    assert len(bench.model.slices) == num_slices


def test_whoever_comes_is_given_at_once_and_the_pass_begins_again_in_empty_caches():
    bench = Bench(news={3: NEWS})
    bench.learner.heed(UNKNOWN, is_idle=True)
    assert bench.learner.wait(bench.inbox) is NEWS
    assert bench.model.slices == [(0, 256), (256, 256), (512, 256)]
    assert isinstance(bench.learner.wait(bench.inbox), Quit)
    assert bench.model.slices[3:5] == [(0, 256), (256, 256)]


@pytest.mark.parametrize("opened", [None, Opened(b"m", b"s", 512, HERE)])
def test_nothing_is_timed_before_the_store_is_known_or_when_it_knows(opened: Opened | None):
    bench = Bench()
    if opened is not None:
        bench.learner.heed(opened, is_idle=True)
    assert bench.times_nothing()


def test_nothing_is_timed_for_short_prompts_slow_devices_or_without_memory():
    short = Bench(num_computed=MIN_COMPUTED_TOKENS - 1)
    slow = Bench()
    slow.scheduler.prefill_rate = 511.0
    tight = Bench()
    tight.scheduler.memory.footprint = RowFootprint(per_token=2)
    tight.scheduler.memory.pool_bytes = 2 * SPAN_TOKENS - 1
    for bench in (short, slow, tight):
        bench.learner.heed(UNKNOWN, is_idle=True)
        assert bench.times_nothing()
    tight.scheduler.memory.pool_bytes = 2 * SPAN_TOKENS
    assert isinstance(tight.learner.wait(tight.inbox), Quit)


@pytest.mark.parametrize(
    ("opened", "is_idle", "size"),
    [
        (Opened(b"m", b"s", 512, HERE), True, 512),
        (Opened(b"m", b"s", 512, HERE), False, 256),
        (Opened(b"m", b"s", 512, "another device"), True, 256),
        (UNKNOWN, True, 256),
    ],
)
def test_what_this_device_learned_before_is_used_unless_a_prompt_is_begun(
    opened: Opened, is_idle: bool, size: int
):
    bench = Bench()
    bench.learner.heed(opened, is_idle=is_idle)
    assert bench.scheduler.max_slice == size


def test_a_model_that_cannot_is_not_asked_again():
    bench = Bench(kind=Broken)
    bench.learner.heed(UNKNOWN, is_idle=True)
    assert bench.learner.wait(bench.inbox) is NEWS
    assert bench.learner.wait(bench.inbox) is NEWS
    assert bench.model.slices == [(0, 256)]
    assert not bench.reports
