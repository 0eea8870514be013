"""Row 3: after a power loss no byte is wrong and nothing acknowledged is gone.

Two negative controls: the same harness finds losses without syncs, and wrong bytes without
checksums.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from store import upkeep
from tests.crash.damage import unchecked_payload
from tests.crash.power_loss import Link, Operation, Sync, crashes, operations_of
from tests.crash.slot_writer import GROUPS
from tests.crash.tracing import needs_strace, run_writer
from tests.slot_samples import expected_payload, holds, is_served, slot_id

pytestmark = needs_strace

NUMBERS = {slot_id(number): number for group in GROUPS for number in group}
REMOVED = "2"

Reader = Callable[[Path, int], bool | None]


class Tally(NamedTuple):
    """Of how many states, how many served wrong bytes and how many lost what was acknowledged."""

    states: int
    wrong: int
    lost: int


def checked(path: Path, number: int) -> bool | None:
    """Whether the served bytes are right; None for a miss."""
    return holds(path, number) if is_served(path) else None


def unchecked(path: Path, number: int) -> bool | None:
    payload = unchecked_payload(path)
    return None if payload is None else payload == expected_payload(number)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Operation]]:
    folder = tmp_path_factory.mktemp("recorded").resolve()
    outcome = run_writer(folder, "groups", "-y", "-xx", "-s", "100000")
    assert outcome.returncode == 0
    return str(folder), operations_of(outcome.calls)


def tally(
    recorded: tuple[str, list[Operation]], folder: Path, read: Reader, num_random: int
) -> Tally:
    where, operations = recorded
    states = wrong = lost = 0
    for states, crash in enumerate(crashes(operations, num_random, seed=11), 1):
        root = folder / str(states)
        crash.disk.write_to(root, f"{where}/")
        found = {
            str(NUMBERS[path.stem]): read(path, NUMBERS[path.stem])
            for path in upkeep.slot_files(root / "store")
        }
        wrong += False in found.values()
        index = root / "index"
        rows = set(index.read_text("latin-1").split()) if index.exists() else set[str]()
        promised = {row[1:] for row in rows if row[:1] == "+" and row[1:].isdecimal()}
        promised = (promised & set("123")) | set(crash.acknowledged.split())
        is_removed = f"-{REMOVED}" in rows
        lost += any(not found.get(one) for one in promised - ({REMOVED} if is_removed else set()))
    return Tally(states, wrong, lost)


def without_syncs(recorded: tuple[str, list[Operation]]) -> tuple[str, list[Operation]]:
    """The same writer, had it synced nothing but its index and the directories it made."""
    where, operations = recorded
    name = f"{where}/index"
    index = next(one.inode for one in operations if isinstance(one, Link) and one.name == name)
    kept = {index, where, f"{where}/store", f"{where}/store/slots"}
    return where, [one for one in operations if not isinstance(one, Sync) or one.target in kept]


def test_nothing_is_wrong_and_nothing_acknowledged_is_lost(
    recorded: tuple[str, list[Operation]], tmp_path: Path
):
    result = tally(recorded, tmp_path, checked, num_random=10)
    assert result.states > 500
    assert (result.wrong, result.lost) == (0, 0)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_nothing_is_wrong_in_many_more_states(
    recorded: tuple[str, list[Operation]], tmp_path: Path
):
    result = tally(recorded, tmp_path, checked, num_random=1000)
    assert (result.wrong, result.lost) == (0, 0)


def test_without_syncs_acknowledged_slots_are_lost_but_none_is_wrong(
    recorded: tuple[str, list[Operation]], tmp_path: Path
):
    result = tally(without_syncs(recorded), tmp_path, checked, num_random=5)
    assert result.wrong == 0
    assert result.lost > result.states // 4


def test_without_syncs_and_checksums_wrong_bytes_are_served(
    recorded: tuple[str, list[Operation]], tmp_path: Path
):
    result = tally(without_syncs(recorded), tmp_path, unchecked, num_random=5)
    assert result.wrong > result.states // 10
