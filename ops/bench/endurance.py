"""A mixed load for an hour, and whether memory, descriptors and threads end where they were.

`python -m ops.bench.endurance` writes `endurance.json`; METHODOLOGY says what the figures are.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import httpx
import mlx.core as mx
import msgspec
import psutil

from api.bench.machine import Environment, environment
from ops.bench.processes import Hearth, hearth, workers_of
from runtime.embedded import HEARTH_TINY

_REPORT = Path(__file__).parent / "endurance.json"
_WORDS = "river harbour kettle lantern orchard velvet onyx copper window garden signal".split()
_NUM_CLIENTS = 6
_SAMPLE_EVERY_S = 10.0
_CHORE_EVERY_S = 30.0
_PATIENCE_S = 120.0
_SETTLE_S = 30.0
_QUEUED = "hearth_kv_write_queue_bytes"
_HOME_SETTINGS = {
    "cache_max_bytes": 300_000_000,
    "hot_bytes": 60_000_000,
    "kv_write_queue_bytes": 67_108_864,
    "kv_ttl_s": 600,
    "history_max_bytes": 20_000_000,
    "history_ttl_s": 600,
}

Body = Mapping[str, object]


class Trend(msgspec.Struct):
    """One figure over the run: medians of the first and last tenth after the warm-up, and between.

    `slope_per_hour` is the least-squares line's, in the figure's unit.
    """

    first: float
    last: float
    largest: float
    slope_per_hour: float


class Figures(msgspec.Struct):
    """One run: what was asked, how it ended, and what the processes took."""

    environment: Environment
    minutes: float
    warm_up_minutes: float
    clients: int
    requests: int
    ends: dict[str, int]
    chores: dict[str, int]
    server_rss_mb: Trend
    server_descriptors: Trend
    server_threads: Trend
    workers_rss_mb: Trend
    workers_descriptors: Trend
    workers_threads: Trend
    num_processes: Trend
    queued_mb: Trend
    kv_disk_mb: Trend
    samples: list[Sample]


class Sample(msgspec.Struct):
    """What the processes take at one moment. Workers' figures are the largest of any worker.

    `queued_mb` is what waits in all of them to be written.
    """

    at_s: float
    server_rss_mb: float
    server_descriptors: int
    server_threads: int
    workers_rss_mb: float
    workers_descriptors: int
    workers_threads: int
    num_processes: int
    queued_mb: float
    kv_disk_mb: float


def trend(points: Sequence[tuple[float, float]]) -> Trend:
    """The trend of points (seconds, figure), in order of time; at least two are needed."""
    values = [value for _, value in points]
    tenth = max(1, len(values) // 10)
    slope = statistics.linear_regression([at for at, _ in points], values).slope
    return Trend(
        first=round(statistics.median(values[:tenth]), 2),
        last=round(statistics.median(values[-tenth:]), 2),
        largest=round(max(values), 2),
        slope_per_hour=round(slope * 3600, 3),
    )


class Asker:
    """One client: it asks something of the mixed load again and again until the end."""

    def __init__(self, port: int, number: int, ends: Counter[str]) -> None:
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=_PATIENCE_S, trust_env=False
        )
        self._chance = random.Random(number)
        self._ends = ends
        self._messages: list[Body] = []
        self._kinds: tuple[tuple[Callable[[], Awaitable[object]], int], ...] = (
            (self._chat, 6),
            (self._stream, 6),
            (self._messages_api, 3),
            (self._completion, 3),
            (self._tool, 2),
            (self._structured, 2),
            (self._response, 2),
            (self._agent, 2),
            (self._leave, 3),
            (self._bad, 3),
            (self._look, 2),
        )

    async def run(self, until_s: float) -> None:
        """Ask until the monotonic clock says so."""
        asks = [ask for ask, _ in self._kinds]
        weights = [weight for _, weight in self._kinds]
        async with self._client:
            while time.monotonic() < until_s:
                (ask,) = self._chance.choices(asks, weights)
                try:
                    self._ends[f"{ask.__name__.lstrip('_')} {await ask()}"] += 1
                except httpx.HTTPError as error:
                    self._ends[f"{ask.__name__.lstrip('_')} {type(error).__name__}"] += 1

    def _words(self, most: int) -> str:
        return " ".join(self._chance.choices(_WORDS, k=self._chance.randint(1, most)))

    def _model(self) -> str:
        return self._chance.choice(("bench", "bench", "other"))

    def _turn(self) -> Body:
        if len(self._messages) > 12 or self._chance.random() < 0.1:
            self._messages = []
        if not self._messages:
            self._messages.append({"role": "system", "content": self._words(200)})
        self._messages.append({"role": "user", "content": self._words(30)})
        return {"model": self._model(), "messages": self._messages, "max_tokens": 24}

    async def _post(self, path: str, body: Body) -> int:
        return (await self._client.post(path, json=body)).status_code

    async def _chat(self) -> int:
        answer = await self._client.post("/v1/chat/completions", json=self._turn())
        if answer.status_code == 200:
            text = answer.json()["choices"][0]["message"]["content"] or "nothing"
            self._messages.append({"role": "assistant", "content": text})
        else:
            self._messages = []
        return answer.status_code

    async def _stream(self) -> int:
        body = {**self._turn(), "stream": True}
        self._messages = []
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                pass
        return answer.status_code

    async def _messages_api(self) -> int:
        block = {"type": "text", "text": self._words(200), "cache_control": {"type": "ephemeral"}}
        said = [{"role": "user", "content": self._words(30)}]
        body = {"model": self._model(), "system": [block], "messages": said, "max_tokens": 16}
        return await self._post("/v1/messages", body)

    async def _completion(self) -> int:
        body = {"model": self._model(), "prompt": self._words(400), "max_tokens": 8}
        return await self._post("/v1/completions", body)

    async def _tool(self) -> int:
        parameters = {"type": "object", "properties": {"at": {"type": "integer"}}}
        tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
        body = {"model": "bench", "messages": [{"role": "user", "content": self._words(20)}]}
        return await self._post(
            "/v1/chat/completions",
            body | {"tools": [tool], "tool_choice": "required", "max_tokens": 32},
        )

    async def _structured(self) -> int:
        names = {f"field{self._chance.randrange(10_000)}": {"type": "boolean"}}
        schema = {"type": "object", "properties": names, "required": list(names)}
        wanted = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
        body = {"model": "bench", "messages": [{"role": "user", "content": self._words(20)}]}
        return await self._post(
            "/v1/chat/completions", body | {"response_format": wanted, "max_tokens": 40}
        )

    async def _response(self) -> int:
        body = {"model": "bench", "input": self._words(60), "max_output_tokens": 16}
        return await self._post("/v1/responses", body)

    async def _agent(self) -> int:
        made = await self._client.post("/v1/agents", json={"system": self._words(100)})
        if made.status_code != 201:
            return made.status_code
        path = f"/v1/agents/{made.json()['id']}"
        said = {"messages": [{"role": "user", "content": self._words(20)}], "max_tokens": 8}
        status = await self._post(f"{path}/generate", said)
        if self._chance.random() < 0.5:
            await self._client.delete(path)
        return status

    async def _leave(self) -> str:
        body = {**self._turn(), "stream": True, "max_tokens": 400}
        self._messages = []
        after = self._chance.randrange(4)
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            pieces = answer.aiter_bytes()
            for _ in range(after):
                await anext(pieces, None)
        return "left"

    async def _bad(self) -> int:
        body = self._chance.choice(
            (
                {"model": "nobody", "messages": [{"role": "user", "content": "hello"}]},
                {"model": "bench", "messages": []},
                {"model": "bench", "messages": [{"role": "user", "content": "x"}], "n": 10**6},
                {"model": "bench", "messages": "hello"},
            )
        )
        return await self._post("/v1/chat/completions", body)

    async def _look(self) -> int:
        path = self._chance.choice(("/metrics", "/health/ready", "/running", "/v1/models"))
        return (await self._client.get(path)).status_code


class Chores:
    """What an operator and jobs do meanwhile: unload, collect, delete, look."""

    def __init__(self, server: Hearth, done: Counter[str]) -> None:
        self._url = f"http://127.0.0.1:{server.port}"
        self._done = done

    async def run(self, until_s: float) -> None:
        """One chore every half a minute until the monotonic clock says so."""
        number = 0
        async with httpx.AsyncClient(
            base_url=self._url, timeout=_PATIENCE_S, trust_env=False
        ) as client:
            while time.monotonic() < until_s - _CHORE_EVERY_S:
                await asyncio.sleep(_CHORE_EVERY_S)
                name = ("unload", "collect", "restart", "list")[number % 4]
                try:
                    self._done[f"{name} {await self._one(client, name)}"] += 1
                except httpx.HTTPError as error:
                    self._done[f"{name} {type(error).__name__}"] += 1
                number += 1

    async def _one(self, client: httpx.AsyncClient, name: str) -> int:
        match name:
            case "unload":
                answer = await client.post("/admin/models/other/unload", json={})
            case "restart":
                answer = await client.post("/admin/models/other/restart", json={})
            case "collect":
                answer = await client.post("/admin/cache/gc", json={})
            case _:
                answer = await client.get("/admin/cache")
        return answer.status_code


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def sample(server: Hearth, home: Path, since_s: float) -> Sample:
    """What server and workers take now."""
    process = psutil.Process(server.pid)
    workers = list(filter(_lives, workers_of(server.pid)))

    def largest(figure: Callable[[psutil.Process], float]) -> float:
        most = 0.0
        for one in workers:
            try:
                most = max(most, figure(one))
            except psutil.NoSuchProcess:
                continue  # it left between the listing and the look
        return most

    # Directories come and go meanwhile, which walk() takes as it finds it.
    files = [Path(folder, name) for folder, _, names in os.walk(home / "kv") for name in names]
    return Sample(
        at_s=round(time.monotonic() - since_s, 1),
        server_rss_mb=round(process.memory_info().rss / 1e6, 1),
        server_descriptors=process.num_fds(),
        server_threads=process.num_threads(),
        workers_rss_mb=round(largest(lambda one: one.memory_info().rss) / 1e6, 1),
        workers_descriptors=int(largest(lambda one: one.num_fds())),
        workers_threads=int(largest(lambda one: one.num_threads())),
        num_processes=1 + len(workers),
        queued_mb=round(_queued_bytes(server.port) / 1e6, 1),
        kv_disk_mb=round(sum(_size(path) for path in files) / 1e6, 1),
    )


def _queued_bytes(port: int) -> float:
    """What waits to be written, by the server's own metrics."""
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=_PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(one.split()[-1]) for one in lines if one.startswith(_QUEUED))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # evicted between the listing and the look
        return 0


