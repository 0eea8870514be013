"""A server whose model says what it is told to, for all who look at answers through a client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.calm_model import write_calm_model
from tests.running_server import RunningServer, running
from tests.templates import TEMPLATES
from tests.tiny_models import CHAT_TEMPLATE


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder. `qwen3` beside it thinks unless it is told not to, and opens its thoughts
    itself; `unswitched` has no switch for them.
    """
    folder = tmp_path_factory.mktemp("calm_models")
    unswitched = CHAT_TEMPLATE.partition("{% if enable_thinking %}")[0] + "{% endif %}"
    for name, template in (("qwen3", TEMPLATES["qwen3"]), ("unswitched", unswitched)):
        write_calm_model(folder / name)
        (folder / name / "chat_template.jinja").write_text(template)
    return write_calm_model(folder / "calm")


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
