"""What `ops/` ships for others' tools fits the server as it is."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.cli.service import unit_of
from runtime.settings import Settings
from tests.running_server import CHAT, ROOT, running

DASHBOARD = ROOT / "ops" / "grafana" / "hearth.json"
EXAMPLES = {
    "linux": ROOT / "ops" / "systemd" / "hearth.service",
    "darwin": ROOT / "ops" / "launchd" / "dev.hearth.server.plist",
}
_NAME = re.compile(r"\bhearth_\w+")
_LABEL = re.compile(r"{{(\w+)}}|by \((\w+)\)")


def example(platform: str) -> str:
    """What `hearth service show` prints for somebody who installed it in /opt/hearth."""
    settings = Settings(home=Path("/home/you/.hearth"))
    command = ("/opt/hearth/bin/hearth", "serve", "--home", "/home/you/.hearth")
    return unit_of(settings, platform, Path("/home/you"), command).text.replace(
        str(ROOT), "/opt/hearth"
    )


@pytest.mark.parametrize("platform", EXAMPLES)
def test_the_examples_are_what_the_program_prints(platform: str):
    assert EXAMPLES[platform].read_text() == example(platform)


def targets() -> Iterator[dict[str, Any]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield from panel.get("targets", ())


def test_the_dashboard_asks_for_what_the_server_shows(tmp_path: Path):
    with running(tmp_path, HOME=os.fspath(tmp_path)) as server:
        said = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        for _ in range(2):
            server.post(CHAT, said | {"model": "hearth-tiny"})
        families = list(text_string_to_metric_families(server.get("/metrics").text))
    shown = {sample.name: set(sample.labels) for one in families for sample in one.samples}
    # What has not happened yet has a name and no sample.
    names = {one.name for one in families} | {f"{one.name}_total" for one in families}
    asked = list(targets())
    assert len(asked) > 30
    for target in asked:
        wanted = _NAME.findall(target["expr"])
        assert wanted, target
        assert not [name for name in wanted if name not in names | shown.keys()], target
        labels = {one for pair in _LABEL.findall(target["legendFormat"]) for one in pair if one}
        for name in wanted:
            if shown.get(name):
                assert labels <= shown[name], target
