"""What a response repeats of its request: as much metadata as OpenAI takes, and no long texts."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from api.openai.response_schemas import ResponseRequest
from api.responses.repeated import MAX_REPEATED_BYTES, check_repeated
from runtime.errors import InvalidRequest


def asked(**fields: Any) -> ResponseRequest:
    return msgspec.json.decode(json.dumps(fields), type=ResponseRequest)


def test_what_openai_takes_is_taken_however_it_is_written() -> None:
    pairs = {f"{number}" + "請" * 62: "😀" * 512 for number in range(10)}
    check_repeated(asked(metadata=pairs | {"a": 1, "b": None, "c": {"d": [1.50]}}))


@pytest.mark.parametrize("value", ["x" * 513, "x" * 1_000_000, ["x" * 510], list(range(300))])
def test_a_longer_value_is_refused_by_its_name(value: object) -> None:
    with pytest.raises(InvalidRequest, match=r"more than 512 .*shorter") as refused:
        check_repeated(asked(metadata={"fine": "a", "long": value}))
    assert refused.value.param == "metadata.long"


def test_the_largest_of_what_is_repeated_is_named_and_what_is_not_does_not_count() -> None:
    long = "x" * MAX_REPEATED_BYTES
    check_repeated(asked(input=long, instructions="Be kind.", tools=[{"name": "a"}]))
    with pytest.raises(InvalidRequest, match=r"at most 4194304 in all.*developer") as refused:
        check_repeated(asked(instructions=long, user="a"))
    assert refused.value.param == "instructions"
    with pytest.raises(InvalidRequest, match=r"leave some out") as refused:
        check_repeated(asked(tools=[{"type": "function", "name": "a", "description": long}]))
    assert refused.value.param == "tools"
