"""Continue's own reader of its configuration, and what it asks with, on what our page says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL
from tests.clients.node_clients import installed
from tests.documents import blocks
from tests.running_server import RunningServer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

PACKAGES = ("@continuedev/config-yaml@1.42.0", "@continuedev/openai-adapters@1.37.0")


def test_the_configuration_on_the_page_is_taken_whole_and_answered(
    tiny_server: RunningServer, tmp_path: Path
) -> None:
    (page,) = (one.text for one in blocks("yaml") if one.page.name == "continue.md")
    for said, here in (("http://127.0.0.1:8420", tiny_server.url), ("model: qwen", "model: small")):
        assert said in page
        page = page.replace(said, here)
    (tmp_path / "config.yaml").write_text(page)
    project = installed("continue", *PACKAGES)
    script = project.folder / "continue.mjs"
    shutil.copy(Path(__file__).parent / "continue.mjs", script)
    ended = project.run(script, tmp_path / "config.yaml", home=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["complaints"] == []
    assert found["text"]
    # What its schema does not know it leaves out without a word.
    assert found["model"].keys() == {
        *("name", "provider", "model", "apiBase", "apiKey", "roles", "capabilities")
    }
    assert f"model={MODEL}" in tiny_server.stderr
