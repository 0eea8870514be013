"""Row 2: a writer killed at any of its system calls leaves nothing wrong and loses nothing."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.cache.opened import Terms, open_blocks
from store.head_file import HEAD
from store.kv_file import open_file
from store.room import Limits
from store.slots import SLOT
from tests.crash.server_store import check_store
from tests.crash.slot_writer import BLOCK, GROUPS, REMOVED, SECRET, found, session_of
from tests.crash.tracing import Call, has_begun, needs_strace, run_writer

pytestmark = needs_strace

NUMBERS = [number for group in GROUPS for number in group]


def check_named(root: Path) -> None:
    """The writer never gives a name to half a file."""
    for folder, kind in (("slots", SLOT), ("heads", HEAD)):
        for path in (root / folder).rglob("*.safetensors"):
            if not path.name.startswith("."):
                with open_file(path, kind) as file:
                    file.read()


def check_after_kill(folder: Path, said: str) -> None:
    root, acknowledged = folder / "store", {int(one) for one in said.split()}
    check_named(root)
    is_removed = -REMOVED in acknowledged
    for number in NUMBERS:
        is_there = found(root, number)
        assert is_there is not False
        if number in acknowledged and number != REMOVED:
            assert is_there
        assert not (is_there and number == REMOVED and is_removed)


def check_start(folder: Path, said: str) -> None:
    """The next server has what was acknowledged, and puts all else in order."""
    root, acknowledged = folder / "store", {int(one) for one in said.split()}
    store = open_blocks(root, Terms(BLOCK, None, Limits(1 << 50)), SECRET)
    sessions = {one.head.owner.session for one in store.heads.known.values()}
    store.close()
    assert {session_of(one) for one in acknowledged if one > 0} - sessions <= {session_of(REMOVED)}
    check_store(root, block_size=BLOCK)


def kill_at(folder: Path, call: Call) -> str:
    """Kill a writer there; what it has acknowledged."""
    folder.mkdir()
    fault = f"{call.name}:signal=SIGKILL:when={call.nth}"
    outcome = run_writer(folder, "groups", fault=fault)
    assert outcome.returncode != 0
    check_after_kill(folder, outcome.output)
    return outcome.output


def test_killed_at_every_system_call(tmp_path: Path):
    whole = tmp_path / "whole"
    whole.mkdir()
    outcome = run_writer(whole, "groups")
    assert outcome.returncode == 0, outcome.output
    assert {int(one) for one in outcome.output.split()} == {*NUMBERS, -REMOVED}
    check_after_kill(whole, outcome.output)
    check_start(whole, outcome.output)
    calls = [call for call in outcome.calls if call.name != "newfstatat"]
    assert len(calls) > 50
    with ThreadPoolExecutor(8) as pool:
        folders = [tmp_path / str(at) for at in range(len(calls))]
        said = list(pool.map(kill_at, folders, calls))
    # Nobody starts a process meanwhile: it would have the store's lock until it runs its program.
    for call, folder, acknowledged in zip(calls, folders, said, strict=True):
        if call.nth % 10 == 0:
            check_start(folder, acknowledged)
    assert sum(map(has_begun, folders)) >= 0.95 * len(calls)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("turn", range(20))
def test_killed_at_every_system_call_again(tmp_path: Path, turn: int):
    test_killed_at_every_system_call(tmp_path)
