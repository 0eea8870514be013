"""What a request may have of the processor while it is taken in, by exact values."""

from __future__ import annotations

import pickle
from typing import cast

import pytest

from runtime.types import ChatPrompt, GenerateRequest
from runtime.worker.input.intake_pool import CPU_S, VOCABULARY_CPU_S, IntakeTask
from runtime.worker.input.preparer import OverBudget
from runtime.worker.input.sandbox import Lane, Look, Outcome, Tried


class SlowLane:
    """Takes so many seconds of the processor for each kind of job; keeps the limits it is given."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.limits: list[float] = []

    def call(self, job: bytes, cpu_limit_s: float, look: Look) -> tuple[Outcome, float]:
        self.limits.append(cpu_limit_s)
        took_s = self.seconds[pickle.loads(job)[0]]
        look(took_s, 0)
        return Tried(), took_s


def task_of(lane: SlowLane) -> IntakeTask:
    task = IntakeTask(GenerateRequest(request_id="r", model="m", prompt=ChatPrompt(messages=())))
    task.begin(cast("Lane", lane))
    return task


def test_what_a_large_vocabulary_takes_is_not_the_requests():
    lane = SlowLane(prepare=CPU_S + 4, render=CPU_S - 1)
    task = task_of(lane)
    task.call("prepare", (), lambda: None)
    task.call("render", (), lambda: None)
    assert lane.limits[0] == VOCABULARY_CPU_S
    assert lane.limits[1] >= CPU_S


def test_what_a_request_takes_adds_up_to_its_limit():
    task = task_of(SlowLane(render=CPU_S - 1, encode=2))
    task.call("render", (), lambda: None)
    with pytest.raises(OverBudget):
        task.call("encode", (), lambda: None)
