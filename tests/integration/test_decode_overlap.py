"""The device has its next step before the tokens of the last one are read, unless that is off."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from runtime.types import GenerateRequest, SamplingParams, TokenPrompt
from runtime.worker.decode import Decoder
from runtime.worker.input.template import Template
from runtime.worker.model import LoadedModel
from runtime.worker.output.dialect import Dialect
from runtime.worker.output.parser import OutputParser
from runtime.worker.sequence import Sequence, SequenceGroup
from tests.kv_sessions import load
from tests.tiny_models import write_model

PROMPT = list(range(20, 60))
NUM_STEPS = 6


class Recorded:
    """A model that notes when it is asked for a step; what it says is its own."""

    def __init__(self, model: Any, events: list[str]) -> None:
        self._model = model
        self._events = events

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._events.append("forward")
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of mlx, in order: to begin computing, for values, to wait for the device."""
    found: list[str] = []

    def noted(event: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            if found[-1:] != [event]:
                found.append(event)
            return call(*args, **kwargs)

        return noting

    for event, owner, name in (
        ("dispatch", mx, "async_eval"),
        ("read", mx, "eval"),
        ("read", mx.array, "item"),
        ("read", mx.array, "tolist"),
        ("wait", mx, "synchronize"),
    ):
        monkeypatch.setattr(owner, name, noted(event, getattr(owner, name)))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_model(tmp_path_factory.mktemp("qwen3"), "qwen3"))


def group_of(model: LoadedModel) -> SequenceGroup:
    """A request that was read, but for its last token."""
    group = SequenceGroup(
        request=GenerateRequest(
            request_id="r",
            model="m",
            prompt=TokenPrompt(token_ids=tuple(PROMPT)),
            sampling=SamplingParams(temperature=0.0),
            ignore_eos=True,
        ),
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        max_tokens=100,
        deadline_s=time.monotonic() + 60,
    )
    detokenizer = Template(model.tokenizer).detokenizer(PROMPT)
    group.sequences = [Sequence(group, 0, OutputParser(Dialect(), index=0), detokenizer)]
    group.kv = model.new_kv()
    model.prefill(PROMPT[:-1], group.kv)
    return group


def _next(decoder: Decoder) -> int:
    (token,) = decoder.step()
    return token.token_id


def decoded(decoder: Decoder, model: LoadedModel, events: list[str]) -> list[int]:
    """Some tokens; `events` then has those of the last steps."""
    group = group_of(model)
    decoder.insert(group, group.sequences, takes=True)
    first = _next(decoder)
    events.clear()
    return [first, *(_next(decoder) for _ in range(NUM_STEPS))]


@pytest.mark.parametrize("is_batchable", [True, False], ids=["batch", "solo"])
def test_the_next_step_is_on_the_device_before_the_token_of_the_last_one_is_read(
    model: LoadedModel, events: list[str], is_batchable: bool
):
    recorded = replace(model, model=Recorded(model.model, events), is_batchable=is_batchable)
    said = decoded(Decoder(recorded, 4), model, events)
    assert events == ["forward", "dispatch", "read"] * NUM_STEPS
    waiting = decoded(Decoder(recorded, 4, overlaps=False), model, events)
    assert events == ["forward", "dispatch", "read", "wait"] * NUM_STEPS
    assert waiting == said
