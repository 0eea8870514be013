"""A server as its users run it: its own process, a real worker, spoken to over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from runtime.keys import read_admin_token
from tests import forked_server
from tests.forked_server import ForkedProcess, can_fork
from tests.forked_worker import SLOW_LOADS
from tests.waiting import PATIENCE_S, pause, until

ROOT = Path(__file__).parent.parent
START_S = PATIENCE_S
STORE_S = 3.0
ANSWER_S = 150.0
"""A model that is loaded may wait a minute for a slow store before it answers, and be swapped."""
Process = subprocess.Popen[bytes] | ForkedProcess

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


NUM_LOST = 3
"""So many workers may an answer be lost in; then its client is told."""
NUM_FURTHER = 33
"""Pieces of an answer: a worker that is lost after so many more was lost of something else."""


class RunningServer:
    """One `hearth serve`; its output is kept in files, so that it never waits for a reader."""

    def __init__(self, home: Path, process: Process, port: int) -> None:
        self.home = home
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.ready_line = ""
        self._printed = b""
        self._http = httpx.Client(base_url=self.url, timeout=ANSWER_S, trust_env=False)

    @property
    def stderr(self) -> str:
        return (self.home / "stderr.txt").read_text()

    def next_line(self, timeout_s: float = START_S) -> str:
        """What it prints next; nothing when it has ended."""
        assert self.process.stdout is not None
        out, due_s = self.process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._printed:
            left_s = max(due_s - time.monotonic(), 0.0)
            assert select.select([out], [], [], left_s)[0], f"no line:\n{self.stderr}"
            piece = os.read(out, 1 << 16)
            if not piece:
                return ""
            self._printed += piece
        line, _, self._printed = self._printed.partition(b"\n")
        return line.decode()

    def wait_until_ready(self, timeout_s: float = START_S) -> None:
        """Take the ready line; then until the models are loaded, and the store is had or not."""
        due_s = time.monotonic() + timeout_s
        self.ready_line = self.next_line(timeout_s)
        assert self.ready_line, f"no ready line within {timeout_s:g} s:\n{self.stderr}"
        while (answer := self._readiness()).status_code != 200:
            assert time.monotonic() < due_s, f"{answer.text}\n{self.stderr}"
            pause()
        due_s = min(due_s, time.monotonic() + STORE_S)
        while self._readiness().json()["cache"] == "opening" and time.monotonic() < due_s:
            pause()

    def _readiness(self) -> httpx.Response:
        """As the operator of this home is told it, where there are keys."""
        token = read_admin_token(self.home)
        headers = {"authorization": f"Bearer {token}"} if token is not None else {}
        return self.request("GET", "/health/ready", headers=headers)

    def wait_for_the_store(self, timeout_s: float = START_S) -> None:
        """Until it is open: `wait_until_ready` waits for it only for a while."""
        deadline_s = time.monotonic() + timeout_s
        while (cache := self._readiness().json()["cache"]) != "ok":
            assert time.monotonic() < deadline_s, f"cache: {cache}\n{self.stderr}"
            pause()

    def close(self) -> None:
        self._http.close()

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=30, trust_env=False)

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        self._http.cookies.clear()  # who wants to be signed in says so
        try:
            return self._http.request(method, path, **kwargs)
        except httpx.TimeoutException as error:
            error.add_note(f"{method} {path}\n{self.plight()}")
            raise

    def stream(self, method: str, path: str, **kwargs: Any) -> Any:
        return self._http.stream(method, path, **kwargs)

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.request("POST", path, json=body)

    def figure(self, name: str, **labels: str) -> float:
        """A figure of /metrics, summed over the labels that are not given."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def cold_model(self) -> str:
        """A model that works and is not loaded."""
        states = {card["id"]: card["state"] for card in self.get("/v1/models").json()["data"]}
        return next(name for name in ("tiny", "twin") if states[name] == "cold")

    def worker_pid(self) -> int:
        """The process that works, else the one that was loaded last."""
        models = sorted(self._loaded(), key=lambda one: (-one["num_running"], one["since_s"]))
        return int(models[0]["pid"])

    async def killed_for(self, answering: asyncio.Task[httpx.Response]) -> httpx.Response:
        """The answer to a request whose worker is killed when it has begun, and those after it."""
        killed: set[int] = set()
        async with asyncio.timeout(START_S):
            while not answering.done():
                requests = self.get("/admin/dashboard").json()["requests"]
                has_begun = any(one["num_pieces"] for one in requests)
                at_work = self._at_work() - killed
                if has_begun and at_work and len(killed) < NUM_LOST:
                    os.kill(min(at_work), signal.SIGKILL)
                    killed |= at_work
                await asyncio.sleep(0)
        return answering.result()

    def kill_worker(self) -> None:
        """The one that works, else the one that was loaded last."""
        os.kill(self.worker_pid(), signal.SIGKILL)

    async def lose_workers(self) -> None:
        """Kill the worker, and those after it, each when what it works for got further."""
        killed: list[int] = []

        def at_work() -> set[int]:
            return self._at_work().difference(killed)

        def num_said() -> float:
            return self.figure("hearth_inter_token_seconds_count", model="tiny")

        for _ in range(NUM_LOST):
            await until(at_work, "a worker that works")
            said = num_said()
            await until(lambda said=said: num_said() > said + NUM_FURTHER, "more of the answer")
            killed += at_work()
            os.kill(killed[-1], signal.SIGKILL)

    def _at_work(self) -> set[int]:
        return {int(one["pid"]) for one in self._loaded() if one["num_running"]}

    def forgive(self, model: str = "tiny") -> None:
        """Load a model anew and forget its crashes, of which three stop it for a while."""
        answer = self.request("POST", f"/admin/models/{model}/restart")
        assert answer.status_code == 200, answer.text

    @contextmanager
    def slow_loads(self) -> Generator[None]:
        """Models take their seconds to load meanwhile, as they do outside of tests."""
        mark = self.home / SLOW_LOADS
        mark.touch()
        try:
            yield
        finally:
            mark.unlink()

    def plight(self) -> str:
        """What it is at while it gives no answer, as far as it says, and the end of its log."""
        try:
            models = httpx.get(f"{self.url}/running", timeout=5, trust_env=False).text
        except httpx.HTTPError as error:
            models = f"/running: {error!r}"
        return "\n".join([models, *self.stderr.splitlines()[-40:]])

    def _loaded(self) -> list[Any]:
        return [one for one in self.get("/running").json()["models"] if one["pid"]]

    def stop(self, timeout_s: float = 30.0) -> int:
        """End it as an operator does; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


def _ports() -> Iterator[int]:
    """Each process that tests has a thousand of its own."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 20
    begun = os.getpid() % 1000  # another run's are likely to be elsewhere
    return (10_000 + 1000 * number + (begun + i) % 1000 for i in itertools.count())


