"""Row 3: after a power loss no byte is wrong and nothing acknowledged is gone.

Two negative controls: the same harness finds losses without syncs, and wrong bytes without
checksums.
"""

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from store.slots import Slots
from tests.crash.damage import unchecked_payload
from tests.crash.power_loss import Operation, Sync, crashes, operations_of
from tests.crash.slot_writer import (
    BLOCK,
    GROUPS,
    NUM_TOKENS,
    REMOVED,
    found,
    head_path,
    keys_of,
    tensors,
)
from tests.crash.tracing import needs_strace, run_writer
from tests.slot_samples import token_ids

pytestmark = needs_strace

NUMBERS = [number for group in GROUPS for number in group]

Reader = Callable[[Path, int], bool | None]


class Tally(NamedTuple):
    """Of how many states, how many served wrong bytes and how many lost what was acknowledged."""

    states: int
    wrong: int
    lost: int


def unchecked(root: Path, number: int) -> bool | None:
    """As `found`, by a reader without checksums."""
    ids = token_ids(number, NUM_TOKENS)
    payloads = [(head_path(root, number), ids, len(ids) // BLOCK * BLOCK)]
    for at, key in enumerate(keys_of(number)):
        its = ids[at * BLOCK : (at + 1) * BLOCK]
        payloads.append((Slots(root / "slots").path(key), its, 0))
    is_there = True
    for path, its, start in payloads:
        payload = unchecked_payload(path) if path.exists() else None
        expected = array("I", its).tobytes() + b"".join(one.data for one in tensors(its[start:]))
        if payload not in (None, expected):
            return False
        is_there = is_there and payload is not None
    return is_there or None


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
        there = {number: read(root / "store", number) for number in NUMBERS}
        wrong += False in there.values()
        acknowledged = {int(one) for one in crash.acknowledged.split()}
        is_lost = any(not there[one] for one in acknowledged - {REMOVED, -REMOVED})
        is_back = -REMOVED in acknowledged and head_path(root / "store", REMOVED).exists()
        lost += is_lost or is_back
    return Tally(states, wrong, lost)


def without_syncs(recorded: tuple[str, list[Operation]]) -> tuple[str, list[Operation]]:
    """The same writer, had it synced nothing but the directories it made first."""
    where, operations = recorded
    kept = {where, f"{where}/store"}
    return where, [one for one in operations if not isinstance(one, Sync) or one.target in kept]


def test_nothing_is_wrong_and_nothing_acknowledged_is_lost(
    recorded: tuple[str, list[Operation]], tmp_path: Path
):
    result = tally(recorded, tmp_path, found, num_random=4)
    assert result.states > 500
    assert (result.wrong, result.lost) == (0, 0)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_nothing_is_wrong_in_many_more_states(
    recorded: tuple[str, list[Operation]], tmp_path: Path
):
    result = tally(recorded, tmp_path, found, num_random=400)
    assert (result.wrong, result.lost) == (0, 0)


def test_without_syncs_acknowledged_slots_are_lost_but_none_is_wrong(
    recorded: tuple[str, list[Operation]], tmp_path: Path
):
    result = tally(without_syncs(recorded), tmp_path, found, num_random=3)
    assert result.wrong == 0
    assert result.lost > result.states // 5


def test_without_syncs_and_checksums_wrong_bytes_are_served(
    recorded: tuple[str, list[Operation]], tmp_path: Path
):
    result = tally(without_syncs(recorded), tmp_path, unchecked, num_random=3)
    assert result.wrong > result.states // 10
