"""One model on two ranks of this machine: the same answers, one life, one death."""

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import psutil
import pytest
import pytest_asyncio

from runtime.cache.service import KvStore
from runtime.config.settings import ModelSettings
from runtime.errors import LoadFailed
from runtime.supervisor.generation import Generation
from runtime.supervisor.placement import Profile, reservation
from runtime.supervisor.supervisor import Supervisor
from runtime.types import Constraint, SamplingParams
from runtime.wire import Heartbeat
from tests.asking import (
    PATIENCE_S,
    Answer,
    answer,
    ask,
    first_chunks,
    request,
    status_of,
    worker_of,
)
from tests.integration.test_kv_blocks_kept import serving
from tests.rank_talk import LONG, Talk, spoil
from tests.tiny_models import write_model
from tests.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not mx.distributed.is_available("ring"), reason="this build of mlx has no ring"
    ),
]

PROMPTS = (
    "the quick brown fox jumps",
    "a kettle hums on the hearth and rain falls " * 3,
    "def answer(question): return",
    "naïve café",
)
SOON: dict[str, Any] = {"wedge_timeout_s": 4.0, "stop_timeout_s": 1.0}
"""What hangs is noticed soon."""
BLOCK = 64
OTHER = "rain falls on the roof and nobody minds " * 40
BOOLEAN = Constraint(kind="regex", text="true|false")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_model(home / "models" / "m")
    write_model(home / "models" / "layered", "qwen3_next")
    write_model(home / "models" / "odd", num_attention_heads=3, num_key_value_heads=3)
    return home


@asynccontextmanager
async def on_ranks(home: Path, ranks: int, **settings: Any) -> AsyncGenerator[Supervisor]:
    async with on_ranks_with_store(home, ranks, **settings) as (supervisor, _):
        yield supervisor


@asynccontextmanager
async def on_ranks_with_store(
    home: Path, ranks: int, **settings: Any
) -> AsyncGenerator[tuple[Supervisor, KvStore]]:
    models = {name: ModelSettings(ranks=ranks) for name in ("m", "odd", "layered")}
    chosen = {"kv_disk": False, "models": models} | settings
    async with serving(home, **chosen) as both:
        yield both


def processes(supervisor: Supervisor, model: str = "m") -> list[psutil.Process]:
    """Rank 0, then the others; what rank 0 itself forks has no group of its own."""
    found = [psutil.Process(worker_of(supervisor, model).pid)]
    for one in found[0].children(recursive=True):
        with suppress(ProcessLookupError):
            if os.getpgid(one.pid) == one.pid:
                found.append(one)
    return found


