"""LiteLLM against a running server, in an environment of its own: it needs an older `openai`.

Its proxy runs with the configuration of docs/clients/litellm.md, behind Claude Code.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.conftest import MODEL
from tests.clients.programs import (
    asked_since,
    check_cached,
    claude_program,
    claude_turn,
    requests_of,
)
from tests.clients.python_clients import environment_with
from tests.documents import blocks
from tests.integration.test_http_claude_code import HEADERS, claude_code
from tests.running_server import RunningServer, free_port
from tests.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

LITELLM = ("litellm[proxy]==1.106.2", "mcp")
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


MASTER_KEY = "sk-unused"
PROXY_S = 120.0


def page_config(server: RunningServer) -> str:
    """The configuration that the page gives, with this server and its model in it."""
    (config,) = (one.text for one in blocks("yaml") if one.page.name == "litellm.md")
    for given, ours in (
        ("http://127.0.0.1:8420", server.url),
        ("/qwen\n", f"/{MODEL}\n"),
        ("sk-choose-your-own", MASTER_KEY),
    ):
        assert given in config
        config = config.replace(given, ours)
    return config


@pytest.fixture(scope="module")
def proxy(python: Path, tiny_server: RunningServer, tmp_path_factory: Any) -> Iterator[str]:
    """The address of its proxy, which listens."""
    home, port = tmp_path_factory.mktemp("litellm_proxy"), free_port()
    (home / "config.yaml").write_text(page_config(tiny_server))
    command = [python.parent / "litellm", "--config", home / "config.yaml"]
    local = {"HOME": str(home), "PATH": "/usr/bin:/bin", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with (home / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=home,
            env=local,
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"

    def listens() -> bool:
        assert process.poll() is None, (home / "log.txt").read_text()
        try:
            return httpx.get(f"{url}/health/liveliness").status_code == 200
        except httpx.TransportError:
            return False

    try:
        asyncio.run(until(listens, "the proxy listens", timeout_s=PROXY_S))
        yield url
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize(
    ("model", "path"), [("qwen", "/v1/responses"), ("qwen-messages", "/v1/messages")]
)
def test_behind_its_proxy_three_turns_with_another_billing_line_each_go_on(
    tiny_server: RunningServer, proxy: str, model: str, path: str
) -> None:
    num_before = len(requests_of(tiny_server))
    turns: list[Any] = []
    for number in range(3):
        body = claude_code(*turns, model=model, stream=False)
        body["system"][0]["text"] += f" cc_entrypoint=sdk-cli; cch={number + 65536:05x};"
        headers = HEADERS | {"authorization": f"Bearer {MASTER_KEY}"}
        url = f"{proxy}/v1/messages?beta=true"
        answer = httpx.post(url, json=body, headers=headers, timeout=PROXY_S)
        assert answer.status_code == 200, answer.text
        said = [one for one in answer.json()["content"] if one["type"] == "text"]
        turns += [
            {"role": "assistant", "content": said or "Done."},
            {"role": "user", "content": f"Go on with step {number}."},
        ]
    asked = asked_since(tiny_server, num_before, 3)
    assert [one.path for one in asked] == [path] * 3
    check_cached(asked)


def test_claude_code_itself_keeps_its_cache_behind_its_proxy(
    tiny_server: RunningServer, proxy: str, tmp_path: Path
) -> None:
    claude = claude_program()
    num_before = len(requests_of(tiny_server))
    words = (["-p", "Say hello."], *[["--continue", "-p", text] for text in ("Again.", "More.")])
    num_turns = sum(
        claude_turn(claude, tmp_path, proxy, *given, model="qwen-messages") for given in words
    )
    asked = asked_since(tiny_server, num_before, num_turns)
    assert num_turns >= 3
    check_cached([one for one in asked if one.path == "/v1/messages"])
