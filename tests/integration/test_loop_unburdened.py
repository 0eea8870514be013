"""Whatever is asked, no turn of the server's event loop does what takes as long as a prompt is."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ops.bench.nasty_bodies import Route, one_of_each, routes
from runtime.config.settings import Settings
from tests.counted_loop import Counts
from tests.running_server import CHAT, COMPLETIONS, RunningServer, started
from tests.tiny_models import CHAT_TEMPLATE, write_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

MOST_BYTES = 16 << 20
CONFIG = f"""
default_model = "tiny"
max_body_bytes = {MOST_BYTES}
[limits.generate]
output_tokens = 16
"""
LONG = "word " * ((MOST_BYTES - 1000) // 5)
"""Nearly all of the largest body that is read."""
MOST_CHARACTERS = MOST_BYTES // 2
"""Of a body the loop reads a quarter of a megabyte at once, in some twenty passes."""
MANY = 16_000
MOST_CALLS = MANY // 4

CUT = CHAT_TEMPLATE.replace("{{ message.content }}", "{{ message.content[:64] }}")
"""The model reads the beginning of each message, and so it answers a long one at once."""

Body = dict[str, Any]
Bodies = Callable[[str, str], Body]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def counted(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Counted]:
    counts = Counts(tmp_path_factory.mktemp("counts"))
    home = tmp_path_factory.mktemp("home")
    model = write_model(home / "models" / "tiny")
    (model / "chat_template.jinja").write_text(CUT)
    with started(home, config=CONFIG, is_fresh=True, **counts.environment) as server:
        server.wait_until_ready(timeout_s=180)  # all that it imports is compiled anew
        yield Counted(server, counts)
        server.stop()


class Counted:
    def __init__(self, server: RunningServer, counts: Counts) -> None:
        self.server = server
        self._counts = counts

    async def sent(self, route: Route, body: bytes) -> str:
        """The same of a body that may be refused, too; an answer that repeats it is one pass."""
        await self._counts.take(self.server)
        headers = {"content-type": "application/json"}
        answer = self.server.request(route.method, route.path, content=body, headers=headers)
        assert answer.status_code < 500, answer.text[:1000]
        return await self._too_much(MOST_CHARACTERS + len(answer.content))

    async def asked(self, path: str, body: Body, status: int = 200) -> str:
        """What was too much while this was asked, answered and seen to; nothing is best."""
        await self._counts.take(self.server)
        response = self.server.post(path, body)
        assert response.status_code == status, response.text[:1000]
        return await self._too_much()

    async def _too_much(self, most_characters: int = MOST_CHARACTERS) -> str:
        most = await self._counts.take(self.server)
        is_fine = most.num_characters <= most_characters and most.num_calls <= MOST_CALLS
        return "" if is_fine else str(most)


def chat(system: str, user: str) -> Body:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"messages": messages, "max_tokens": 2}


def ollama(system: str, user: str) -> Body:
    messages = chat(system, user)["messages"]
    return {"model": "tiny", "messages": messages, "options": {"num_predict": 2}}


def in_parts(system: str, user: str) -> Body:
    half = len(system) // 2
    texts = [{"type": "text", "text": one} for one in (system[:half], system[half:])]
    messages = [{"role": "system", "content": texts}, {"role": "user", "content": user}]
    return {"messages": messages, "max_tokens": 2, "stream": True}


def anthropic(system: str, user: str) -> Body:
    message = {"role": "user", "content": [{"type": "text", "text": user}]}
    return {"system": system, "messages": [message], "max_tokens": 2}


def responses(system: str, user: str) -> Body:
    return {"instructions": system, "input": user, "max_output_tokens": 16}


def prompt(system: str, user: str) -> Body:
    return {"prompt": system + user, "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, chat, 200),
        (CHAT, in_parts, 200),
        ("/v1/messages", anthropic, 200),
        ("/v1/messages/count_tokens", anthropic, 200),
        ("/api/chat", ollama, 200),
        ("/v1/prewarm", chat, 202),
    ],
)
async def test_no_turn_of_the_loop_reads_a_system_prompt_that_is_the_largest_there_can_be(
    counted: Counted, path: str, body: Bodies, status: int
):
    assert not await counted.asked(path, body(LONG, "Hello?"), status)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, in_parts, 200),
        ("/v1/messages", anthropic, 200),
        ("/v1/responses", responses, 200),
        (COMPLETIONS, prompt, 400),  # the only one that the model would read all of
    ],
)
async def test_nor_what_the_user_says(counted: Counted, path: str, body: Bodies, status: int):
    assert not await counted.asked(path, body("Be kind.", LONG), status)


@pytest.mark.parametrize(
    ("path", "field"),
    [(CHAT, "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")],
)
async def test_nor_does_more_where_there_are_more_messages(counted: Counted, path: str, field: str):
    said = [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Hm."}] * MANY
    body: Body = {field: [*said[: MANY - 1]], "max_tokens": 2}
    if field == "input":
        body |= {"max_output_tokens": 16}
    assert not await counted.asked(path, body, 400)


async def test_an_agent_that_was_told_all_of_it_goes_on(counted: Counted):
    assert not await counted.asked("/v1/agents", {"id": "whale"}, 201)
    for text in (LONG, "Hello?"):
        turn = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
        assert not await counted.asked("/v1/agents/whale/generate", turn)


SETTINGS = Settings(home=Path("/nowhere"), max_body_bytes=MOST_BYTES)
READING = [one for one in routes(SETTINGS, "tiny") if one.fields]
"""The routes that decode what they are sent."""
SLOWEST = ("fields with texts", "large exponents", "a text", "numbers")
"""Of the shapes; `python -m ops.bench.loop_stall --bodies` has every route read all of them."""


@pytest.mark.parametrize("route", READING, ids=lambda one: f"{one.method} {one.path}")
async def test_nor_the_worst_that_any_route_may_be_sent(counted: Counted, route: Route):
    for one in one_of_each(route, SLOWEST, [""]):
        assert not await counted.sent(route, one.body), (one.shape, one.field)


@pytest.mark.parametrize("route", READING, ids=lambda one: f"{one.method}-{one.path}")
async def test_what_takes_longer_to_decode_is_refused_and_its_setting_named(
    server: RunningServer, route: Route
):
    body = b'{"unknown": [' + b'"a",' * route.parts + b'"a"]}'
    headers = {"content-type": "application/json"}
    answer = server.request(route.method, route.path, content=body, headers=headers)
    assert answer.status_code in (400, 413), answer.text
    setting = r"max_body_bytes|limits\.\w+\.(parts|body_bytes)"
    assert re.search(setting, answer.text), answer.text
