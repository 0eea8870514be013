"""`hearth pull` from a hub on this machine: what it fetches, and that it says how far it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.hub import hub_of
from tests.running_server import ROOT, environment

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(1_000_000),
    "consolidated.safetensors": bytes(1_000_000),
    "original/model.safetensors": bytes(1_000_000),
    "modeling.py": b"raise SystemExit",
}


def pull(repo: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's client reads its settings when it is imported."""
    return subprocess.run(
        [sys.executable, "-m", "api", "pull", repo, "--json"],
        env=environment(variables),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_model_is_pulled_with_signs_of_progress_and_without_its_code(tmp_path: Path):
    with hub_of(FILES) as hub:
        variables = hub.variables(tmp_path)
        done = pull("org/tiny", variables)
        missing = pull("org/other", variables)
        gated = pull("org/gated", variables)
        address = pull("https://huggingface.co/org/tiny/tree/main", variables)
    assert done.returncode == 0, done.stderr
    path = Path(json.loads(done.stdout)["path"])
    assert {one.name for one in path.iterdir()} == {"config.json", "model.safetensors"}
    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert "pull org/tiny: download" in done.stderr
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "no such repository, or it is private" in missing.stderr
    assert "accept its terms at https://huggingface.co/org/gated" in gated.stderr
    assert "is no repository name: org/tiny is." in address.stderr


def test_who_has_no_network_reads_what_to_do(tmp_path: Path):
    away = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    for variables in (away, away | {"HF_HUB_OFFLINE": "1"}):
        done = pull("org/tiny", variables)
        assert (done.returncode, done.stdout) == (1, "")
        assert "the hub cannot be reached" in done.stderr
        assert "[models.NAME] path" in done.stderr
