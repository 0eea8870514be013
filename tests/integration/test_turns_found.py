"""What was said is found where it is: behind a slow server, or with a worker that is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from runtime.types import CacheParams, Chunk, ReasoningDelta
from tests.asking import answer, request, script, worker_of
from tests.integration.test_turns_deleted import Home, Talk, at_home, check_reused
from tests.tiny_models import write_model
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_model(tmp_path / "models" / "m")
    return tmp_path


async def test_who_waits_for_turns_on_disk_holds_up_nobody_else(home: Path):
    talk = Talk("stone", "one")
    async with at_home(home) as here:
        last = await here.say(talk)
    async with at_home(home) as here:
        await answer(here.submit(Talk("kettle", "two"), Talk("kettle", "two").asked("go on")))
        assert here.kv.store is not None
        lock, is_held, is_over = here.kv.store.heads.lock, threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                is_held.set()
                assert is_over.wait(PATIENCE_S)

        holding = asyncio.create_task(asyncio.to_thread(hold))
        await asyncio.to_thread(is_held.wait, PATIENCE_S)
        waits = here.submit(talk, talk.asked("go on"))
        await until(lambda: worker_of(here.supervisor).num_running, "its worker has it")
        other = here.submit(Talk("river", "three"), Talk("river", "three").asked("go on"))
        await answer(other)
        assert not waits.accepted_ns, "it still waits"
        is_over.set()
        await holding
        check_reused(last, (await answer(waits)).finished.usage)


async def test_an_answer_goes_on_with_another_worker_behind_turns_that_are_on_no_disk(home: Path):
    async with at_home(home) as here:
        talk = Talk("stone", "one", ttl_s=0)
        await here.say(talk)
        words = plain_ids(here)[:120]
        wish = CacheParams(session_id="one", ttl_s=0)
        asked = request(talk.asked("go on"), sampling=script(words), max_tokens=120, cache=wish)
        generation = here.supervisor.submit(asked)
        await generation.accepted()
        heard: list[Chunk] = []
        while not any(isinstance(one, ReasoningDelta) for one in heard):
            heard += await generation.next_chunks() or ()
        pid = worker_of(here.supervisor).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        said = await answer(generation, heard)
        assert "worker_lost" in said.finished.notes
        assert said.finished.usage.num_output_tokens == 120
        assert [one.rule for one in said.finished.usage.prompt_changes] == ["healed_turn"]


def plain_ids(here: Home) -> list[int]:
    """Tokens that are letters, each once."""
    vocabulary = here.tokenizer.get_vocab()
    return sorted(
        number for word, number in vocabulary.items() if word.isascii() and word.isalpha()
    )