async def sample_until(server: Hearth, home: Path, until_s: float, kept: list[Sample]) -> None:
    """Take a sample every ten seconds until the monotonic clock says so."""
    since_s = time.monotonic()
    while time.monotonic() < until_s:
        kept.append(await asyncio.to_thread(sample, server, home, since_s))
        await asyncio.sleep(_SAMPLE_EVERY_S)


def other_model(folder: Path) -> Path:
    """A second model: the embedded one with another norm weight, so that its KV is its own."""
    shutil.copytree(HEARTH_TINY, folder)
    file = folder / "model.safetensors"
    weights = cast(dict[str, mx.array], mx.load(str(file)))
    name = min(name for name in weights if "norm" in name)
    weights[name] = weights[name] * 1.001
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    return folder


async def measure(minutes: float, warm_up_minutes: float) -> Figures:
    """The whole run against one server, and half a minute of quiet after it."""
    ends: Counter[str] = Counter()
    done: Counter[str] = Counter()
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        home = folder / "home"
        home.mkdir(mode=0o700)
        others = {"other": other_model(folder / "other")}
        async with hearth(HEARTH_TINY, home, others, None, key="", **_HOME_SETTINGS) as server:
            until_s = time.monotonic() + minutes * 60
            async with asyncio.TaskGroup() as group:
                for number in range(_NUM_CLIENTS):
                    group.create_task(Asker(server.port, number, ends).run(until_s))
                group.create_task(Chores(server, done).run(until_s))
                group.create_task(sample_until(server, home, until_s + _SETTLE_S, samples))
    return figures_of(samples, ends, done, (minutes, warm_up_minutes))


