"""Waiting for what no event announces: poll a condition, give up at a deadline."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""Far longer than anything takes, the load of a model beside other tests included: a test that
would pass does not end for it.
"""

_PERIOD_S = 0.005
_ASKING_PERIOD_S = 0.02


def pause() -> None:
    """Let a server get on before it is asked again, where no loop runs."""
    time.sleep(_ASKING_PERIOD_S)


async def until(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> float:
    """Wait until `condition()` is true; the seconds it took.

    Raises:
        AssertionError: it was not within `timeout_s`; the message says `what` was waited for.
    """
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(_PERIOD_S)
    return time.monotonic() - start