def is_over(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def all_over(those: Sequence[psutil.Process]) -> None:
    await until(lambda: all(map(is_over, those)), "the end of every rank")


def places_left(folder: Path) -> list[Path]:
    """Where ranks met."""
    return list(folder.glob("hearth-ranks-*"))


async def answers(supervisor: Supervisor) -> list[tuple[str, int]]:
    """All prompts at once, so that they decode as one batch."""
    given = await asyncio.gather(*(ask(supervisor, prompt) for prompt in PROMPTS))
    return [(one.text, one.finished.usage.num_output_tokens) for one in given]


@dataclass(frozen=True)
class Expected:
    """What one rank says."""

    batch: list[tuple[str, int]]
    alone: Answer
    turns: tuple[str, str, int]
    others: tuple[str, str, int]
    scores: list[float]


async def scored(supervisor: Supervisor, model: str = "m") -> list[float]:
    """How likely the tokens of a prompt are, but for the first."""
    how: dict[str, Any] = {"scores_prompt": True, "top_logprobs": 1, "max_tokens": 1}
    said = await ask(supervisor, PROMPTS[1], model=model, **how)
    return [one.chosen.logprob for one in said.scores if one is not None]


async def two_turns(
    supervisor: Supervisor, model: str = "m", begin: str = LONG
) -> tuple[str, str, int]:
    """Two answers of one conversation, and how many tokens the second found in the cache."""
    first = await ask(supervisor, begin, model=model)
    second = await ask(supervisor, begin + first.text + " and then", model=model)
    return first.text, second.text, second.finished.usage.cache.num_tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(home: Path) -> Expected:
    async with on_ranks(home, 1) as supervisor:
        said = Expected(
            await answers(supervisor),
            await ask(supervisor, PROMPTS[0]),
            await two_turns(supervisor),
            await two_turns(supervisor, begin=OTHER),
            await scored(supervisor),
        )
        assert len(processes(supervisor)) == 1
    return said


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stored(home: Path) -> AsyncGenerator[tuple[Supervisor, KvStore]]:
    disk: dict[str, Any] = {"kv_disk": True, "prewarm_share": 0.0, "block_size": BLOCK}
    async with on_ranks_with_store(home, 2, **disk) as both:
        await ask(both[0], PROMPTS[0])
        yield both


@pytest.fixture(scope="module")
def two(stored: tuple[Supervisor, KvStore]) -> Supervisor:
    return stored[0]


async def test_two_ranks_say_what_one_says(two: Supervisor, expected: Expected):
    assert len(processes(two)) == 2
    assert await answers(two) == expected.batch
    streamed = await ask(two, PROMPTS[0])
    assert streamed.text == expected.alone.text
    assert len(streamed.pieces) > 1


async def test_the_ledger_counts_every_rank(two: Supervisor):
    least = min(one.memory_info().rss for one in processes(two))
    crash_reporter = worker_of(two).crash_reporter
    await until(lambda: crash_reporter.footprint_bytes > 1.5 * least, "a look at every rank")
    spec = status_of(two).spec
    alone = reservation(Profile.of(spec, None))
    assert reservation(Profile.of(spec, None, ModelSettings(ranks=2))) == alone + (256 << 20)


async def test_a_stop_string_ends_a_sequence_on_all_ranks(two: Supervisor, expected: Expected):
    text = expected.alone.text
    stop = text[len(text) // 2 :][:3]
    ranks = processes(two)
    cut = await ask(two, PROMPTS[0], stop=(stop,))
    assert (cut.text, cut.finished.stop) == (text[: text.index(stop)], stop)
    assert (await ask(two, PROMPTS[0])).text == text
    assert processes(two) == ranks


async def test_kv_is_reused_on_all_ranks(two: Supervisor, expected: Expected):
    assert expected.others[-1] > 256
    assert await two_turns(two, begin=OTHER) == expected.others


async def test_ranks_draw_the_same_whatever_is_drawn(two: Supervisor):
    hot = SamplingParams(temperature=1.0)
    seeded = SamplingParams(temperature=1.0, seed=7)
    choosy = SamplingParams(temperature=0.8, frequency_penalty=1.0, top_k=9)
    ranks = processes(two)
    *_, one, other, boolean = await asyncio.gather(
        *(ask(two, prompt, sampling=hot) for prompt in PROMPTS),
        ask(two, PROMPTS[0], sampling=choosy, num_choices=2),
        ask(two, PROMPTS[1], sampling=seeded),
        ask(two, PROMPTS[1], sampling=seeded),
        ask(two, PROMPTS[2], constraint=BOOLEAN, top_logprobs=2),
    )
    assert one.text == other.text
    assert boolean.text in ("true", "false")
    # A rank that had drawn anything else would have ended the worker.
    await ask(two, PROMPTS[0])
    assert processes(two) == ranks


async def test_a_prompt_is_scored_on_all_ranks(two: Supervisor, expected: Expected):
    ranks = processes(two)
    scores, _ = await asyncio.gather(scored(two), ask(two, PROMPTS[1]))
    assert scores == pytest.approx(expected.scores, abs=1e-4)
    assert (await ask(two, PROMPTS[0])).text == expected.alone.text
    assert processes(two) == ranks


async def test_who_leaves_leaves_all_ranks_in_step(two: Supervisor, expected: Expected):
    ranks = processes(two)
    running = two.submit(request(PROMPTS[1], max_tokens=3000, ignore_eos=True))
    await first_chunks(running)
    beside = asyncio.create_task(ask(two, PROMPTS[0]))
    running.abort()
    assert (await beside).text == expected.alone.text
    assert processes(two) == ranks


async def test_a_rank_that_dies_is_the_workers_crash(
    stored: tuple[Supervisor, KvStore], expected: Expected
):
    two, kv = stored
    talk = Talk(two, kv, await ask(two, LONG))
    await talk.published()
    ranks = processes(two)
    asked = request(PROMPTS[1], max_tokens=200, ignore_eos=True)
    undisturbed = await answer(two.submit(asked))
    running = two.submit(msgspec.structs.replace(asked, request_id="again"))
    heard = await first_chunks(running)
    ranks[1].kill()
    assert (await answer(running, heard)).text == undisturbed.text
    assert status_of(two).num_crashes == 1
    assert (await ask(two, PROMPTS[0])).text == expected.alone.text
    await all_over(ranks)
    assert len(processes(two)) == 2
    # What both had published both take up again.
    second = await talk.go_on()
    use = second.finished.usage.cache
    assert (talk.first.text, second.text) == expected.turns[:2]
    assert use.tier == "warm"
    assert use.num_tokens >= expected.turns[2]
    # Where an answer was taken up again, all ranks end it at the same token.
    assert status_of(two).num_crashes == 1


async def test_what_is_damaged_of_one_rank_is_computed_again_by_all(
    stored: tuple[Supervisor, KvStore], expected: Expected
):
    two, kv = stored
    talk = Talk(two, kv, await ask(two, LONG))
    key = talk.chain(await talk.published(with_end=False))[2]
    path, whole = talk.store.slots.of_rank(1).path(key), talk.store.slots.path(key)
    spoil(path)
    await two.restart("m").granted()
    second = await talk.go_on()
    use = second.finished.usage.cache
    assert second.text == expected.turns[1]
    num_tokens = second.finished.usage.num_prompt_tokens // BLOCK * BLOCK
    assert num_tokens - BLOCK <= use.num_tokens < num_tokens
    assert use.reason == "damaged"
    assert whole.exists()
    assert talk.store.counts["evicted_damaged"] == 1
    await until(path.exists, "it is written again")
    await two.restart("m").granted()
    assert (await talk.go_on()).finished.usage.cache.num_tokens >= num_tokens


async def test_a_rank_that_dies_while_nobody_asks_is_replaced(home: Path, expected: Expected):
    async with on_ranks(home, 2) as supervisor:
        await ask(supervisor, PROMPTS[0])
        ranks = processes(supervisor)
        ranks[1].kill()
        await all_over(ranks)
        assert (await ask(supervisor, PROMPTS[0])).text == expected.alone.text


async def test_a_rank_that_is_killed_while_the_model_loads_is_a_crash_that_nobody_is_told_of(
    home: Path, expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with on_ranks(home, 2) as supervisor:
        waiting = supervisor.submit(request(PROMPTS[0]))
        await until(lambda: worker_of(supervisor).pid, "rank 0")
        await until(lambda: len(processes(supervisor)) == 2, "both ranks")
        processes(supervisor)[1].kill()
        assert (await answer(waiting)).text == expected.alone.text
        assert status_of(supervisor).num_crashes == 1
        assert status_of(supervisor).num_starts == 2
        assert places_left(tmp_path) == []


async def test_rank_0_takes_the_others_with_it(two: Supervisor):
    ranks = processes(two)
    ranks[0].kill()
    await all_over(ranks)


async def test_a_stopped_rank_is_a_hung_worker_and_no_process_is_left(home: Path):
    """Also while others ask: what is taken in meanwhile is no progress of what hangs."""
    async with on_ranks(home, 2, **SOON) as supervisor:
        await ask(supervisor, PROMPTS[0])
        ranks = processes(supervisor)
        running = supervisor.submit(request(PROMPTS[1], max_tokens=3000, ignore_eos=True))
        await first_chunks(running)
        watchdog = worker_of(supervisor).watchdog
        others: list[Generation] = []

        def is_given_up(seen: Heartbeat | None) -> bool:
            return bool(status_of(supervisor).num_crashes) or watchdog.last is not seen

        ranks[1].suspend()
        async with asyncio.timeout(PATIENCE_S):
            while not status_of(supervisor).num_crashes:
                others.append(supervisor.submit(request(PROMPTS[2], max_tokens=1)))
                await until(partial(is_given_up, watchdog.last), "a heartbeat, or the last one")
        running.abort()
        await all_over(ranks)
        for one in others:
            assert (await answer(one)).finished.usage.num_output_tokens == 1


async def test_a_rank_that_is_stopped_between_requests_costs_the_next_one_time_only(
    home: Path, expected: Expected
):
    async with on_ranks(home, 2, **SOON) as supervisor:
        await ask(supervisor, PROMPTS[0])
        ranks = processes(supervisor)
        ranks[1].suspend()
        assert (await ask(supervisor, LONG)).text == expected.turns[0]
        assert status_of(supervisor).num_crashes == 1
        assert "made no progress in prefill" in str(status_of(supervisor).last_error)
        await all_over(ranks)


async def test_layers_that_keep_a_state_are_shared_among_ranks(home: Path):
    """A model that upstream splits by layers only."""
    said: list[tuple[str, str, int]] = []
    scores: list[list[float]] = []
    for ranks in (1, 2):
        async with on_ranks(home, ranks) as supervisor:
            said.append(await two_turns(supervisor, "layered"))
            scores.append(await scored(supervisor, "layered"))
            assert len(processes(supervisor, "layered")) == ranks
    assert said[0] == said[1]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert said[0][-1] > 256


async def test_a_model_that_cannot_be_split_says_why_and_one_that_leaves_leaves_nobody(home: Path):
    async with on_ranks(home, 2) as supervisor:
        with pytest.raises(LoadFailed, match="3 heads of KV cannot be shared by 2 ranks"):
            await ask(supervisor, PROMPTS[0], model="odd")
        await ask(supervisor, PROMPTS[0])
        ranks = processes(supervisor)
    await all_over(ranks)
