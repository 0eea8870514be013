"""A process that writes slots as a worker and a server do together; made to be killed.

    python -m tests.crash.slot_writer ROOT INDEX groups|one

INDEX stands for the database: a line is a row, its fsync the group commit, and standard output
the acknowledgement.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from store import slots
from store.errors import StoreError
from tests.slot_samples import slot_id, stage_sample

GROUPS = ((1, 2), (3,))
BEGIN = "the work begins here"


class Index:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def commit(self, rows: str) -> None:
        os.write(self._fd, rows.encode())
        os.fsync(self._fd)


def acknowledge(text: str) -> None:
    os.write(1, text.encode())


def write_groups(root: Path, index: Index) -> None:
    for group in GROUPS:
        slots.publish_all([stage_sample(root, number) for number in group])
        index.commit("".join(f"+{number}\n" for number in group))
        acknowledge("".join(f"{number}\n" for number in group))
    index.commit("-2\n")
    slots.remove(slots.slot_path(root, slot_id(2)))


def write_one(root: Path) -> None:
    try:
        slots.publish(stage_sample(root, 1))
    except StoreError as error:
        acknowledge(f"{type(error).__name__}\n")
    else:
        acknowledge("published\n")


def main() -> None:
    root, index_path, program = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    index = Index(index_path)
    (index_path.parent / BEGIN).exists()
    if program == "groups":
        write_groups(root, index)
    else:
        write_one(root)


if __name__ == "__main__":
    main()
