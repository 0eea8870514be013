"""For each family of models: a conversation goes on after a restart as if there had been none.

Each family has other kinds of layers: those that keep all tokens, a window of them, a state, or a
mix. Three answers to the same prompt must be alike: that of a server that was restarted, that of
one that was not, and that of one that computes everything.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.oracle.talking import SETTINGS, TOLERANCE, TOO_SLOW, Answer, Vocabulary, check_same
from tests.running_server import CHAT, RunningServer, running
from tests.tiny_models import FAMILIES, write_model
from tests.tiny_vlms import encoded, picture, write_vlm

QUANTISED = {"qwen3-8": ("qwen3", 8), "qwen3-4": ("qwen3", 4), "gemma3_text-8": ("gemma3_text", 8)}
"""Models whose KV is kept in so many bits."""
ROUNDED = 5e-3
"""How far such models' answers may be apart: what is computed in other slices is rounded so."""
USUAL = (
    "qwen3",
    "gemma3_text",
    "gpt_oss",
    "qwen3_next",
    "jamba",
    "llama4",
    "deepseek_v32",
    "qwen3-8",
)
"""Those of which each keeps another kind of layer."""
USUAL_SEEING = ("qwen3_vl",)
REST = tuple(name for name in (*FAMILIES, *QUANTISED) if name not in USUAL)
REST_SEEING = ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "gemma3", "gemma4")
NUM_FIRST, NUM_MORE = 150, 50
ONE_LOADED = "max_loaded_models = 1\npreload = []\n"


class Both(NamedTuple):
    """Servers that were asked the same: one was restarted since. `vocabularies` by model."""

    restarted: RunningServer
    lasting: RunningServer
    vocabularies: dict[str, Vocabulary]


def first_prompt(vocabulary: Vocabulary, name: str) -> list[int]:
    return vocabulary.fresh(random.Random(name), NUM_FIRST)


def seen_prompt(name: str) -> list[dict[str, Any]]:
    """A question about a picture."""
    data = base64.b64encode(encoded(picture(1))).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    words = " ".join(random.Random(name).choices("the quick brown fox jumps over".split(), k=40))
    text = {"type": "text", "text": words}
    return [{"role": "user", "content": [text, image, {"type": "text", "text": f"so {words}"}]}]


def see(server: RunningServer, name: str, messages: Any, **fields: Any) -> Any:
    """The answer to a chat with pictures."""
    body: dict[str, Any] = {
        "model": f"seeing-{name}",
        "messages": messages,
        "temperature": 0,
        "max_tokens": 6,
    }
    body |= {"logprobs": True, "top_logprobs": 3, "ignore_eos": True} | fields
    response = server.post(CHAT, body)
    assert response.status_code == 200, response.text
    return response.json()


@contextmanager
def asked(folder: Path, names: Sequence[str], seeing: Sequence[str]) -> Generator[Both]:
    """These models were asked something before a restart."""
    models = folder / "models"
    config = f'models_dir = "{models}"\ndefault_model = "{names[0]}"\n{SETTINGS}{ONE_LOADED}'
    for name in names:
        family, bits = QUANTISED.get(name, (name, None))
        changes = {"head_dim": 64} if bits else {}
        write_model(models / name, family, **changes)
        config += f"[models.{name}]\nkv_bits = {bits}\n" if bits else ""
    for family in seeing:
        write_vlm(models / f"seeing-{family}", family)
    vocabularies = {name: Vocabulary(models / name) for name in names}
    with running(folder / "restarted", config=config) as server:
        server.wait_for_the_store()
        for name, vocabulary in vocabularies.items():
            vocabulary.ask(server, first_prompt(vocabulary, name), model=name)
        for family in seeing:
            see(server, family, seen_prompt(family))
    with ExitStack() as stack:
        restarted = stack.enter_context(running(folder / "restarted", config=config))
        restarted.wait_for_the_store()
        lasting = stack.enter_context(running(folder / "lasting", config=config))
        yield Both(restarted, lasting, vocabularies)
        for server in (restarted, lasting):
            assert "Traceback" not in server.stderr, server.stderr


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Generator[Both]:
    with asked(tmp_path_factory.mktemp("usual"), USUAL, USUAL_SEEING) as both:
        yield both


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Generator[Both]:
    with asked(tmp_path_factory.mktemp("rest"), REST, REST_SEEING) as both:
        yield both


def check_goes_on(both: Both, name: str) -> None:
    vocabulary = both.vocabularies[name]
    first = first_prompt(vocabulary, name)
    begun = vocabulary.ask(both.lasting, first, model=name)
    more = vocabulary.fresh(random.Random(f"{name} goes on"), NUM_MORE)
    prompt = [*first, *begun.token_ids, *more]
    live = vocabulary.ask(both.lasting, prompt, model=name)
    assert live.num_cached >= NUM_FIRST
    plain = vocabulary.ask(both.lasting, prompt, model=name, cache_mode="off")
    after = vocabulary.ask(both.restarted, prompt, model=name)
    assert after.num_cached > 0 or after.reason == TOO_SLOW, after
    within = ROUNDED if name in QUANTISED else TOLERANCE
    check_same(live, plain, within)
    check_same(after, plain, within)


def check_sees_on(both: Both, name: str) -> None:
    messages = seen_prompt(name)
    begun = see(both.lasting, name, messages)
    said = {"role": "assistant", "content": begun["choices"][0]["message"]["content"]}
    messages = [*messages, said, {"role": "user", "content": "while rain falls on the hearth"}]
    live = see(both.lasting, name, messages)
    assert live["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    plain = see(both.lasting, name, messages, cache_mode="off")
    after = see(both.restarted, name, messages)
    cache = after["hearth"]["cache"]
    assert cache["cached_tokens"] > 0 or cache["reason"] == TOO_SLOW, cache
    for one in (live, after):
        assert one["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
        check_same(seen(one), seen(plain))


@pytest.mark.parametrize("name", USUAL)
def test_a_conversation_goes_on_after_a_restart_as_if_there_had_been_none(usual: Both, name: str):
    check_goes_on(usual, name)


@pytest.mark.parametrize("name", USUAL_SEEING)
def test_a_talk_about_a_picture_goes_on_after_a_restart_as_if_there_had_been_none(
    usual: Both, name: str
):
    check_sees_on(usual, name)


@pytest.mark.soak
@pytest.mark.parametrize("name", REST)
def test_a_conversation_with_any_family_goes_on_after_a_restart(rest: Both, name: str):
    check_goes_on(rest, name)


@pytest.mark.soak
@pytest.mark.parametrize("name", REST_SEEING)
def test_a_talk_about_a_picture_with_any_family_goes_on_after_a_restart(rest: Both, name: str):
    check_sees_on(rest, name)


def seen(said: Any) -> Answer:
    """An answer about a picture, to be compared by what its tokens look like."""
    usage = said["usage"]
    entries = said["choices"][0]["logprobs"]["content"]
    return Answer(
        token_ids=[int.from_bytes(bytes(one["bytes"])) for one in entries],
        logprobs=[one["logprob"] for one in entries],
        best=[sorted(top["logprob"] for top in one["top_logprobs"])[-3:] for one in entries],
        num_prompt=usage["prompt_tokens"],
        num_cached=usage["prompt_tokens_details"]["cached_tokens"],
        num_durable=said["hearth"]["cache"]["durable_tokens"],
        reason=said["hearth"]["cache"]["reason"],
    )
