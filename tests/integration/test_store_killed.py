"""A process that writes rows for ever is killed: nothing that it acknowledged is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from store.index import Index
from tests.slot_samples import slot_id
from tests.store_samples import opened

WRITER = """
import sys
from pathlib import Path
from store.index import Change, Index
from tests.store_samples import opened, rows

first = int(sys.argv[2])
with opened(Path(sys.argv[1])) as database:
    index = Index(database)
    print("ready", flush=True)
    for number in range(first, first + 1_000_000, 2):
        index.write(rows(number))
        index.write(rows(number + 1))
        if number % 12 == 0:
            index.write(Change(gone_heads=["0" * 32]))
        index.flush()
        print(number + 2, flush=True)
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
            assert acknowledged <= {one.head.id for one in Index(database).load()[0]}


def test_nothing_acknowledged_is_lost_when_the_writer_is_killed(tmp_path: Path):
    kill_again_and_again(tmp_path, rounds=2, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_nothing_acknowledged_is_lost_however_often_the_writer_is_killed(tmp_path: Path):
    kill_again_and_again(tmp_path, rounds=100, seed=2)
