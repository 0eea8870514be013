"""opencode as its users install it, over each of the three protocols that it speaks."""

from __future__ import annotations

import json
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL
from tests.clients.node_clients import Project, installed
from tests.clients.test_agent_programs import (
    CONTEXT,
    RECOMPUTED,
    asked_since,
    lines_of,
    requests_of,
)
from tests.running_server import RunningServer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

PROTOCOLS = {
    "chat": ("@ai-sdk/openai-compatible", "/v1/chat/completions"),
    "messages": ("@ai-sdk/anthropic", "/v1/messages"),
    "responses": ("@ai-sdk/openai", "/v1/responses"),
}


def home_for(folder: Path, url: str, protocol: str) -> Path:
    """A home in which opencode knows the server, also for its side requests."""
    package, _ = PROTOCOLS[protocol]
    model = {"limit": {"context": CONTEXT, "output": 200}}
    options = {"baseURL": f"{url}/v1", "apiKey": "unused"}
    config = {
        "provider": {"hearth": {"npm": package, "options": options, "models": {MODEL: model}}},
        "model": f"hearth/{MODEL}",
        "small_model": f"hearth/{MODEL}",
        "permission": {"*": "allow"},
        "autoupdate": False,
        "share": "disabled",
    }
    (folder / ".config" / "opencode").mkdir(parents=True)
    (folder / ".config" / "opencode" / "opencode.json").write_text(json.dumps(config))
    return folder


def ask(opencode: Project, home: Path, *arguments: str) -> int:
    """One question to opencode; how many steps it took."""
    found = sorted(opencode.folder.glob("node_modules/opencode-*/bin/opencode"))
    if not found:
        pytest.skip("opencode has no program for this system")
    quiet = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    ended = subprocess.run(
        [found[0], "run", "--format", "json", "-m", f"hearth/{MODEL}", *arguments],
        cwd=home,
        env=opencode.environment(home) | quiet,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    events = [one["type"] for one in lines_of(ended.stdout)]
    assert "error" not in events, ended.stdout
    return events.count("step_finish")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_opencode_asks_once_for_each_step_and_keeps_its_cache(
    tiny_server: RunningServer, tmp_path: Path, protocol: str
) -> None:
    opencode = installed("opencode", "opencode-ai@1.18.33")
    home = home_for(tmp_path, tiny_server.url, protocol)
    num_before = len(requests_of(tiny_server))
    num_steps = ask(opencode, home, "Say hello.")
    num_steps += ask(opencode, home, "-c", "And once more, please.")
    asked = asked_since(tiny_server, num_before, num_steps + 1)
    assert {(one.path, one.status) for one in asked} == {(PROTOCOLS[protocol][1], 200)}
    # Whatever it misses in an answer it asks for for ever; a session also asks for its title.
    assert len(asked) == num_steps + 1
    main = [one for one in asked if one.prompt > CONTEXT // 8]
    assert len(main) == num_steps
    for before, after in pairwise(main):
        assert after.cached >= before.prompt - RECOMPUTED, (before, after)
