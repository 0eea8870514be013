"""Row 2: a writer killed at any of its system calls leaves nothing wrong and loses nothing."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from store import slots, upkeep
from tests.crash.slot_writer import GROUPS
from tests.crash.tracing import Call, has_begun, needs_strace, run_writer
from tests.slot_samples import holds, is_served, slot_id

pytestmark = needs_strace

NUMBERS = [number for group in GROUPS for number in group]
REMOVED = 2


def survey(root: Path) -> dict[str, bool]:
    """Which published files are there, and whether each is served, which has to mean right."""
    numbers = {slot_id(number): number for number in NUMBERS}
    found: dict[str, bool] = {}
    for path in upkeep.slot_files(root):
        found[path.name] = is_served(path)
        assert not found[path.name] or holds(path, numbers[path.stem])
    return found


def check_after_kill(folder: Path, acknowledged: set[int]) -> None:
    root = folder / "store"
    found = survey(root)
    assert all(found.values()), "the writer never gives a name to half a file"
    rows = (folder / "index").read_text().split() if (folder / "index").exists() else []
    visible = {int(row) for row in rows if row[0] == "+"} - {
        -int(row) for row in rows if row[0] == "-"
    }
    assert acknowledged - visible <= {REMOVED}
    for number in visible:
        assert is_served(slots.slot_path(root, slot_id(number)))
    upkeep.sweep_temp(root)
    assert not list(root.rglob(".tmp-*"))
    assert upkeep.sweep_temp(root) == 0
    assert survey(root) == found


def kill_at(folder: Path, call: Call) -> bool:
    folder.mkdir()
    fault = f"{call.name}:signal=SIGKILL:when={call.nth}"
    outcome = run_writer(folder, "groups", fault=fault)
    assert outcome.returncode != 0
    check_after_kill(folder, {int(one) for one in outcome.output.split()})
    return has_begun(folder)


def test_killed_at_every_system_call(tmp_path: Path):
    whole = tmp_path / "whole"
    whole.mkdir()
    outcome = run_writer(whole, "groups")
    assert outcome.returncode == 0, outcome.output
    assert {int(one) for one in outcome.output.split()} == set(NUMBERS)
    check_after_kill(whole, set(NUMBERS))
    calls = [call for call in outcome.calls if call.name != "newfstatat"]
    assert len(calls) > 50
    with ThreadPoolExecutor(8) as pool:
        folders = [tmp_path / str(at) for at in range(len(calls))]
        begun = list(pool.map(kill_at, folders, calls))
    assert sum(begun) >= 0.95 * len(calls)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("turn", range(20))
def test_killed_at_every_system_call_again(tmp_path: Path, turn: int):
    test_killed_at_every_system_call(tmp_path)
