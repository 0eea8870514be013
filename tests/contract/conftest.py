"""A server whose model says what it is told to, for all who look at answers through a client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.calm_model import write_calm_model
from tests.running_server import RunningServer, running


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder."""
    return write_calm_model(tmp_path_factory.mktemp("calm_models") / "calm")


@pytest.fixture(scope="session")
def calm_server(tmp_path_factory: pytest.TempPathFactory, calm: Path) -> Iterator[RunningServer]:
    config = f'models_dir = "{calm.parent}"\ndefault_model = "calm"\n'
    with running(tmp_path_factory.mktemp("calm_home"), config=config) as server:
        yield server
        assert "Traceback" not in server.stderr


@pytest.fixture
def calm_client(calm_server: RunningServer) -> Iterator[OpenAI]:
    url = f"{calm_server.url}/v1"
    with OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        yield client
