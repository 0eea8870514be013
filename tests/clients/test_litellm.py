"""LiteLLM against a running server, in an environment of its own: it needs an older `openai`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import MODEL
from tests.clients.python_clients import environment_with
from tests.running_server import RunningServer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

LITELLM = ("litellm==1.106.2", "mcp")
"""It imports `mcp` whenever tools are used, and does not ask for it."""


def run(
    *command: str | Path, timeout_s: float, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={"PATH": "/usr/bin:/bin", **variables} if variables else None,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with LiteLLM, which is skipped where it cannot be installed."""
    return environment_with(tmp_path_factory.mktemp("litellm") / "venv", *LITELLM) / "python"


@pytest.fixture(scope="module")
def found(python: Path, tiny_server: RunningServer, tmp_path_factory: Any) -> dict[str, Any]:
    script = Path(__file__).parent / "litellm_asks.py"
    home = str(tmp_path_factory.mktemp("litellm_home"))
    local = {"HOME": home, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ended = run(python, script, tiny_server.url, MODEL, timeout_s=120, **local)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("route", ["chat", "messages"])
def test_it_reads_text_streams_and_forced_calls(found: dict[str, Any], route: str) -> None:
    seen = found[route]
    assert seen["same"], seen
    (end,) = seen["ends"]
    assert end in ("stop", "length")
    assert seen["usage"] > 0
    assert seen["call"] == "get_weather"
    assert isinstance(seen["arguments"]["city"], str)
    assert isinstance(seen["arguments"]["days"], int)


def test_it_passes_responses_on(found: dict[str, Any]) -> None:
    assert found["responses"]["status"] in ("completed", "incomplete")
    assert "message" in found["responses"]["kinds"]
