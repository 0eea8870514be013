"""`/v1/conversations`: what is said in responses stays under one id, whole, and its owner's."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import openai
import pytest

from runtime.keys import digest_of
from tests.running_server import RunningServer, running

MODEL = "hearth-tiny"
KEPT: Any = {"type": "message", "role": "user", "content": "The lamp is green."}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    config = "".join(
        f'[api_keys]\nalice = "{digest_of("hearth-alice")}"\nbob = "{digest_of("hearth-bob")}"\n'
    )
    with running(tmp_path_factory.mktemp("home"), config=config) as server:
        yield server
        assert "Traceback" not in server.stderr


def client_of(server: RunningServer, name: str = "alice") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=f"hearth-{name}", max_retries=0)


def texts(client: openai.OpenAI, conversation_id: str) -> list[str]:
    """What the messages say, the oldest first."""
    found: list[Any] = [*client.conversations.items.list(conversation_id, order="asc", limit=2)]
    return [part.text for item in found if item.type == "message" for part in item.content]


def said(client: openai.OpenAI, conversation_id: str, text: str, **more: Any) -> Any:
    return client.responses.create(
        model=MODEL,
        input=text,
        conversation=conversation_id,
        max_output_tokens=more.pop("max_output_tokens", 16),
        temperature=0,
        **more,
    )


def test_each_response_goes_on_from_all_that_was_said_and_adds_to_it(server: RunningServer) -> None:
    client = client_of(server)
    talk = client.conversations.create(items=[KEPT], metadata={"topic": "lamps"})
    first = said(client, talk.id, "Which colour is it? Say no more than that, please. " * 8)
    second = said(client, talk.id, "And now?", store=False)
    assert first.conversation is not None
    assert first.conversation.id == talk.id
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 8
    assert texts(client, talk.id) == [
        "The lamp is green.",
        "Which colour is it? Say no more than that, please. " * 8,
        first.output_text,
        "And now?",
        second.output_text,
    ]
    by_hand = client.responses.input_tokens.count(
        model=MODEL,
        input=[
            KEPT,
            {"role": "user", "content": texts(client, talk.id)[1]},
            *[item.to_dict() for item in first.output],
            {"role": "user", "content": "And now?"},
        ],
    )
    assert second.usage.input_tokens == by_hand.input_tokens


def test_what_is_streamed_or_made_in_the_background_is_added_once(server: RunningServer) -> None:
    client = client_of(server)
    talk = client.conversations.create()
    with said(client, talk.id, "One.", stream=True) as events:
        assert [event.type for event in events][-1] in ("response.completed", "response.incomplete")
    later = said(client, talk.id, "Two.", background=True)
    with client.responses.retrieve(later.id, stream=True) as events:
        assert [event.type for event in events][-1] in ("response.completed", "response.incomplete")
    found = texts(client, talk.id)
    assert (len(found), found[0], found[2]) == (4, "One.", "Two.")


def test_items_and_metadata_are_changed_and_deleted(server: RunningServer) -> None:
    client = client_of(server)
    talk = client.conversations.create(items=[KEPT], metadata={"topic": "lamps"})
    assert client.conversations.retrieve(talk.id).metadata == {"topic": "lamps"}
    changed = client.conversations.update(talk.id, metadata={"topic": "doors"})
    assert changed.metadata == client.conversations.retrieve(talk.id).metadata == {"topic": "doors"}
    more = client.conversations.items.create(
        talk.id, items=[{"role": "user", "content": "The door is red."}]
    )
    item_id = more.data[0].id or ""
    item: Any = client.conversations.items.retrieve(item_id, conversation_id=talk.id)
    assert item.content[0].text == "The door is red."
    client.conversations.items.delete(item_id, conversation_id=talk.id)
    assert texts(client, talk.id) == ["The lamp is green."]
    with pytest.raises(openai.NotFoundError) as gone:
        client.conversations.items.retrieve(item_id, conversation_id=talk.id)
    assert gone.value.param == "item_id"
    assert client.conversations.delete(talk.id).deleted
    for ask in (
        lambda: client.conversations.retrieve(talk.id),
        lambda: client.conversations.items.list(talk.id),
        lambda: client.conversations.delete(talk.id),
        lambda: said(client, talk.id, "Hello?"),
    ):
        with pytest.raises(openai.NotFoundError, match="was deleted") as unknown:
            ask()
        assert unknown.value.param == "conversation"


def test_what_deletes_its_name_deletes_all_of_it_whatever_its_requests_are_called(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as server:
        client = client_of(server)
        talk = client.conversations.create(items=[KEPT])
        made = [
            said(client, talk.id, f"Number {name}.", extra_body={"session_id": name})
            for name in ("one", "two")
        ]
        where = {"conversation": talk.id}
        gone = server.request("DELETE", "/admin/cache/conversations", params=where)
        assert gone.status_code < 300, gone.text
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(talk.id)
        for one in made:
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(one.id)


def test_nobody_finds_anothers_and_no_response_is_taken_for_one(server: RunningServer) -> None:
    alice, bob = client_of(server), client_of(server, "bob")
    talk = alice.conversations.create(items=[KEPT])
    response = said(alice, talk.id, "Hello.")
    for client, one_id in ((bob, talk.id), (alice, response.id)):
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(one_id)
        with pytest.raises(openai.NotFoundError):
            said(client, one_id, "Hello.")
        with pytest.raises(openai.NotFoundError):
            client.conversations.items.create(one_id, items=[KEPT])
        with pytest.raises(openai.NotFoundError):
            client.conversations.delete(one_id)
    assert len(texts(alice, talk.id)) == 3


def test_what_is_refused_or_fails_adds_nothing(server: RunningServer) -> None:
    client = client_of(server)
    talk = client.conversations.create(items=[KEPT])
    with pytest.raises(openai.BadRequestError) as both:
        said(client, talk.id, "Hello.", previous_response_id="resp_1")
    assert both.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError):
        said(client, talk.id, "Hello.", tool_choice={"type": "function", "name": "nothing"})
    endless: Any = {"max_output_tokens": 4000, "extra_body": {"ignore_eos": True}}
    with said(client, talk.id, "Hello.", stream=True, **endless) as events:
        next(iter(events))  # and leave
    assert texts(client, talk.id) == ["The lamp is green."]


def test_a_conversation_outlives_its_server_and_the_responses_in_it(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        client = client_of(server)
        talk = client.conversations.create(items=[KEPT])
        first = said(client, talk.id, "Hello.")
        client.responses.delete(first.id)
        server.process.kill()
    with running(tmp_path) as server:
        client = client_of(server)
        assert texts(client, talk.id) == ["The lamp is green.", "Hello.", first.output_text]
        assert said(client, talk.id, "Again.").usage.input_tokens > first.usage.input_tokens


def test_an_item_that_only_a_conversation_has_can_be_referred_to_by_its_owner(
    server: RunningServer,
) -> None:
    alice, bob = client_of(server), client_of(server, "bob")
    talk = alice.conversations.create()
    added = alice.conversations.items.create(talk.id, items=[KEPT]).data[0].id or ""
    reference: Any = [{"type": "item_reference", "id": added}]
    by_id = alice.responses.input_tokens.count(model=MODEL, input=reference)
    itself = alice.responses.input_tokens.count(model=MODEL, input=[KEPT])
    assert by_id.input_tokens == itself.input_tokens

    def refused(client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="not stored") as unknown:
            client.responses.create(model=MODEL, input=reference, max_output_tokens=16)
        assert unknown.value.param == "input[0]"

    refused(bob)
    alice.conversations.items.delete(added, conversation_id=talk.id)
    refused(alice)


def test_a_page_of_items_is_bounded_and_all_of_them_are_found(server: RunningServer) -> None:
    client = client_of(server)
    talk = client.conversations.create()
    for number in range(3):
        text = f"{number}" + "x" * 7_000_000
        client.conversations.items.create(
            talk.id, items=[{"type": "message", "role": "user", "content": text}]
        )
    page = client.conversations.items.list(talk.id, order="asc")
    assert (len(page.data), page.has_more) == (2, True)
    found: list[Any] = [*client.conversations.items.list(talk.id, order="asc")]
    assert [item.content[0].text[0] for item in found] == ["0", "1", "2"]


def test_more_items_than_a_conversation_has_are_not_gone_on_from(server: RunningServer) -> None:
    client = client_of(server)
    talk = client.conversations.create()
    short: Any = {"role": "user", "content": "a"}
    with pytest.raises(openai.BadRequestError, match=r"items has 16385 .* further requests"):
        client.conversations.items.create(talk.id, items=[short] * 16_385)
    for _ in range(2):
        client.conversations.items.create(talk.id, items=[short] * 9_000)
    with pytest.raises(openai.BadRequestError, match=r"conversation has 18000 entries"):
        said(client, talk.id, "And now?")
