"""Processes that test, forked from one that has imported what they import: once, not in each.

With `pytest -n`, xdist starts this module in place of Python. It has a process forked that reads
what xdist says, and ends as that one does.
"""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import sys
from contextlib import suppress

from tests.forking import Nursery, fork, orders, shared, status_of

_MODULE = "tests.forked_tester"
_BOOTSTRAP = "-c"
_MODULES = (
    *("mlx_lm.utils", "mlx_vlm.utils", "anthropic", "openai", "litestar", "litestar.openapi"),
    *("sqlalchemy.orm", "sqlalchemy.dialects.sqlite", "alembic.command", "textual.app"),
    *("httpx", "jsonschema", "apscheduler.schedulers.asyncio", "structlog", "prometheus_client"),
)
"""Nothing of ours: whatever is wrong with that at its import is to fail the tests."""


def nursery() -> Nursery:
    return Nursery(_MODULE, os.environ)


def python() -> str:
    """What xdist is to start, as a line of words."""
    return shlex.join([sys.executable, "-m", _MODULE])


def _wait_for_one(bootstrap: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    address = shared(_MODULE)
    assert address is not None
    _, connection = fork(address, [bootstrap], os.environ, (0, 1, 2))
    for fd in (0, 1):
        os.close(fd)  # else nobody would notice that the other one has closed them
    return status_of(connection)


def _main() -> None:
    if _BOOTSTRAP in sys.argv:
        os._exit(_wait_for_one(sys.argv[-1]) & 0xFF)
    for name in _MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    order = orders(int(sys.argv[1]))
    if order is not None:
        sys.argv = [_BOOTSTRAP]
        exec(order.arguments[0], {"__name__": "__main__"})


if __name__ == "__main__":
    _main()
