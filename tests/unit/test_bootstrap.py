"""The application in front of the house, where the server is told to hurry."""

import asyncio
from typing import Any, cast

import pytest

from api.bootstrap import BootstrapApp


class House:
    """Its requests never end, and it opens at once."""

    def __init__(self, asked: asyncio.Event) -> None:
        self._asked = asked
        self.supervisor = self
        self.killed = False

    def kill(self) -> None:
        self.killed = True

    async def app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.startup.complete"})
        self._asked.set()
        await asyncio.Event().wait()


class Home:
    def listens_no_more(self) -> None:
        """Nobody listens here."""


@pytest.mark.parametrize("is_hurried", [True, False])
async def test_a_request_that_a_hurried_server_leaves_is_no_failure(is_hurried: bool):
    asked = asyncio.Event()
    house = House(asked)
    found = cast("Any", type("Found", (), {"home": Home()}))
    one = BootstrapApp(lambda: found, lambda _: cast("Any", house))

    async def nothing(*_: object) -> Any:
        return {}

    lifespan = asyncio.create_task(one({"type": "lifespan"}, nothing, nothing))
    await one.house()
    asked.clear()
    request = asyncio.create_task(one({"type": "http", "path": "/v1/models"}, nothing, nothing))
    await asked.wait()
    if is_hurried:
        one.hurry()
        assert house.killed
    request.cancel()
    outcome = await asyncio.gather(request, return_exceptions=True)
    assert [type(each) for each in outcome] == [
        type(None) if is_hurried else asyncio.CancelledError
    ]
    lifespan.cancel()
    await lifespan
