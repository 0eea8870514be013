"""No history ends a conversation: what was sent before is mended where it cannot be read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.damaged import DAMAGES, HISTORIES, USAGES, Damaged, conversation, damaged
from tests.running_server import RunningServer

SEAM_TOKENS = 4
"""What of the end of a common prefix may be computed again."""
FORM = settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def posted(server: RunningServer, path: str, body: Any) -> Any:
    """The answer; the body is written as clients do, with halves of characters escaped."""
    found = server.request(
        "POST",
        path,
        content=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    assert found.status_code == 200, found.text
    return found.json()


def read(server: RunningServer, body: Any) -> tuple[list[int], str]:
    """The prompt, in tokens and as text."""
    view = posted(server, "/admin/prompt/explain", body)
    return view["tokens"], "".join(part["text"] for part in view["parts"])


def num_common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("name", HISTORIES)
@FORM
@given(data=st.data())
def test_a_damaged_past_is_answered_and_what_is_whole_of_it_is_read_and_reused(
    name: str, server: RunningServer, data: st.DataObject
) -> None:
    path, field = HISTORIES[name]
    body = conversation(name, data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    posted(server, path, body)
    tokens, _ = read(server, body)
    wish = data.draw(st.lists(st.tuples(st.integers(0, 10**6), DAMAGES), min_size=1, max_size=3))
    broken: Damaged = damaged(body, field, wish)
    first, again = (posted(server, path, broken.body) for _ in range(2))
    now, text = read(server, broken.body)
    assert [word for word in broken.words if word not in text] == []
    num_prompt = USAGES[name](again)
    assert num_prompt == len(now)
    assert first["hearth"]["cache"]["cached_tokens"] >= num_common(tokens, now) - SEAM_TOKENS
    assert again["hearth"]["cache"]["cached_tokens"] >= num_prompt - 1
