"""Images over HTTP: seen in every protocol, refused by the part, kept with their conversation."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.image_requests import (
    MESSAGES,
    RESPONSES,
    WAYS,
    answered,
    b64,
    chat,
    chat_part,
    image_block,
    input_part,
    message,
    problem,
    response,
    url_of,
)
from tests.running_server import CHAT, COMPLETIONS, RunningServer, running
from tests.tiny_vlms import encoded, picture
from tests.waiting import until

RED, BLUE = encoded(picture(1)), encoded(picture(2))


def words(said: Any) -> Any:
    """An answer without its ids."""
    return said[0]["content"] if isinstance(said, list) and "content" in said[0] else said


def test_a_model_that_sees_says_so(seeing_server: RunningServer):
    cards = {one["id"]: one for one in seeing_server.get("/v1/models").json()["data"]}
    assert "vision" in cards["qwen3_vl"]["capabilities"]
    assert "vision" not in cards["blind"]["capabilities"]
    shown = seeing_server.post("/api/show", {"model": "gemma3"}).json()
    assert "vision" in shown["capabilities"]


@pytest.mark.parametrize("name", WAYS)
def test_what_is_said_depends_on_the_image_in_every_protocol(
    name: str, seeing_server: RunningServer
):
    way, _ = WAYS[name]
    first, other, again = (
        words(answered(seeing_server, way(data))) for data in (RED, BLUE, encoded(picture(1)))
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", [name for name in WAYS if name != "tool result"])
def test_an_image_that_cannot_be_read_is_refused_by_its_part(
    name: str, seeing_server: RunningServer
):
    way, part = WAYS[name]
    path, body = way(RED[:-40])
    found = seeing_server.post(path, body)
    assert problem(found).startswith(f"{part} ")
    if path in (CHAT, RESPONSES):
        assert found.json()["error"]["param"] == part
    if path == MESSAGES:
        assert found.json()["error"]["type"] == "invalid_request_error"


def bomb() -> bytes:
    """A PNG of a few bytes that claims to have ten thousand million pixels."""
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b""))
    framed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def moving() -> bytes:
    return encoded(picture(1), "GIF", save_all=True, append_images=[picture(2)])


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (chat_part(bomb()), "Shrink it"),
        (chat_part(moving(), "image/gif"), "animated"),
        (chat_part(b"%PDF-1.7", "application/pdf"), "media type"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "file:"),
        ({"type": "image_url", "image_url": {"url": "https://localhost/a"}}, "allow_remote_images"),
        ({"type": "image_url", "image_url": {"url": "http://localhost/a"}}, "http:"),
    ],
)
def test_what_is_no_usable_image_is_a_clear_refusal(
    part: Any, said: str, seeing_server: RunningServer
):
    found = seeing_server.post(*chat(part))
    assert said in problem(found)
    assert found.json()["error"]["param"] == "messages[0].content[1]"


def test_a_model_that_reads_text_only_is_shown_none(seeing_server: RunningServer):
    found = seeing_server.post(*chat(chat_part(RED), model="blind"))
    assert "reads text only" in problem(found)
    turn = [{"role": "user", "content": "hi"}]
    text = seeing_server.post(CHAT, {"model": "blind", "messages": turn, "max_tokens": 1})
    assert text.status_code == 200


def test_a_kind_that_was_only_tried_out_is_shown_images_and_says_what_is_not_kept(
    seeing_server: RunningServer,
):
    words = {"type": "text", "text": "look at this: " * 30}
    turns: list[Any] = [{"role": "user", "content": [words, chat_part(RED)]}]
    body: dict[str, Any] = {"model": "tried", "max_tokens": 4, "temperature": 0}
    asked = body | {"messages": turns, "ignore_eos": True, "logprobs": True}
    first, again = (seeing_server.post(CHAT, asked).json() for _ in range(2))
    assert again["hearth"]["cache"]["reason"] == "unsupported"
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    other = asked | {"messages": [{"role": "user", "content": [words, chat_part(BLUE)]}]}
    said, same, else_ = (
        one["choices"][0]["logprobs"]["content"]
        for one in (first, again, seeing_server.post(CHAT, other).json())
    )
    assert said == same != else_
    text = body | {"messages": [{"role": "user", "content": [words]}]}
    seeing_server.post(CHAT, text)
    kept = seeing_server.post(CHAT, text).json()["usage"]
    assert kept["prompt_tokens_details"]["cached_tokens"] == kept["prompt_tokens"] - 1


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("muted", "its chat template does not show where an image is"),
        ("paligemma", "its prompts attend to themselves in both directions"),
    ],
)
def test_a_kind_that_cannot_be_shown_images_refuses_them_by_the_part(
    seeing_server: RunningServer, model: str, why: str
):
    found = seeing_server.post(*chat(chat_part(RED), model=model))
    assert why in problem(found)
    assert "messages[0].content[1] is an image" in problem(found)
    assert found.json()["error"]["param"] == "messages[0].content[1]"
    turn = [{"role": "user", "content": "hi"}]
    text = seeing_server.post(CHAT, {"model": model, "messages": turn, "max_tokens": 1})
    assert text.status_code == 200


def test_an_agent_that_has_seen_goes_on_with_a_model_that_cannot(seeing_server: RunningServer):
    made = seeing_server.post("/v1/agents", {"temperature": 0, "max_tokens": 2})
    agent = f"/v1/agents/{made.json()['id']}"
    turn = {"messages": chat(chat_part(RED))[1]["messages"]}
    assert seeing_server.post(f"{agent}/generate", turn).status_code == 200
    assert seeing_server.request("PATCH", agent, json={"model": "blind"}).status_code == 200
    more = {"messages": [{"role": "user", "content": "and now?"}]}
    found = seeing_server.post(f"{agent}/generate", more)
    assert found.status_code == 200, found.text
    (told,) = found.json()["hearth"]["ignored"]
    assert told.startswith("history[0].images[0] is an image, and blind reads text only")
    assert seeing_server.request("PATCH", agent, json={"model": "qwen3_vl"}).status_code == 200
    again = seeing_server.post(f"{agent}/generate", more)
    assert "ignored" not in again.json()["hearth"]


def test_only_a_model_that_sees_is_sent_as_much_as_images_need(seeing_server: RunningServer):
    large = encoded(picture(3, 640, 640))
    assert len(b64(large)) > 1_000_000
    assert answered(seeing_server, chat(chat_part(large)))
    long = {"model": "blind", "messages": [{"role": "user", "content": "x" * 1_000_001}]}
    assert seeing_server.post(CHAT, long).status_code == 413
    assert seeing_server.post("/tokenize", {"prompt": "x" * 1_000_001}).status_code == 413


def test_tokens_of_images_are_counted(seeing_server: RunningServer):
    _, body = message(image_block(RED))
    found = seeing_server.post(f"{MESSAGES}/count_tokens", {"messages": body["messages"]})
    assert found.status_code == 200, found.text
    answer = seeing_server.post(MESSAGES, body).json()
    usage = answer["usage"]
    read = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert found.json()["input_tokens"] == read + usage.get("cache_creation_input_tokens", 0)


def follow_up(server: RunningServer, previous_id: str) -> Any:
    turn = [{"role": "user", "content": "and now?"}]
    _, body = response(input_part(RED), previous_response_id=previous_id, input=turn)
    found = server.post(RESPONSES, body)
    assert found.status_code == 200, found.text
    return found.json()


async def test_a_conversation_keeps_its_images_over_a_restart_until_it_is_deleted(
    tmp_path: Path, vlms_dir: Path
):
    config = f'models_dir = "{vlms_dir}"\ndefault_model = "qwen3_vl"\nlog_level = "debug"\n'
    config += "allow_remote_images = true\n"
    with running(tmp_path, config=config) as server:
        first = server.post(*response(input_part(RED))).json()
        agent = server.post("/v1/agents", {"temperature": 0, "max_tokens": 4}).json()["id"]
        turns = f"/v1/agents/{agent}/generate"
        said = server.post(turns, {"messages": chat(chat_part(BLUE))[1]["messages"]}).json()
        assert b64(RED)[:40] not in server.stderr
        assert b64(BLUE)[:40] not in server.stderr
        own = {"type": "image_url", "image_url": {"url": f"https://127.0.0.1:{server.port}/a.png"}}
        assert "not on the public internet" in problem(server.post(*chat(own)))
        await until(lambda: kept(server) > said["usage"]["prompt_tokens"], "both are on disk")
    with running(tmp_path, config=config) as server:
        answer = follow_up(server, first["id"])
        known = first["usage"]["total_tokens"]
        assert answer["usage"]["input_tokens_details"]["cached_tokens"] >= known - 1
        shown = server.get(f"/v1/agents/{agent}/history").json()
        assert url_of(BLUE, "application/octet-stream") in str(shown)
        more = server.post(turns, {"messages": [{"role": "user", "content": "and now?"}]}).json()
        cached = more["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= said["usage"]["total_tokens"] - 1
        for path in (
            f"/v1/agents/{agent}",
            *(f"{RESPONSES}/{one['id']}" for one in (answer, first)),
        ):
            assert server.request("DELETE", path).status_code == 200
    left = bytes_of_history(tmp_path)
    assert b64(RED)[:60].encode() not in left
    assert b64(BLUE)[:60].encode() not in left


def bytes_of_history(home: Path) -> bytes:
    return b"".join(path.read_bytes() for path in home.glob("history.sqlite3*"))


def kept(server: RunningServer) -> int:
    """Tokens of all conversations on disk."""
    listed = server.get("/admin/cache").json()
    return sum(one["num_tokens"] for one in listed["conversations"])


LONG = {"type": "text", "text": "look at this: " * 8}
SHAPE = {
    "type": "object",
    "properties": {"is_red": {"type": "boolean"}},
    "required": ["is_red"],
    "additionalProperties": False,
}
"""Bounded, so that any model comes to an end."""

LOOK = {"type": "function", "function": {"name": "look", "parameters": SHAPE, "strict": True}}


def turn(server: RunningServer, turns: list[Any], **fields: Any) -> tuple[Any, int, int]:
    """The message that was said, cached tokens, and all tokens up to its end."""
    body: dict[str, Any] = {"model": "qwen3_vl", "messages": turns, "max_tokens": 200}
    body |= {"temperature": 0, "enable_thinking": False}
    found = server.post(CHAT, body | fields)
    assert found.status_code == 200, found.text
    said = found.json()
    usage = said["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return said["choices"][0]["message"], cached, usage["total_tokens"]


def test_calls_results_and_shapes_go_on_from_what_was_seen(seeing_server: RunningServer):
    turns: list[Any] = [{"role": "user", "content": [LONG, chat_part(BLUE)]}]
    called, _, total = turn(seeing_server, turns, tools=[LOOK], tool_choice="required")
    call = called["tool_calls"][0]
    turns += [
        {**called, "reasoning_content": None},
        {"role": "tool", "tool_call_id": call["id"], "content": [LONG, chat_part(RED)]},
    ]
    form = {"type": "json_schema", "json_schema": {"name": "seen", "schema": SHAPE}}
    shaped, cached, total = turn(
        seeing_server, turns, tools=[LOOK], tool_choice="none", response_format=form
    )
    assert cached >= total // 2
    assert set(json.loads(shaped["content"])) == {"is_red"}
    turns += [shaped, {"role": "user", "content": "and now?"}]
    _, cached, _ = turn(seeing_server, turns, tools=[LOOK], tool_choice="none")
    assert cached >= total - 1, "what was generated is known to the last token"


@pytest.mark.parametrize("model", ["qwen3_vl", "gemma3"])
def test_thinking_that_clients_strip_is_put_back_after_an_image(
    seeing_server: RunningServer, model: str
):
    """A budget closes the thinking, a shape the answer; both end as the template does."""
    form = {"type": "json_schema", "json_schema": {"name": "seen", "schema": SHAPE}}
    plain = {"model": model, "response_format": form, "logit_bias": {"0": -100}}
    thinks = {**plain, "enable_thinking": True, "thinking_budget": 6}
    turns: list[Any] = [{"role": "user", "content": [LONG, chat_part(RED), LONG]}]
    thought, _, total = turn(seeing_server, turns, **thinks)
    assert thought["reasoning_content"]
    turns += [{"role": "assistant", "content": thought["content"]}]
    turns += [{"role": "user", "content": [LONG, chat_part(BLUE)]}]
    again, cached, longer = turn(seeing_server, turns, **thinks)
    assert cached >= total - 1, "the stripped thinking is known to the last token"
    assert again["reasoning_content"]
    turns += [{"role": "assistant", "content": again["content"]}]
    turns += [{"role": "user", "content": "and without thinking?"}]
    said, cached, _ = turn(seeing_server, turns, **plain)
    assert cached >= longer - 1, "also where it thinks no more"
    assert not said.get("reasoning_content")
    turns[0] = {"role": "user", "content": [LONG, chat_part(BLUE), LONG]}
    _, cached, _ = turn(seeing_server, turns, **plain)
    assert cached < total // 2, "another image is another conversation"


async def num_encoded(server: RunningServer, words: str) -> float:
    """Of all answers before, which a heartbeat tells; the words are new to the server."""
    computed = "hearth_kv_computed_tokens_total"
    before = server.figure(computed)
    _, cached, total = turn(server, [{"role": "user", "content": words}], max_tokens=1)
    assert cached < total
    await until(lambda: server.figure(computed) > before, "a heartbeat")
    beat = server.figure(computed)
    turn(server, [{"role": "user", "content": f"{words} {words}"}], max_tokens=1)
    await until(lambda: server.figure(computed) > beat, "the next one")
    return server.figure("hearth_kv_encoded_images_total")


async def test_what_will_be_seen_is_computed_before_it_is_asked(seeing_server: RunningServer):
    first, second = (chat_part(encoded(picture(seed))) for seed in (11, 12))
    turns = [{"role": "user", "content": [first, LONG, second, LONG]}]
    before = await num_encoded(seeing_server, "One two three.")
    warmed = seeing_server.post("/v1/prewarm", {"model": "qwen3_vl", "messages": turns})
    assert warmed.status_code in (200, 202), warmed.text
    path = f"/v1/prewarm/{warmed.json()['id']}"
    await until(lambda: seeing_server.get(path).json()["status"] == "completed", "it is warm")
    _, cached, _ = turn(seeing_server, turns, max_tokens=1)
    assert cached > 100
    seen = await num_encoded(seeing_server, "Four five six.") - before
    assert seen == 2, "each was seen once"


def test_words_for_pictures_are_words_when_clients_say_them(seeing_server: RunningServer):
    words = "<|image_pad|> and <|vision_start|><|image_pad|><|vision_end|>"
    text = [{"role": "user", "content": words}]
    found = seeing_server.post(CHAT, {"messages": text, "max_tokens": 2, "temperature": 0})
    assert "picture_words" in str(found.json()["hearth"])
    mixed = [{"role": "user", "content": [{"type": "text", "text": words}, chat_part(RED)]}]
    said, _, total = turn(seeing_server, mixed, max_tokens=2)
    assert said["role"] == "assistant"
    mixed += [said, {"role": "user", "content": words}]
    _, cached, _ = turn(seeing_server, mixed, max_tokens=2)
    assert cached >= total - 1


@pytest.mark.parametrize("model", ["qwen3_vl", "tried"])
def test_a_model_that_sees_scores_a_text_as_it_goes_on_with_it(
    model: str, seeing_server: RunningServer
):
    prompt = list(range(30, 70))
    asked: dict[str, Any] = {"model": model, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    scored = seeing_server.post(
        COMPLETIONS, asked | {"prompt": prompt, "echo": True, "max_tokens": 0}
    ).json()
    tops = scored["choices"][0]["logprobs"]["top_logprobs"]
    for place in (3, 20, 39):
        beginning = asked | {"prompt": prompt[:place], "max_tokens": 1}
        drawn = seeing_server.post(COMPLETIONS, beginning).json()["choices"][0]["logprobs"]
        assert max(tops[place].values()) == pytest.approx(drawn["token_logprobs"][0], abs=1e-3)
