"""Finds out in which slices a model prefills fastest here, while nobody wants anything of it.

A worker that has computed long prompts, and then has nothing to do, computes the same made-up
tokens in slices of several sizes, keeps none of it, and reports which is best. The store has that
for later workers of the same model hash, which has the version of mlx in it: it is found out once
for a device, because another grid changes the last bits of KV. What was kept before stays valid.
Whoever asks for something meanwhile waits for one slice.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from runtime.kv.tiers import Tiers
from runtime.kv_messages import Opened, SliceLearned
from runtime.worker.arrivals import Arrival
from runtime.worker.scheduler import Scheduler
from runtime.worker.slices import SliceTrial, sizes_to_time
from runtime.worker.taint import raise_if_tainted

MIN_COMPUTED_TOKENS = 8192
"""Of prompts, in this worker: a model that reads short ones gains nothing."""

_FAR_APART = 7919
"""Neighbouring tokens are unlike each other, so that experts are chosen as by real ones."""


class Timed(Protocol):
    """What is needed of a loaded model."""

    @property
    def vocab_size(self) -> int: ...

    def new_kv(self, num_tokens: int = 0) -> list[Any]: ...

    def prefill(self, token_ids: list[int], kv: list[Any]) -> None:
        """Append their KV and wait until it is there."""
        ...


class Surroundings(NamedTuple):
    """What a learner works with; `report` says what was learned."""

    model: Timed
    scheduler: Scheduler
    tiers: Tiers
    report: Callable[[SliceLearned], None]


class SliceLearner:
    """Times slices of a model one by one while nobody wants anything. Belongs to the mlx thread.

    `default` is the size of `device` for any model. It begins once it has heard that the store
    knows of none for this one, and after nothing has arrived for `quiet_s`.
    """

    def __init__(self, engine: Surroundings, device: str, default: int, quiet_s: float) -> None:
        self._model, self._scheduler, self._tiers, self._report = engine
        self._device = device
        self._default = default
        self._quiet_s = quiet_s
        self._is_wanted = False
        self._trial: SliceTrial | None = None
        self._kv: list[Any] | None = None

    def heed(self, names: Opened, *, is_idle: bool) -> None:
        """Use what the store knows, if it is of this device; if not, it is to be found out.

        Prompts that are half computed go on as they began, and so do those after them.
        """
        known = names.prefill_slice if names.slice_device == self._device else None
        self._is_wanted = known is None
        if known is not None and is_idle:
            self._scheduler.cut_into(known)

    def wait(self, inbox: queue.SimpleQueue[Arrival]) -> Arrival:
        """Wait for what arrives next, and time what is to be timed until then.

        Raises:
            EngineTainted: the device failed.
        """
        while True:
            is_due = self._is_due()
            quiet_s = 0.0 if self._kv is not None else self._quiet_s
            with contextlib.suppress(queue.Empty):
                arrival = inbox.get(timeout=quiet_s if is_due else None)
                self._kv = None
                return arrival
            try:
                self._step()
            except (RuntimeError, ValueError) as error:
                raise_if_tainted(error)
                self._is_wanted = False

    def _is_due(self) -> bool:
        """There is something to time, and memory for it that nothing has to leave."""
        is_worth_it = self._tiers.counts.num_computed_tokens >= MIN_COMPUTED_TOKENS
        if not self._is_wanted or not is_worth_it:
            return False
        if self._trial is None:
            sizes = sizes_to_time(self._default, self._scheduler.prefill_rate)
            self._trial = SliceTrial(sizes, self._default) if sizes else None
        num_bytes = self._tiers.num_bytes
        memory, trial = self._scheduler.memory, self._trial
        return trial is not None and memory.has_beside(num_bytes, trial.span_tokens)

    def _step(self) -> None:
        """Time one slice; after the last one nothing is half computed, and the size is used."""
        trial = self._trial
        assert trial is not None
        size = trial.size
        assert size is not None
        kv = self._kv
        if kv is None:
            trial.again()
        if kv is None or trial.start == 0:
            kv = self._kv = self._model.new_kv()
        positions = range(trial.start, trial.start + size)
        token_ids = [at * _FAR_APART % self._model.vocab_size for at in positions]
        start = time.perf_counter()
        self._model.prefill(token_ids, kv)
        trial.on_slice(time.perf_counter() - start)
        if trial.size is not None:
            return
        self._is_wanted, self._kv = False, None
        self._scheduler.cut_into(trial.chosen)
        self._report(SliceLearned(trial.chosen, self._device, was=self._default))
