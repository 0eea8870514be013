"""Row 21: a worker for which there is no memory costs time only: what was said is still known."""

from __future__ import annotations

import resource
import signal
import sys
import uuid
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from runtime.supervisor.crashes import Crashes, CrashRecord
from tests.conversation import CODE, Conversation
from tests.crash.server_store import check_store, wait_until_durable
from tests.running_server import CHAT, running
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux limits the memory of a process that runs"
)

LEFT_BYTES = 32 << 20
"""What the worker may still take: far less than a long prompt needs."""

GROUPS = Path("/sys/fs/cgroup")

Limit = Callable[[int], AbstractContextManager[None]]


@contextmanager
def killed_by_the_system(pid: int) -> Generator[None]:
    """A control group with a limit: who exceeds it is killed. Memory from before does not count."""
    is_old = (GROUPS / "memory").is_dir()
    group = (GROUPS / "memory" if is_old else GROUPS) / f"hearth-test-{uuid.uuid4().hex}"
    limit = group / ("memory.limit_in_bytes" if is_old else "memory.max")
    try:
        group.mkdir()
        limit.write_text(str(LEFT_BYTES))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group that limits memory can be made here: {error}")
    yield
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(PATIENCE_S)
    group.rmdir()


@contextmanager
def refused_by_the_system(pid: int) -> Generator[None]:
    """A limit of the address space: the next big allocation fails, wherever that is."""
    mapped_bytes = psutil.Process(pid).memory_info().vms
    _, most = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (mapped_bytes + LEFT_BYTES, most))
    yield
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, (most, most))


def scenario(home: Path, limited: Limit) -> tuple[int, list[CrashRecord]]:
    """A conversation, a request that the worker has no memory for, and the conversation's next
    turn; the worker's process and what is recorded of crashes.
    """
    talk, other = Conversation(20), Conversation(120)
    with running(home, config='default_model = "hearth-tiny"\n') as server:
        reply = talk.ask(server, session_id="a")
        num_durable = wait_until_durable(server, "a", reply.num_prompt_tokens - 1)
        pid = server.worker_pid()
        with limited(pid):
            answer = server.post(CHAT, {"messages": other.messages, "max_tokens": 5})
        if answer.status_code != 200:
            assert answer.json()["error"]["code"] == "model_error", answer.text
        assert CODE in other.ask(server).text
        again = talk.ask(server, session_id="a")
        assert CODE in again.text
        assert again.num_cached_tokens >= num_durable - 1
    assert check_store(home / "kv") > 0
    return pid, list(Crashes(home / "crashes").records())


def test_a_worker_that_is_refused_memory_says_so_or_is_replaced(tmp_path: Path):
    """Where an allocation fails, Python and mlx raise; some libraries cannot."""
    pid, crashes = scenario(tmp_path, refused_by_the_system)
    assert [crash.pid for crash in crashes] in ([], [pid])


@pytest.mark.soak
def test_a_worker_that_is_killed_for_its_memory_is_replaced(tmp_path: Path):
    pid, (crash,) = scenario(tmp_path, killed_by_the_system)
    assert (crash.pid, crash.signal) == (pid, signal.SIGKILL.name)
    assert crash.was_out_of_memory
