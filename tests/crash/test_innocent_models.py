"""What the machine or other programs do to a server's processes is held against no model."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.supervisor.failures import LOST_LIMIT, MACHINE_S
from tests.conversation import Conversation
from tests.running_server import CHAT, ROOT, RunningServer, environment, free_port, running
from tests.waiting import PATIENCE_S, pause

FEW_FILES = 256
ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 4,
    "ignore_eos": True,
}
LONG = ASK | {"max_tokens": 600, "stream": True}
_LOOK_S = 0.02
SHORT_S = 4.0
"""After so long without a sign of life a worker is taken to hang."""
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits are inherited by a shell")


def config_of(models_dir: Path, **fields: str) -> str:
    own = "".join(f"{name} = {value}\n" for name, value in fields.items())
    return f'models_dir = "{models_dir}"\ndefault_model = "tiny"\n{own}'


@contextmanager
def limited(home: Path, limits: str, config: str) -> Generator[RunningServer]:
    """A server that a shell starts with these words of `ulimit`."""
    home.mkdir(exist_ok=True)
    (home / "hearth.toml").write_text(config)
    port = free_port()
    env = environment({"HEARTH_HOME": str(home), "HEARTH_PORT": str(port)})
    command = ["sh", "-c", f'ulimit {limits}; exec "$@"', "sh", sys.executable, "-m", "api"]
    with (home / "stderr.txt").open("wb") as stderr:
        process = subprocess.Popen(
            [*command, "serve"], stdout=subprocess.PIPE, stderr=stderr, cwd=ROOT, env=env
        )
    server = RunningServer(home, process, port)
    try:
        yield server
    finally:
        process.kill()
        process.wait()
        server.close()
        assert process.stdout is not None
        process.stdout.close()


@LINUX
def test_too_few_files_are_said_of_the_machine_and_not_of_the_model(
    tmp_path: Path, models_dir: Path
):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        pytest.skip("this machine allows fewer files still")
    with limited(tmp_path, f"-n {FEW_FILES}", config_of(models_dir)) as server:
        server.wait_until_ready()
        refusal = server.post(CHAT, ASK)
        if refusal.status_code == 200:
            pytest.skip("this account may raise limits")
        error = refusal.json()["error"]
        assert (refusal.status_code, error["code"]) == (503, "machine_failed")
        for said in (error["message"], *server.get("/health/ready").json()["machine"]):
            assert f"{FEW_FILES} files" in said
            assert "ulimit -Hn" in said
        assert 1 <= int(refusal.headers["retry-after"]) <= 5
        assert server.figure("hearth_worker_crashes_total") == 0
        assert server.stderr.count("ulimit -Hn") >= 1


@LINUX
def test_a_low_limit_that_may_be_raised_is_raised(tmp_path: Path, models_dir: Path):
    with limited(tmp_path, f"-Sn {FEW_FILES}", config_of(models_dir)) as server:
        server.wait_until_ready()
        assert server.post(CHAT, ASK).status_code == 200
        limit, hard = psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE)
        assert limit == min(8192, hard)
        assert server.get("/health/ready").json()["machine"] == []


def everything_of(server: RunningServer) -> list[int]:
    """The server's process and its workers'."""
    return [server.process.pid, server.worker_pid()]


def stopped_for(pids: list[int], seconds: float) -> None:
    """As a closed lid, a debugger, or a terminal's ^Z does it."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    over = threading.Event()
    threading.Timer(seconds, over.set).start()
    over.wait()
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("who", ["server", "worker", "both"])
def test_who_was_stopped_and_goes_on_has_lost_nothing(tmp_path: Path, models_dir: Path, who: str):
    quick = {"heartbeat_timeout_s": f"{SHORT_S}", "wedge_timeout_s": f"{SHORT_S}"}
    talk = Conversation(20)
    with running(tmp_path, config=config_of(models_dir, **quick)) as server:
        first = talk.ask(server, session_id="a")
        everything = everything_of(server)
        pids = {"server": everything[:1], "worker": everything[1:], "both": everything}[who]
        with server.stream("POST", CHAT, json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            stopped_for(pids, 2 * SHORT_S)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert everything_of(server) == everything
        assert server.figure("hearth_worker_crashes_total") == 0
        assert talk.ask(server, session_id="a").num_cached_tokens >= first.num_prompt_tokens - 1
        assert "is being replaced" not in server.stderr


def test_the_deadline_of_an_answer_counts_no_time_in_which_nothing_ran(
    tmp_path: Path, models_dir: Path
):
    with running(tmp_path, config=config_of(models_dir, request_deadline_s="15")) as server:
        assert server.post(CHAT, ASK).status_code == 200
        asked = LONG | {"stream_options": {"include_usage": True}}
        with server.stream("POST", CHAT, json=asked) as answer:
            lines = answer.iter_lines()
            next(lines)
            stopped_for(everything_of(server), 16.0)
            told = [line for line in lines if line]
        assert told[-1] == "data: [DONE]"
        assert json.loads(told[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 600
        assert "deadline_exceeded" not in "".join(told)


def test_the_deadline_of_what_waits_for_its_model_counts_no_such_time_either(
    tmp_path: Path, models_dir: Path
):
    short = {"request_deadline_s": "30", "max_wait_s": "30", "preload": "[]"}
    with running(tmp_path, config=config_of(models_dir, **short)) as server:
        with server.slow_loads(), ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.post, CHAT, ASK)
            loads = (server.get("/running").json()["models"] for _ in iter(pause, 0))
            pid = next(one["pid"] for models in loads for one in models if one["pid"])
            stopped_for([server.process.pid, pid], 31.0)
            answer = asked.result()
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == ASK["max_tokens"]
        assert "deadline_exceeded" not in answer.text


def test_a_stopped_worker_that_somebody_waits_for_is_continued(tmp_path: Path, models_dir: Path):
    quick = {"heartbeat_timeout_s": f"{SHORT_S}"}
    with running(tmp_path, config=config_of(models_dir, **quick)) as server:
        assert server.post(CHAT, ASK).status_code == 200
        pid = server.worker_pid()
        os.kill(pid, signal.SIGSTOP)
        assert server.post(CHAT, ASK).status_code == 200
        assert server.worker_pid() == pid
        assert server.figure("hearth_worker_crashes_total") == 0
        assert "worker was stopped" in server.stderr


@pytest.mark.skipif(
    signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
    reason="what begins this ignores SIGHUP, as nohup does, and so would the server",
)
def test_a_hangup_drains_and_says_so(tmp_path: Path, models_dir: Path):
    with running(tmp_path, config=config_of(models_dir)) as server:
        with server.stream("POST", CHAT, json=LONG | {"max_tokens": 64}) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(server.process.pid, signal.SIGHUP)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(PATIENCE_S) == 0
        assert "SIGHUP" in server.stderr


def sandbox_of(pid: int) -> list[psutil.Process]:
    """What a worker forked to take requests in: nobody's child, in its process group."""
    found: list[psutil.Process] = []
    for one in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if one.pid != pid and os.getpgid(one.pid) == pid:
                found.append(one)
    return found


@contextmanager
def sandboxes_killed(server: RunningServer, most: float) -> Generator[set[int]]:
    """The sandboxes of the workers that load meanwhile are killed, of so many at most; their ids.

    It is what a worker has before it is told what to load, so it is gone when that is read.
    """
    over, found = threading.Event(), set[int]()

    def kill() -> None:
        while not over.wait(_LOOK_S):
            for one in server.get("/running").json()["models"]:
                if one["pid"] and (one["pid"] in found or len(found) < most):
                    sandbox = sandbox_of(one["pid"])
                    found.update([one["pid"]] * bool(sandbox))
                    for part in sandbox:
                        with suppress(psutil.NoSuchProcess):
                            part.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def test_a_sandbox_that_is_killed_while_a_model_loads_costs_another_load(
    tmp_path: Path, models_dir: Path
):
    with running(tmp_path, config=config_of(models_dir, preload="[]")) as server:
        with server.slow_loads(), sandboxes_killed(server, most=1) as killed:
            assert server.post(CHAT, ASK).status_code == 200, server.stderr
        assert len(killed) == 1
        assert server.worker_pid() not in killed
        assert "another program ended its sandbox" in server.stderr


def test_sandboxes_that_are_killed_at_every_load_are_told_with_a_remedy(
    tmp_path: Path, models_dir: Path
):
    with running(tmp_path, config=config_of(models_dir, preload="[]")) as server:
        with server.slow_loads(), sandboxes_killed(server, most=math.inf) as killed:
            refusals = [server.post(path, ASK) for path in (CHAT, "/v1/messages")]
        assert len(killed) == LOST_LIMIT
        assert [one.status_code for one in refusals] == [503, 529]
        for refusal in refusals:
            said = refusal.json()["error"]["message"]
            assert f"{LOST_LIMIT} processes of the model tiny" in said
            assert "another program ended its sandbox" in said
            assert "leave those of Hearth alone" in said
            assert "Error" not in said
            assert said in server.stderr
            assert 1 <= int(refusal.headers["retry-after"]) <= MACHINE_S
        answers = (server.post(CHAT, ASK).status_code for _ in iter(pause, 0))
        assert next(code for code in answers if code != 503) == 200
        states = {one["id"]: one["state"] for one in server.get("/v1/models").json()["data"]}
        assert states["tiny"] in ("ready", "busy")


def test_a_killed_sandbox_is_no_strike(tmp_path: Path, models_dir: Path):
    with running(tmp_path, config=config_of(models_dir)) as server:
        for number in range(4):  # three crashes in five minutes would be too many
            assert server.post(CHAT, ASK).status_code == 200, server.stderr
            pid = server.worker_pid()
            for one in sandbox_of(pid):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            assert server.post(CHAT, ASK).status_code == 200, (number, server.stderr)
            assert server.worker_pid() != pid
        assert "sandbox" in server.stderr
        states = {one["id"]: one["state"] for one in server.get("/v1/models").json()["data"]}
        assert states["tiny"] in ("ready", "busy")
