"""What is waited for while a client is there ends when it leaves, and nobody is told how."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from api.http.errors import ClientLeft
from api.http.sse import unless_left
from runtime.errors import AgentChanged


async def _left() -> Any:
    return {"type": "http.disconnect"}


async def _changed_meanwhile() -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise AgentChanged("reset") from None


def test_what_fails_as_its_client_leaves_is_no_error_of_the_server():
    complaints: list[Any] = []

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        with pytest.raises(ClientLeft):
            await unless_left(_left, _changed_meanwhile())
        await asyncio.sleep(0)
        gc.collect()

    asyncio.run(leave())
    assert complaints == []
