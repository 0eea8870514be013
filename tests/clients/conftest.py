"""A server that nobody configured, with `hearth-tiny`, for every client of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest
from pytest_asyncio import is_async_test

from tests.running_server import RunningServer, running
from tests.waiting import until

MODEL = "hearth-tiny"
OTHER_NAME = "small"
"""An alias, for suites that ask for a second model."""


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    config = f'[aliases]\n{OTHER_NAME} = "{MODEL}"\n'
    with running(tmp_path_factory.mktemp("bare"), config=config) as server:
        yield server
        assert "Traceback" not in server.stderr
        asyncio.run(until(lambda: is_free(server), "nobody has a place any more"))


def is_free(server: RunningServer) -> bool:
    models = server.get("/running").json()["models"]
    return [(one["num_running"], one["num_waiting"]) for one in models] == [(0, 0)]


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """LangChain keeps its connections, so its coroutines need one loop for all tests of a file."""
    for item in items:
        if is_async_test(item) and item.path.parent.name == "clients":
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)
