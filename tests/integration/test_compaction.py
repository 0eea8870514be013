"""A compaction costs a turn: what it reuses, what goes on from it, and what is ready by then."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from runtime.keys import digest_of
from tests.integration.test_http_responses import RESPONSES, events_of
from tests.running_server import RunningServer, running
from tests.waiting import until

RULES = " ".join(f"Rule {number}: be kind to boat number {number}." for number in range(60))
TASK = "The fox is in the box; let it out and say how that was done. " * 12
LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Look at a place and say what is there. " * 8,
    "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
}
ANSWERS = 6
"""Tokens that open an answer, which a prompt ends with and the next one does not go on with."""

TRIGGER: dict[str, Any] = {"type": "compaction_trigger"}
CONFIG = f"""
prewarm_share = 0
prewarm_learned = 0
block_size = 16
admin_key = "{digest_of("admin")}"
[api_keys]
alice = "{digest_of("alice")}"
bob = "{digest_of("bob")}"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running(tmp_path_factory.mktemp("compaction"), config=CONFIG) as server:
        yield server


@pytest.fixture(scope="module")
def unprepared(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running(tmp_path_factory.mktemp("late"), config=f"prewarm = false\n{CONFIG}") as server:
        yield server


class Session:
    """A client in Codex' way: it sends its whole history, and keeps what it is answered."""

    def __init__(self, server: RunningServer, name: str, key: str = "alice") -> None:
        self.server = server
        self.name = name
        self.headers = {"authorization": f"Bearer {key}"}
        self.history: list[Any] = [said("developer", f"{name}. {RULES}"), said("user", TASK)]

    def body(self, *more: Any, **fields: Any) -> dict[str, Any]:
        return {
            "input": [*self.history, *more],
            "tools": [LOOK],
            "prompt_cache_key": self.name,
            "store": False,
            "temperature": 0,
            "max_output_tokens": 64,
        } | fields

    def ask(self, *more: Any, path: str = RESPONSES, **fields: Any) -> Any:
        body = self.body(*more, **fields)
        answer = self.server.request("POST", path, json=body, headers=self.headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def turn(self, text: str = "Go on with what is next.") -> Any:
        answer = self.ask()
        self.history += [*answer["output"], said("user", text)]
        return answer

    async def warmed(self, answer: Any) -> Any:
        """What was computed ahead of the next request."""
        path = f"/v1/prewarm/{answer['hearth']['compaction']['prewarm']}"
        view: dict[str, Any] = {}

        def is_over() -> bool:
            view.update(self.server.request("GET", path, headers=self.headers).json())
            return view["status"] not in ("waiting", "queued", "running")

        await until(is_over, "it is computed ahead")
        return view


def num_open(server: RunningServer) -> float:
    """Requests that the worker has, foreseen ones among them."""
    figures = server.request("GET", "/metrics", headers={"authorization": "Bearer admin"}).text
    lines = [one for one in figures.splitlines() if one.startswith("hearth_running{")]
    return sum(float(one.rpartition(" ")[2]) for one in lines)


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def counts(answer: Any) -> tuple[int, int]:
    usage = answer["usage"]
    return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]


def length_of(answer: Any) -> int:
    """Of what is known after an answer: its last token was never read."""
    return answer["usage"]["total_tokens"] - 1


async def test_a_compaction_reads_what_is_new_and_the_turn_after_it_what_the_client_adds(
    server: RunningServer,
) -> None:
    session = Session(server, "exact")
    session.turn()
    last = session.turn()
    asked = session.ask(TRIGGER)
    cached, _ = counts(asked)
    assert length_of(last) - 1 <= cached <= length_of(last) + 1
    (item,) = asked["output"]
    assert item["type"] == "compaction"
    view = await session.warmed(asked)
    assert view["status"] == "completed"
    # Codex goes on with what its user said, and with the item.
    session.history = [one for one in session.history if one.get("role") != "assistant"]
    session.history.append(item)
    first = session.ask(said("user", "And now?"))
    cached, num_prompt = counts(first)
    assert view["prompt_tokens"] - ANSWERS <= cached < view["prompt_tokens"]
    assert cached >= 0.98 * num_prompt
    assert first["hearth"]["cache"]["tier"] == "hot"
    figures = server.request("GET", "/metrics", headers={"authorization": "Bearer admin"}).text
    assert 'source="compaction"} 1.0' in figures


@pytest.mark.parametrize("name", ["same-one", "same-two", "same-three"])
async def test_a_summary_and_the_turn_after_it_are_the_same_where_nothing_is_computed_ahead(
    server: RunningServer, unprepared: RunningServer, name: str
) -> None:
    """The next turn is sent in the moment in which the summary is there."""
    said_by: list[Any] = []
    for one in (server, unprepared):
        session = Session(one, name)
        session.turn(f"{name}, go on. {TASK}")
        session.turn(TASK)
        asked = session.ask(TRIGGER, max_output_tokens=60)
        session.history.append(asked["output"][0])
        first = session.ask(said("user", "And now?"))
        text = [part["text"] for item in first["output"] for part in item.get("content", ())]
        said_by.append((asked["output"][0]["encrypted_content"], text, counts(first)[1]))
        await until(lambda one=one: num_open(one) == 0, "nothing is left open")
    assert said_by[0] == said_by[1]


async def test_whoever_leaves_before_his_summary_is_written_leaves_nothing_open(
    server: RunningServer,
) -> None:
    session = Session(server, "left")
    session.turn(TASK)
    for body in (session.body(TRIGGER, stream=True), session.body(TRIGGER, stream=True)):
        with server.stream("POST", RESPONSES, json=body, headers=session.headers) as answer:
            assert answer.status_code == 200
            next(answer.iter_lines())
        await until(lambda: num_open(server) == 0, "nothing is left open")
    assert counts(session.ask(TRIGGER))[0] > 0


def test_the_turn_after_a_compaction_is_known_after_the_worker_was_started_anew(
    server: RunningServer,
) -> None:
    session = Session(server, "restarted")
    session.turn()
    item = session.ask(TRIGGER)["output"][0]
    session.history.append(item)
    before = session.ask()
    path = "/admin/models/hearth-tiny/restart"
    restarted = server.request("POST", path, headers={"authorization": "Bearer admin"})
    assert restarted.status_code == 200, restarted.text
    session.history += [*before["output"], said("user", "And now?")]
    after = session.ask()
    cached, _ = counts(after)
    assert cached >= counts(before)[1] - 1
    assert after["hearth"]["cache"]["tier"] == "warm"
    assert after["hearth"]["notes"] == ["compacted_items:1"]


def test_a_stream_tells_exactly_one_compaction_item(server: RunningServer) -> None:
    session = Session(server, "streamed")
    session.turn()
    body = session.body(TRIGGER, stream=True)
    answer = server.request("POST", RESPONSES, json=body, headers=session.headers)
    events = events_of(answer.text)
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert [one["type"] for one in done] == ["compaction"]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"] == done
    assert events[-1]["response"]["hearth"]["compaction"]["prewarm"]


def test_what_is_compacted_by_its_own_route_goes_on_as_well(server: RunningServer) -> None:
    session = Session(server, "compact")
    last = session.turn()
    made = session.ask(path=f"{RESPONSES}/compact")
    assert made["object"] == "response.compaction"
    assert counts(made)[0] >= length_of(last) - 1
    roles = [(one["type"], one.get("role")) for one in made["output"]]
    assert roles == [
        ("message", "developer"),
        ("message", "user"),
        ("message", "user"),
        ("compaction", None),
    ]
    session.history = made["output"]
    assert counts(session.ask(said("user", "And now?")))[0] >= length_of(last) - 40


def test_a_stored_conversation_is_gone_on_with_from_its_summary(server: RunningServer) -> None:
    session = Session(server, "stored")
    first = session.ask(store=True)
    whole = length_of(first)
    session.history = []
    asked = session.ask(TRIGGER, store=True, previous_response_id=first["id"])
    assert [one["type"] for one in asked["output"]] == ["compaction"]
    after = session.ask(said("user", "And now?"), previous_response_id=asked["id"])
    assert after["hearth"]["notes"] == ["compacted_items:1"]
    assert counts(after)[1] > whole  # its rules, its task and the summary, which is short
    items = server.request("GET", f"{RESPONSES}/{asked['id']}/input_items", headers=session.headers)
    assert items.json()["data"] == []


def test_a_summary_is_its_senders_text_and_nobody_elses_is_reached_by_it(
    server: RunningServer,
) -> None:
    alice, bob = Session(server, "walls"), Session(server, "walls", key="bob")
    alice.turn()
    asked = alice.ask(TRIGGER, store=True)
    reference = {"type": "item_reference", "id": asked["output"][0]["id"]}
    assert alice.ask(reference, max_output_tokens=2)["hearth"]["notes"] == ["compacted_items:1"]
    body = bob.body(reference)
    refused = server.request("POST", RESPONSES, json=body, headers=bob.headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[2]")
    # Bob may send what Alice gave him, and finds nothing of hers in the cache by it.
    bob.history = [asked["output"][0]]
    assert counts(bob.ask(max_output_tokens=2))[0] == 0
    prewarm = f"/v1/prewarm/{asked['hearth']['compaction']['prewarm']}"
    assert server.request("GET", prewarm, headers=bob.headers).status_code == 404


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([TRIGGER, said("user", "hi")], "input[2]"),
        ([{"type": "compaction", "encrypted_content": "gAAAAAB"}], "input[2].encrypted_content"),
    ],
)
def test_a_bad_item_is_refused_by_its_field(
    server: RunningServer, items: list[Any], param: str
) -> None:
    session = Session(server, "bad")
    for path in (RESPONSES, f"{RESPONSES}/compact", f"{RESPONSES}/input_tokens"):
        answer = server.request("POST", path, json=session.body(*items), headers=session.headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_compaction_is_not_streamed_by_its_own_route(server: RunningServer) -> None:
    session = Session(server, "no-stream")
    body = session.body(stream=True)
    answer = server.request("POST", f"{RESPONSES}/compact", json=body, headers=session.headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
