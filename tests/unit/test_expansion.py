"""What the parts of a request stand for is bounded for all of them together."""

from __future__ import annotations

import base64
import json
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.anthropic.convert import ConversionContext, messages_to_generate
from api.anthropic.schemas import MessagesRequest
from api.anthropic.signature import sign
from api.http.caller import Caller
from api.http.expansion import Expansion, may_expand
from api.openai.response_schemas import ResponseRequest
from api.responses.compaction import sealed_summary
from api.responses.convert import ResponsePlan, items_of, plan_of
from api.responses.items import SEAL, Item, seal
from runtime.config.settings import Settings
from runtime.errors import InvalidRequest
from runtime.types import ModelSpec

SPEC = ModelSpec(id="m", path="/m", context=4096, model_type="qwen3", nbytes=1, created_s=1)
MIB = 1 << 20
SETTINGS = Settings(home=Path("/nowhere"), max_body_bytes=8 * MIB)
NUM_BOMBS = 200


def planned(items: list[Item], settings: Settings = SETTINGS) -> ResponsePlan:
    return plan_of(ResponseRequest(), items, "resp_1", SPEC, Caller(), settings)


def sent(*items: dict[str, Any]) -> list[Item]:
    return items_of(msgspec.json.decode(json.dumps({"input": items}), type=ResponseRequest))


def thought(sealed: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "encrypted_content": sealed}


def damaged(sealed: str) -> str:
    """With another checksum at its end, which is met when all of it is unpacked."""
    packed = base64.b64decode(sealed.removeprefix(SEAL))
    return SEAL + base64.b64encode(packed[:-1] + bytes([packed[-1] ^ 1])).decode()


def asked(*signatures: str) -> MessagesRequest:
    blocks = [{"type": "thinking", "thinking": "", "signature": one} for one in signatures]
    turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": "hi"}]
    body = {"model": "m", "max_tokens": 1, "messages": turns}
    return msgspec.json.decode(json.dumps(body), type=MessagesRequest)


def refusal(items: list[Item]) -> InvalidRequest:
    """The refusal of these, which took not much more memory than is allowed."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="max_body_bytes") as refused:
            planned(items)
        assert tracemalloc.get_traced_memory()[1] < 6 * SETTINGS.max_body_bytes
    finally:
        tracemalloc.stop()
    return refused.value


@pytest.mark.parametrize("text", [seal("x" * MIB), damaged(seal("x" * MIB))])
def test_many_sealed_thoughts_are_refused_at_the_one_that_is_too_much(text: str) -> None:
    assert refusal(sent(*[thought(text)] * NUM_BOMBS)).param == "input[8].encrypted_content"


def test_summaries_and_thoughts_count_together() -> None:
    summary = {"type": "compaction", "encrypted_content": sealed_summary("x" * 4 * MIB)}
    items = sent(summary, *[thought(seal("x" * MIB))] * NUM_BOMBS)
    assert refusal(items).param == "input[5].encrypted_content"


def test_many_signed_thoughts_are_refused_at_the_one_that_is_too_much() -> None:
    data = asked(*[sign("x" * MIB)] * NUM_BOMBS)
    with pytest.raises(InvalidRequest, match="max_body_bytes") as refused:
        messages_to_generate(data, "msg_1", ConversionContext(SPEC, SETTINGS))
    assert refused.value.param == "messages[0].content[8].signature"


def test_a_tool_counts_each_time_that_it_is_loaded() -> None:
    tool = {"name": "f", "description": "x" * MIB, "defer_loading": True, "input_schema": {}}
    references = [{"type": "tool_reference", "tool_name": "f"}] * NUM_BOMBS
    result = {"type": "tool_result", "tool_use_id": "t", "content": references}
    turns = [{"role": "user", "content": [result]}]
    body = {"model": "m", "max_tokens": 1, "messages": turns, "tools": [tool]}
    data = msgspec.json.decode(json.dumps(body), type=MessagesRequest)
    with pytest.raises(InvalidRequest, match="max_body_bytes") as refused:
        messages_to_generate(data, "msg_1", ConversionContext(SPEC, SETTINGS))
    assert refused.value.param == "messages[0].content[0].content[7]"


def test_what_is_stored_counts_each_time_that_it_is_referred_to() -> None:
    said = {"type": "message", "role": "user", "content": "x" * MIB}
    raw = msgspec.Raw(json.dumps(said).encode())
    items = [Item(raw, f"input[{i}]", is_stored=True) for i in range(NUM_BOMBS)]
    assert refusal(items).param == "input[7]"
    assert planned([item._replace(is_stored=False) for item in items])


def test_as_much_as_a_body_may_have_is_read() -> None:
    items = sent(*[thought(seal("x" * MIB))] * 8, {"role": "user", "content": "x" * 8 * MIB})
    (said, _) = planned(items).request.prompt.messages  # type: ignore[union-attr]
    assert said.reasoning == "x" * 8 * MIB


@given(sizes=st.lists(st.integers(0, 300_000), max_size=12), most=st.integers(0, 10**6))
def test_parts_are_read_for_as_long_as_their_sum_is_allowed(sizes: list[int], most: int) -> None:
    expansion, total = Expansion(most), 0
    for number, size in enumerate(sizes):
        text = base64.b64encode(zlib.compress(b"x" * size)).decode()
        total += size
        if total > most:
            with pytest.raises(InvalidRequest) as refused:
                expansion.unpacked(text, f"items[{number}]", 10**6)
            assert refused.value.param == f"items[{number}]"
            return
        assert expansion.unpacked(text, f"items[{number}]", 10**6) == "x" * size


def test_a_part_that_is_too_long_by_itself_is_not_read() -> None:
    text = base64.b64encode(zlib.compress(b"x" * MIB)).decode()
    assert Expansion(8 * MIB).unpacked(text, "p", MIB) == "x" * MIB
    assert Expansion(8 * MIB).unpacked(text, "p", MIB - 1) is None


@pytest.mark.parametrize("name", ["encrypted_content", "encrypted\\u005fcontent", "signature"])
def test_sealed_parts_are_noticed_however_their_name_is_written(name: str) -> None:
    assert may_expand(f'{{"{name}":"x"}}'.encode())
    assert not may_expand(b'{"content":"x"}')
