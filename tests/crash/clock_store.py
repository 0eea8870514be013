"""Look after a store in a process whose clock may be wrong, and say what is left."""

from __future__ import annotations

import sys
from pathlib import Path

from runtime.cache.upkeep import keep
from tests.crash.server_store import store_at


def main() -> None:
    """`python -m tests.crash.clock_store ROOT NUM_SWEEPS`: prints the ids that are left."""
    store = store_at(Path(sys.argv[1]))
    for _ in range(int(sys.argv[2])):
        keep(store)
    print(" ".join(store.heads.known))  # noqa: T201
    store.close()


if __name__ == "__main__":
    main()
