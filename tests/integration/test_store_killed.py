"""A process that writes rows for ever is killed: nothing that it acknowledged is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from store.index import SlotIndex
from tests.slot_samples import slot_id
from tests.store_samples import opened

WRITER = """
import sys
from pathlib import Path
from store.index import SlotIndex
from tests.store_samples import chain, opened

first = int(sys.argv[2])
with opened(Path(sys.argv[1])) as database:
    index = SlotIndex(database)
    print("ready", flush=True)
    for number in range(first, first + 1_000_000, 4):
        futures = [index.insert(chain(one, one + 1)) for one in (number, number + 2)]
        for future in futures:
            future.result()
        if number % 12 == 0:
            index.drop(["0" * 32]).result()
        print(number + 4, flush=True)
"""


def write_and_kill(root: Path, first: int, num_groups: int) -> int:
    """Kill after so many groups are acknowledged; the number after the last one that was."""
    command = [sys.executable, "-c", WRITER, str(root), str(first)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout is not None
        lines = (line.strip() for line in process.stdout)
        assert next(lines) == "ready"
        end = max(int(next(lines)) for _ in range(num_groups))
        process.kill()
        return max([end, *(int(line) for line in lines)])


def kill_again_and_again(root: Path, rounds: int, seed: int) -> None:
    """What was written and not acknowledged may be there, so each round has numbers of its own."""
    random = Random(seed)
    acknowledged: set[str] = set()
    for first in range(0, rounds * 1_000_000, 1_000_000):
        end = write_and_kill(root, first, random.randrange(1, 60))
        acknowledged |= {slot_id(number) for number in range(first, end)}
        with opened(root) as database:
            assert not list(root.glob("*.aside-*"))
            assert database.check()
            with database.reading() as connection:
                assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
            assert acknowledged <= {place.id for place in SlotIndex(database).places()}


def test_nothing_acknowledged_is_lost_when_the_writer_is_killed(tmp_path: Path):
    kill_again_and_again(tmp_path, rounds=2, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_nothing_acknowledged_is_lost_however_often_the_writer_is_killed(tmp_path: Path):
    kill_again_and_again(tmp_path, rounds=100, seed=2)
