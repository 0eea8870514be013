"""Look after a store in a process whose clock may be wrong, and say what is left."""

from __future__ import annotations

import sys
from pathlib import Path

from runtime.cache.maintenance import StoreLimits, expire
from runtime.cache.store_opening import open_store


def main() -> None:
    """`python -m tests.crash.clock_store ROOT NUM_SWEEPS`: prints the ids that are left."""
    store = open_store(Path(sys.argv[1]), None)
    for _ in range(int(sys.argv[2])):
        for _ in expire(store, StoreLimits(None, 0, 0.0)):
            pass
    print(" ".join(place.id for place in store.index.places()))  # noqa: T201
    store.close()


if __name__ == "__main__":
    main()
