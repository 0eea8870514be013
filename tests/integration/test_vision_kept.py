"""Pictures in a conversation through the store: a killed server, swapped models."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

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
