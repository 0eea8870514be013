"""Whatever is sent to an agent is answered in the protocol's shape, and never with a 500."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.agents.schemas import AgentCreate, AgentGenerate
from tests.agents import AGENTS, Agent
from tests.running_server import RunningServer, running

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
JSON = st.recursive(
    SCALARS.filter(lambda value: value not in (float("inf"), float("-inf"))),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "refusal", "x"])}, optional={"text": st.text()}
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "x"])},
        optional={
            "content": st.text(max_size=20) | st.lists(PARTS, max_size=2) | JSON,
            "tool_call_id": st.text(max_size=4),
            "reasoning_content": st.text(max_size=4),
            "tool_calls": JSON,
        },
    ),
    max_size=3,
)
FEW = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with running(tmp_path_factory.mktemp("fuzzed")) as server:
        yield Agent.made(server, max_tokens=1)
        assert "Traceback" not in server.stderr


def fields_of(kind: Any) -> Any:
    names = [name for name in kind.__struct_fields__ if name not in ("messages", "stream")]
    return st.dictionaries(st.sampled_from(names), JSON, max_size=3)


def check(server: RunningServer, method: str, path: str, body: Any) -> None:
    response = server.request(method, path, json=body)
    assert response.status_code in (200, 201, 400, 404, 409), response.text
    if response.status_code >= 400:
        assert response.json()["error"]["message"]


@FEW
@given(fields_of(AgentCreate))
def test_any_agent(agent: Agent, body: Any):
    check(agent.server, "POST", AGENTS, body)


@FEW
@given(fields_of(AgentCreate))
def test_any_change(agent: Agent, body: Any):
    changed = Agent.made(agent.server)
    check(agent.server, "PATCH", changed.path, body)
    assert changed.view()["id"] == changed.id


@FEW
@given(fields_of(AgentGenerate), MESSAGES | JSON)
def test_any_generate(agent: Agent, body: Any, messages: Any):
    num_turns = agent.view()["turns"]
    check(
        agent.server,
        "POST",
        f"{agent.path}/generate",
        body | {"messages": messages, "max_tokens": 1, "max_completion_tokens": 1},
    )
    assert len(agent.turns()) - num_turns in (0, 1)