def figures_of(
    samples: list[Sample], ends: Counter[str], done: Counter[str], minutes: tuple[float, float]
) -> Figures:
    """The trends of everything after the warm-up; `minutes` are the whole run's and its own."""
    counted = [one for one in samples if one.at_s >= minutes[1] * 60]
    names = [name for name in Sample.__struct_fields__ if name != "at_s"]
    rows = [msgspec.structs.asdict(one) for one in counted]
    trends = {name: trend([(row["at_s"], row[name]) for row in rows]) for name in names}
    return Figures(
        environment=environment(),
        minutes=minutes[0],
        warm_up_minutes=minutes[1],
        clients=_NUM_CLIENTS,
        requests=ends.total(),
        ends=dict(sorted(ends.items())),
        chores=dict(sorted(done.items())),
        samples=samples,
        **trends,
    )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.endurance", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--warm-up", type=float, default=15, help="minutes that are not counted")
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.minutes, arguments.warm_up))
    print(f"{figures.requests} requests: {json.dumps(figures.ends)}")
    print(f"chores: {json.dumps(figures.chores)}")
    trends = {n: one for n, one in msgspec.structs.asdict(figures).items() if type(one) is Trend}
    for name, one in trends.items():
        line = f"{one.first:9.1f} -> {one.last:9.1f}   largest {one.largest:9.1f}"
        print(f"{name:20s} {line}   {one.slope_per_hour:+.2f} an hour")
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


if __name__ == "__main__":
    main()
