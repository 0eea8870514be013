"""What a request is said to wait for while nothing of it can be shown."""

from __future__ import annotations

import pytest

from runtime.supervisor.generation import Generation
from runtime.types import CacheUse, Chunk, PrefillProgress, ReasoningDelta, TextDelta, ToolCallDelta
from tests.asking import request
from tests.lone_worker import Alone


@pytest.mark.parametrize(
    "chunk",
    [
        ReasoningDelta(index=0, text="hm"),
        TextDelta(index=0, text="fox"),
        ToolCallDelta(index=0, call_index=0, arguments="{", id="c", name="look"),
    ],
)
async def test_a_request_is_decoding_from_its_first_token_on_whether_it_shows_or_not(chunk: Chunk):
    generation = Generation(request("a"), Alone())
    told = [generation.phase]
    generation.accept(4096, CacheUse())
    told.append(generation.phase)
    for one in (PrefillProgress(num_done=512, num_total=4096), chunk):
        generation.push(one)
        told.append(generation.phase)
    assert told == ["queued", "prefill", "prefill 512/4096", "decoding"]
