"""The README, followed to its end on a fresh clone: whether a stranger gets where it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ops.bench.readme import FIRST_ANSWER, PORT, Report, commands, is_free
from tests.running_server import ROOT


def test_a_stranger_clones_serves_and_asks_in_this_order():
    words = [command.partition(" ")[0] for command in commands()]
    assert words[:3] == ["git", "make", FIRST_ANSWER.strip()]
    assert not [command for command in commands() if command.endswith("\\")]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_readme_is_followed_word_for_word(tmp_path: Path):
    if not is_free():
        pytest.skip(f"something listens on port {PORT}, where the README's commands ask")
    at = tmp_path / "readme.json"
    done = subprocess.run(
        [sys.executable, "-m", "ops.bench.readme", "--warm", "1", "--json", str(at)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = msgspec.json.decode(at.read_bytes(), type=Report)
    assert [one.package_cache for one in report.rounds] == ["empty", "warm"]
    for one in report.rounds:
        assert one.first_answer_s is not None
        assert {step.outcome for step in one.steps} == {"done", "left out"}
        assert all(step.why for step in one.steps if step.outcome == "left out")
