"""What `ops/` ships for others' tools fits the server as it is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import msgspec.yaml
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from api.cli.service import unit_of
from runtime.config.settings import Settings
from runtime.supervisor.lifecycle import STATES
from tests.running_server import CHAT, ROOT, running

DASHBOARD = ROOT / "ops" / "grafana" / "hearth.json"
EXAMPLES = {
    "linux": ROOT / "ops" / "systemd" / "hearth.service",
    "darwin": ROOT / "ops" / "launchd" / "dev.hearth.server.plist",
}
ALERTS = ROOT / "ops" / "prometheus" / "alerts.yml"
ALERT_CASES = ROOT / "tests" / "integration" / "alert_cases.yml"
_USED_LABEL = re.compile(r"\$labels\.(\w+)|{(\w+)=")
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


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of every figure that a server has; of those without a sample yet, none."""
    home = tmp_path_factory.mktemp("home")
    with running(home, HOME=os.fspath(home)) as server:
        said = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        for _ in range(2):
            server.post(CHAT, said | {"model": "hearth-tiny"})
        families = list(text_string_to_metric_families(server.get("/metrics").text))
    sampled = {sample.name: set(sample.labels) for one in families for sample in one.samples}
    names = [name for one in families for name in (one.name, f"{one.name}_total")]
    return {name: set[str]() for name in names} | sampled


def test_the_dashboard_asks_for_what_the_server_shows(shown: dict[str, set[str]]):
    asked = list(targets())
    assert len(asked) > 30
    for target in asked:
        wanted = _NAME.findall(target["expr"])
        assert wanted, target
        assert not [name for name in wanted if name not in shown], target
        labels = {one for pair in _LABEL.findall(target["legendFormat"]) for one in pair if one}
        for name in wanted:
            if shown[name]:
                assert labels <= shown[name], target


def test_the_alerts_watch_what_the_server_shows(shown: dict[str, set[str]]):
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    watched = group["rules"]
    documented = (ROOT / "docs" / "operations.md").read_text()
    for rule in watched:
        assert f"`{rule['alert']}`" in documented
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        wanted = _NAME.findall(rule["expr"])
        assert wanted or rule["alert"] == "HearthDown"
        assert not [name for name in wanted if name not in shown], rule
        said = " ".join([rule["expr"], *rule["annotations"].values()])
        labels = {one for pair in _USED_LABEL.findall(said) for one in pair if one} - {
            "instance",
            "job",
        }
        for name in wanted:
            if shown[name]:
                assert labels <= shown[name], rule
    states = set(re.findall(r'state="(\w+)"', ALERTS.read_text()))
    assert states <= set(STATES)
    assert len(watched) == 10


class _Told(msgspec.Struct, forbid_unknown_fields=True):
    summary: Annotated[str, msgspec.Meta(min_length=10, max_length=120)]
    description: Annotated[str, msgspec.Meta(min_length=10)]


class _Severity(msgspec.Struct, forbid_unknown_fields=True):
    severity: Literal["critical", "warning"]


class _Rule(msgspec.Struct, forbid_unknown_fields=True, rename={"lasts": "for"}):
    alert: Annotated[str, msgspec.Meta(pattern="^Hearth[A-Za-z]+$")]
    expr: Annotated[str, msgspec.Meta(min_length=1)]
    labels: _Severity
    annotations: _Told
    lasts: Annotated[str, msgspec.Meta(pattern="^[1-9][0-9]*(ms|[smhdwy])$")] = "1s"


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    rules: list[_Rule]


class _Alerts(msgspec.Struct, forbid_unknown_fields=True):
    groups: list[_Group]


def test_the_alerts_have_the_form_that_prometheus_reads():
    [group] = msgspec.yaml.decode(ALERTS.read_bytes(), type=_Alerts).groups
    assert len({rule.alert for rule in group.rules}) == len(group.rules) == 10
    for rule in group.rules:
        for text in (rule.annotations.summary, rule.annotations.description):
            inside = re.findall(r"{{(.*?)}}", text)
            assert text.count("{{") == text.count("}}") == len(inside)
            assert all(re.fullmatch(r" \$(labels\.\w+|value)( \| \w+)? ", one) for one in inside)


def test_prometheus_takes_the_alerts_and_they_fire_when_they_should():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool, which comes with Prometheus, is not installed")
    for command in (("check", "rules", str(ALERTS)), ("test", "rules", str(ALERT_CASES))):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_alerts_are_silent_over_a_server_that_is_well(tmp_path: Path):
    with running(tmp_path, HOME=os.fspath(tmp_path)) as server:
        server.wait_for_the_store()
        assert server.figure("hearth_kv_store_up") == 1
        text = server.get("/metrics").text
        assert 'hearth_model_transitions_total{model="hearth-tiny",state="wedged"} 0.0' in text
        assert 'hearth_worker_crashes_total{model="hearth-tiny"} 0.0' in text
        assert server.figure("hearth_history_degraded") == 0
        assert server.figure("hearth_kv_disk_free_bytes") > 0
        assert server.figure("hearth_kv_disk_floor_bytes") > 0
        assert server.figure("hearth_longest_wait_seconds") == 0
    with running(tmp_path, "--kv-disk", "false", HOME=os.fspath(tmp_path)) as server:
        lines = server.get("/metrics").text.splitlines()
        assert not [one for one in lines if one.startswith("hearth_kv_store_up")], "nobody wants it"
