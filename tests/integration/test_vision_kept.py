"""Pictures in a conversation through the store: a killed server, merged slots, swapped models."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

from runtime.cache.compaction import MAX_CHAIN, compact, plans
from runtime.cache.service import KvStore
from runtime.supervisor.supervisor import Supervisor
from runtime.types import ChatPrompt, Image, Message
from tests.asking import PATIENCE_S, ask, supervising_with_store
from tests.image_requests import chat_part
from tests.running_server import CHAT, RunningServer, running
from tests.tiny_vlms import encoded, picture
from tests.waiting import until

FIRST, SECOND = encoded(picture(1, 84, 112)), encoded(picture(2, 84, 112))
WORDS = {"type": "text", "text": "look at this: " * 8}


def say(server: RunningServer, turns: list[Any]) -> tuple[Any, int]:
    """Ask, and take the answer up; what was said and how much was known already."""
    body = {"model": "qwen3_vl", "messages": turns, "max_tokens": 6, "temperature": 0}
    found = server.post(CHAT, body | {"ignore_eos": True})
    assert found.status_code == 200, found.text
    said = found.json()
    turns.append(said["choices"][0]["message"])
    return said, said["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_killed_server_goes_on_with_what_was_seen(tmp_path: Path, vlms_dir: Path):
    config = f'models_dir = "{vlms_dir}"\ndefault_model = "qwen3_vl"\n'
    turns: list[Any] = [{"role": "user", "content": [WORDS, chat_part(FIRST), WORDS]}]
    with running(tmp_path, config=config) as server:
        say(server, turns)
        turns.append({"role": "user", "content": "and what else? " * 6})
        said, cached = say(server, turns)
        assert cached > said["usage"]["prompt_tokens"] // 2
        held = said["usage"]["total_tokens"]
        await until(
            lambda: (
                max(
                    (
                        one["num_durable"]
                        for one in server.get("/admin/cache").json()["conversations"]
                    ),
                    default=0,
                )
                >= held - 1
            ),
            "both turns are on disk",
        )
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with running(tmp_path, config=f"{config}max_loaded_models = 1\n") as server:
        turns.append({"role": "user", "content": [WORDS, chat_part(SECOND), WORDS]})
        said, cached = say(server, turns)
        assert held - 1 <= cached < said["usage"]["prompt_tokens"]
        encoded_images = "hearth_kv_encoded_images_total"
        await until(lambda: server.figure(encoded_images) == 1, "only the new picture is seen")
        held = said["usage"]["total_tokens"]
        hi = {"model": "gemma3", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        assert server.post(CHAT, hi).status_code == 200
        (loaded,) = server.get("/api/ps").json()["models"]
        assert loaded["name"].startswith("gemma3"), "it was swapped out"
        turns.append({"role": "user", "content": "and after another model?"})
        said, cached = say(server, turns)
        assert cached >= held - 1
        assert server.figure(encoded_images) == 1, "words look at no picture"
        del turns[-2:]
        swapped = [*turns[:-1]]
        swapped[0] = {"role": "user", "content": [WORDS, chat_part(SECOND), WORDS]}
        _, shared = say(server, swapped[:1])
        assert 0 < shared < 100, "words before another picture are shared, and no more"
        assert server.figure("hearth_kv_image_mismatches_total") == 0


async def test_merged_slots_still_know_their_pictures(tmp_path: Path, vlms_dir: Path):
    (tmp_path / "models").symlink_to(vlms_dir)
    seen = Image(at=3, field="image", data=FIRST)
    messages = [Message(role="user", text="so, what is it?", images=(seen,))]
    num_tokens = 0
    async with supervising_with_store(tmp_path, kv_disk=True) as (supervisor, kv):
        for number in range(MAX_CHAIN + 2):
            prompt = ChatPrompt(messages=tuple(messages))
            done = await ask(supervisor, prompt, model="qwen3_vl", max_tokens=2)
            num_tokens = done.finished.usage.num_prompt_tokens
            messages += [
                Message(role="assistant", text=done.text),
                Message(role="user", text=f"and {number}?"),
            ]
        store = kv.store
        assert store is not None
        await until(
            lambda: (
                max((one.header.end for one in store.index.all_slots()), default=0) >= num_tokens
            ),
            "all that was said is on disk",
        )
        assert any(plans(store.index.all_slots(), ()))
        async with asyncio.timeout(PATIENCE_S):
            while not store.counts["compacted"]:  # the last turn may be on its way to the disk
                await kv.chore(lambda s: compact(s, kv.loaded_models, lambda: False))
        await check(supervisor, kv, messages)
    async with supervising_with_store(tmp_path, kv_disk=True) as (supervisor, kv):
        await check(supervisor, kv, messages)


async def check(supervisor: Supervisor, kv: KvStore, messages: list[Message]) -> None:
    """Nearly all of a conversation is known, and no match was given up."""
    prompt = ChatPrompt(messages=tuple(messages))
    done = await ask(supervisor, prompt, model="qwen3_vl", max_tokens=2)
    usage = done.finished.usage
    assert usage.cache.num_tokens > usage.num_prompt_tokens * 3 // 4
    counts = kv.figures().models["qwen3_vl"]
    assert (counts.vlm_retreat, counts.exact_key_rejected_by_model_lcp) == (0, 0)