_PORTS = _ports()


def free_port() -> int:
    """One that nobody else takes before a server does: no system hands these out by itself."""
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("every port is taken")


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """The test's environment without any of our own variables, but with these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}
    # Tests count workers; the spare has tests of its own.
    defaults = {"HF_HUB_OFFLINE": "1", "HEARTH_SPARE_WORKER": "false"}
    return kept | defaults | dict(changes)


def _start(
    arguments: list[str], env: dict[str, str], stderr: IO[bytes], *, is_fresh: bool
) -> Process:
    if not is_fresh and can_fork(env.keys() - os.environ.keys()):
        return forked_server.serve(arguments, env, stderr)
    return subprocess.Popen(
        [sys.executable, "-m", "api", *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd=ROOT,
        env=env,
    )


def hearth(*words: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """`hearth WORDS`, with these variables and none of our own else."""
    env = environment(variables)
    if can_fork(env.keys() - os.environ.keys()):
        return forked_server.run(words, env, stdin, START_S)
    return subprocess.run(
        [sys.executable, "-m", "api", *words],
        check=False,
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env,
        timeout=START_S,
    )


@contextmanager
def started(
    home: Path, *flags: str, config: str = "", is_fresh: bool = False, **variables: str
) -> Generator[RunningServer]:
    """A server that was started and is not ready yet; killed at the end if it still runs.

    It is forked with its imports done, unless it is to be a fresh process as its users' are.
    """
    home.mkdir(parents=True, exist_ok=True)
    if config:
        (home / "hearth.toml").write_text(config)
    port = int(variables.get("HEARTH_PORT") or free_port())
    defaults = {"HEARTH_HOME": str(home), "HEARTH_PORT": str(port), "HEARTH_SPARE_WORKER": "false"}
    variables = defaults | variables
    with (home / "stderr.txt").open("wb") as stderr:
        process = _start(["serve", *flags], environment(variables), stderr, is_fresh=is_fresh)
    server = RunningServer(home, process, port)
    try:
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        server.close()
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def running(
    home: Path, *flags: str, config: str = "", **variables: str
) -> Generator[RunningServer]:
    """A server that is ready; stopped gracefully at the end."""
    with started(home, *flags, config=config, is_fresh=False, **variables) as server:
        server.wait_until_ready()
        yield server
        server.stop()


def workers_of(home: Path) -> list[psutil.Process]:
    """Processes of workers whose server has this home, wherever that server is by now."""
    found: list[psutil.Process] = []
    for one in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            is_sandbox = os.getpgid(one.pid) != one.pid
            is_worker = "runtime.worker" in one.cmdline() and not is_sandbox
            if is_worker and one.environ().get("HEARTH_HOME") == str(home):
                found.append(one)
    return found


def events_of(body: str) -> list[Any]:
    """The decoded events of a finished stream, `[DONE]` as a string."""
    blocks = [block for block in body.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks), blocks
    return [_event(block) for block in blocks]


def _event(block: str) -> Any:
    data = block.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)


@asynccontextmanager
async def streaming(server: RunningServer, path: str, body: Any) -> AsyncGenerator[Stream]:
    """A stream whose headers have arrived; leaving the block closes the connection."""
    async with (
        server.client() as client,
        client.stream("POST", path, json=body | {"stream": True}) as response,
    ):
        yield Stream(response)


class Stream:
    """A stream that is being read."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.comments: list[str] = []
        self.events: list[Any] = []
        self._blocks = self._read()

    async def _read(self) -> AsyncIterator[str]:
        text = ""
        async for piece in self.response.aiter_text():
            *blocks, text = (text + piece).split("\n\n")
            for block in blocks:
                yield block
        assert text == "", f"the stream broke off inside {text!r}"

    async def next(self) -> bool:
        """Read one event or comment; False at the end."""
        async for block in self._blocks:
            if block.startswith(":"):
                self.comments.append(block)
            else:
                assert block.startswith("data: "), block
                self.events.append(_event(block))
            return True
        return False

    async def next_event(self) -> Any:
        """The next event, comments skipped."""
        num_events = len(self.events)
        while len(self.events) == num_events:
            assert await self.next(), "the stream ended"
        return self.events[-1]

    async def rest(self) -> list[Any]:
        """All events up to the end."""
        while await self.next():
            pass
        return self.events
