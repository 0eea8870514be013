"""A history that is open for as long as a test needs it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from runtime.cache.history import History


@asynccontextmanager
async def living(home: Path) -> AsyncGenerator[History]:
    """The history in `home`, from its start until it is closed."""
    history = History(home)
    history.start()
    try:
        yield history
    finally:
        await history.close()
