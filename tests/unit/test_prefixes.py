"""What is learned of prompts, what of it is worth being warm, and when it has to be touched."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.cache.service import KvStore
from runtime.config.settings import Settings
from runtime.prewarm.prefix_registry import Answered, PrefixRegistry
from runtime.prewarm.prefixes import Prefix, is_due, learned, prefix_of, warming_of
from runtime.types import CacheParams, ChatPrompt, GenerateRequest, Image, Message, TextPrompt, Tool
from store.keyed_names import Whom
from store.types import UNKNOWN_HEAD

SYSTEM = "Be kind to boats. " * 100
KEY = b"key"
NONE = frozenset[str]()
HOUR = 3600.0


def request(*messages: Message, tools: tuple[Tool, ...] = (), **fields: Any) -> GenerateRequest:
    prompt = ChatPrompt(messages=messages, tools=tools)
    given: dict[str, Any] = {"request_id": "r", "model": "m", "prompt": prompt} | fields
    return GenerateRequest(**given)


def system(text: str = SYSTEM) -> Message:
    return Message(role="system", text=text)


def user(text: str) -> Message:
    return Message(role="user", text=text)


def prefix(name: str, **fields: Any) -> Prefix:
    prompt = ChatPrompt(messages=(system("x" * fields.pop("num_chars", 100)),))
    return Prefix(name=name, prompt=prompt, **fields)


def test_the_head_is_the_same_whatever_is_asked():
    one = prefix_of(request(system(), user("a")), NONE, KEY)
    other = prefix_of(request(system(), user("b"), user("c")), NONE, KEY)
    assert one is not None
    assert other is not None
    assert one == other
    assert one.prompt.messages == (system(), user("."))


def test_another_text_tool_client_or_key_is_another_prefix():
    tool = Tool(name="row")
    found = [
        prefix_of(request(system(), user("a")), NONE, KEY),
        prefix_of(request(system(SYSTEM + "!"), user("a")), NONE, KEY),
        prefix_of(request(system(), user("a"), tools=(tool,)), NONE, KEY),
        prefix_of(request(system(), user("a"), client="codex"), NONE, KEY),
        prefix_of(request(system(), user("a")), NONE, b"other"),
    ]
    assert len({one.name for one in found if one is not None}) == 5


def test_where_a_client_set_breakpoints_makes_no_difference():
    marked = system().kept(300.0)
    plain = prefix_of(request(system(), user("a")), NONE, KEY)
    assert prefix_of(request(marked, user("a")), NONE, KEY) == plain


@pytest.mark.parametrize(
    "unlearned",
    [
        request(system("short"), user("a")),
        request(user("a" * 5000)),
        request(system(), user("a"), cache=CacheParams(mode="off")),
        request(system(), user("a"), cache=CacheParams(ttl_s=0)),
        request(system(), user("a"), work="count"),
        request(system(), user("a"), work="prefill"),
        request(prompt=TextPrompt(text="a" * 5000)),
        request(msgspec.structs.replace(system(), images=(Image(at=0, field="f"),)), user("a")),
    ],
)
def test_what_is_short_private_or_no_prompt_is_not_learned(unlearned: GenerateRequest):
    assert prefix_of(unlearned, NONE, KEY) is None


def test_uses_fade_and_sessions_are_bounded():
    known = prefix("a").used("s1", 0.0, 2).used("s2", 6 * HOUR, 2)
    assert known.num_uses == 1.5
    assert known.sessions == ("s1", "s2")
    assert known.used("s1", 6 * HOUR, 2).sessions == ("s2", "s1")
    assert known.used("s3", 6 * HOUR, 2).sessions == ("", "s3")


def test_worth_is_uses_times_length_and_once_is_not_often():
    once = prefix("once", num_uses=1.0, num_chars=10_000)
    often = prefix("often", num_uses=4.0, num_chars=100)
    long = prefix("long", num_uses=2.0, num_chars=300)
    old = prefix("old", num_uses=40.0, num_chars=100, last_used_s=-24 * HOUR)
    assert [one.name for one in learned([once, often, long, old], 9, 0.0)] == [
        "long",
        "often",
        "old",
    ]
    assert [one.name for one in learned([once, often, long, old], 1, 0.0)] == ["long"]


@pytest.mark.parametrize(
    ("now_s", "due"), [(2399.0, False), (2641.0, True), (14_399.0, True), (14_400.0, False)]
)
def test_it_is_touched_at_four_fifths_of_its_life_for_four_unused_lives(now_s: float, due: bool):
    assert is_due(prefix("a", ttl_s=HOUR), now_s, 240.0) is due


def test_a_touch_is_not_a_use():
    touched = prefix("a", ttl_s=HOUR, touched_s=3000.0)
    assert not is_due(touched, 3500.0, 240.0)
    assert is_due(touched, 5700.0, 240.0), "one unused life is not the end"
    again = prefix("a", ttl_s=HOUR, touched_s=12_000.0)
    assert not is_due(again, 14_700.0, 240.0), "four are"


def test_warming_keeps_the_prefix_alone_and_yields():
    warming = warming_of(prefix("a", ttl_s=60.0, client="codex"), "w", "m")
    assert (warming.work, warming.priority, warming.client) == ("prefill", "background", "codex")
    assert warming.cache == CacheParams(mode="prefix", ttl_s=60.0)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "whom", [Whom(session_id="boats"), Whom(model="m"), Whom()], ids=["session", "model", "all"]
)
async def test_what_is_deleted_before_it_was_looked_at_is_not_learned(tmp_path: Path, whom: Whom):
    settings = Settings(home=tmp_path)
    kv = KvStore(settings)
    registry, came = PrefixRegistry(settings, kv), kv.receive()
    one = request(system(), user("a"), cache=CacheParams(session_id="boats"))
    other = request(system("another " + SYSTEM), user("a"), model="other")
    named: list[str] = []
    registry.note(Answered(one, came, UNKNOWN_HEAD), 0.0, named.append)
    registry.note(Answered(other, came, UNKNOWN_HEAD), 0.0, named.append)
    registry.forget(whom)
    await kv.publisher.forget(whom)
    await registry.save()
    assert list(registry.names("m")) == []
    assert list(registry.names("other")) == named
    assert len(named) == (whom != Whom())
