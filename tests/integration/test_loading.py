"""Models that cannot be loaded say why; every family of layer caches loads and answers."""

import asyncio
import fcntl
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typing_extensions import override

from runtime.cache.channel import WorkerChannel
from runtime.cache.service import KvStore
from runtime.config.settings import Settings
from runtime.errors import LoadFailed, WorkerError, WorkerWedged
from runtime.supervisor.process import WorkerProcess
from runtime.types import ModelSpec, SamplingParams, TokenPrompt
from tests.asking import ask, request, status_of, supervising
from tests.tiny_models import FAMILIES, write_model
from tests.waiting import until


def spec_of(path: Path) -> ModelSpec:
    return ModelSpec(id="m", path=str(path), context=512, model_type="qwen3", nbytes=1, created_s=1)


async def failure_of(path: Path, **settings: float) -> tuple[WorkerError, WorkerProcess]:
    """How the load of this directory fails."""
    fields = {"home": path, "stop_timeout_s": 1.0} | settings
    chosen = Settings(**fields, kv_disk=False)  # pyright: ignore[reportArgumentType]
    kv = KvStore(chosen)
    kv.start()
    worker = WorkerProcess(chosen, kv.channel(spec_of(path)), lambda _: None)
    with pytest.raises((LoadFailed, WorkerWedged)) as caught:
        await worker.start()
    await worker.gone()
    return caught.value, worker


def change_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def truncate(path: Path, num_bytes: int) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:num_bytes])


Damage = Callable[[Path], object]

DAMAGES: dict[str, tuple[Damage, str]] = {
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "has no weights"),
    "broken config": (lambda path: (path / "config.json").write_text("{"), "is not valid JSON"),
    "long type": (lambda path: change_config(path, model_type="n" * 200_000), "no code of its own"),
    "missing field": (
        lambda path: (path / "config.json").write_text('{"model_type": "qwen3"}'),
        "missing 10 required",
    ),
    "truncated data": (lambda path: truncate(path, 100_000), "incomplete download"),
    "other shapes": (lambda path: change_config(path, hidden_size=32), "shape"),
    "own code": (lambda path: change_config(path, model_file="x.py"), "code of its own, 'x.py'"),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "tokenizer"),
}


async def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path):
    gate = asyncio.Semaphore(3)

    async def fail(name: str, damage: Damage) -> str:
        path = write_model(tmp_path / name)
        damage(path)
        async with gate:
            error, worker = await failure_of(path)
        assert worker.pid is not None
        assert worker.state == "crashed"
        return error.message

    damages = [(name, damage) for name, (damage, _) in DAMAGES.items()]
    messages = await asyncio.gather(*(fail(*one) for one in damages))
    for (name, (_, cause)), message in zip(DAMAGES.items(), messages, strict=True):
        assert message.startswith("The model m cannot be loaded: "), name
        assert cause in message, name


@pytest.mark.usefixtures("slow_loads")
async def test_a_load_that_takes_too_long_is_ended(tmp_path: Path):
    error, worker = await failure_of(write_model(tmp_path / "m"), load_timeout_s=0.05)
    assert error.message == "The model m was not loaded within 0.05 s."
    assert worker.state == "crashed"


@contextmanager
def hanging(file: Path) -> Generator[None]:
    """Whoever opens the file waits, as on a network disk that is gone: for 45 s at most."""
    opened = os.open(file, os.O_RDONLY)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(opened)
        signal.signal(signal.SIGIO, before)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files whose opening waits")
async def test_a_load_that_gets_nowhere_is_ended_long_before_its_time_is_over(tmp_path: Path):
    path = write_model(tmp_path / "m")
    with hanging(path / "model.safetensors"):
        error, worker = await failure_of(path, load_timeout_s=40.0)
    assert isinstance(error, WorkerWedged)
    stalled = re.search(r"made no progress in loading for (\d+\.\d) s", error.message)
    assert stalled is not None
    assert 40 / 5 <= float(stalled[1]) < 40
    assert worker.is_gone


async def test_requests_for_a_model_that_cannot_be_loaded_are_told_why(tmp_path: Path):
    path = write_model(tmp_path / "models" / "m")
    truncate(path, 100_000)
    async with supervising(tmp_path) as supervisor:
        waiting = [supervisor.submit(request("a")) for _ in range(3)]
        for generation in waiting:
            with pytest.raises(LoadFailed, match="incomplete download"):
                await generation.accepted()
        assert status_of(supervisor).state == "failed"
        assert "incomplete download" in str(status_of(supervisor).last_error)
        await until(lambda: "Traceback" in supervisor.stderr_tail("m"), "its last words")
        write_model(path)
        assert (await ask(supervisor, "a", max_tokens=2)).finished
        assert status_of(supervisor).state == "ready"


REST = sorted(FAMILIES.keys() - {"qwen3", "gemma3_text", "lfm2", "qwen3_moe", "llama4"})


@pytest.mark.soak
async def test_every_family_loads_and_answers(tmp_path: Path):
    gate = asyncio.Semaphore(3)
    prompt = TokenPrompt(token_ids=tuple(range(10, 110)))
    seeded = SamplingParams(temperature=0.8, seed=3)

    async def serve(family: str) -> tuple[str, str]:
        write_model(tmp_path / family / "models" / "m", family)
        async with gate, supervising(tmp_path / family, prefill_slice=32) as supervisor:
            alone = await ask(supervisor, prompt, sampling=seeded, ignore_eos=True)
            pair = [
                ask(supervisor, prompt, sampling=seeded, ignore_eos=True),
                ask(supervisor, "a kettle hums", ignore_eos=True),
            ]
            return alone.text, (await asyncio.gather(*pair))[0].text

    for family, (alone, together) in zip(
        REST, await asyncio.gather(*(serve(family) for family in REST)), strict=True
    ):
        assert alone, family
        assert together == alone, family


class LateStore(KvStore):
    """Tells workers what is on disk when it is let."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.is_let = asyncio.Event()
        self._joining: set[asyncio.Task[None]] = set()

    @override
    def join(self, channel: WorkerChannel) -> None:
        self._joining.add(asyncio.create_task(self._join(channel)))

    async def _join(self, channel: WorkerChannel) -> None:
        await self.is_let.wait()
        super().join(channel)


async def test_requests_come_after_what_is_on_disk_for_them(tmp_path: Path):
    """A load that is quicker than the index would have them compute what is known."""
    settings = Settings(home=tmp_path, stop_timeout_s=1.0)
    kv = LateStore(settings)
    kv.start()
    worker = WorkerProcess(
        settings, kv.channel(spec_of(write_model(tmp_path / "m"))), lambda _: None
    )
    starting = asyncio.create_task(worker.start())
    await until(lambda: worker.ready, "the model is loaded")
    assert worker.state == "warming"
    kv.is_let.set()
    await starting
    assert worker.state == "ready"
    await worker.stop()
    await kv.stop()
