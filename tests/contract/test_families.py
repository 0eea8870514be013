"""For every family: what a process kept, another goes on from, logits equal bit for bit."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

from tests.contract.restarted import CASES, POSITIONS, on_disk

TIMEOUT_S = 280
NEEDS_STATE = {
    "gemma3_text",
    "gemma3_text in 8 bits",
    "gpt_oss",
    "lfm2",
    "qwen3_next",
    "qwen3_5",
    "falcon_h1",
    "jamba",
    "llama4",
}


@dataclass(frozen=True)
class Lives:
    """What both processes said of one family."""

    uses: dict[str, dict[str, Any]]
    needs_state: bool
    before: dict[str, mx.array]
    after: dict[str, mx.array]

    def check_logits(self, position: int) -> None:
        prefix = f"{position}."
        names = {name for name in self.before if name.startswith(prefix)}
        assert len(names) > 4
        assert names == {name for name in self.after if name.startswith(prefix)}
        for name in names:
            assert bits(self.after[name]) == bits(self.before[name]), name


def bits(array: mx.array) -> tuple[Any, ...]:
    return array.dtype, array.shape, bytes(memoryview(cast("bytes", array)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lives")
    for life in ("before", "after"):
        command = [sys.executable, "-m", "tests.contract.restarted", life, str(folder), *CASES]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
    return folder


@pytest.fixture(params=CASES)
def lives(request: pytest.FixtureRequest, folder: Path) -> Lives:
    said: dict[str, Any] = {}
    for life in ("before", "after"):
        results = json.loads((folder / f"{life}.json").read_text())[request.param]
        assert "error" not in results, results["error"]
        said |= results
    loaded = [mx.load(str(folder / request.param / f"{life}.safetensors")) for life in LIVES]
    assert isinstance(loaded[0], dict)
    assert isinstance(loaded[1], dict)
    assert said["needs_state"] == (request.param in NEEDS_STATE)
    return Lives(said["uses"], said["needs_state"], loaded[0], loaded[1])


LIVES = ("before", "after")


@pytest.mark.parametrize("position", POSITIONS)
def test_a_conversation_goes_on_after_a_restart_as_if_there_had_been_none(
    lives: Lives, position: int
):
    use = lives.uses[str(position)]
    start = on_disk(position, needs_state=lives.needs_state)
    assert (use["start"], use["num_tokens"], use["at"]) == (start,) * 3
    assert use["tier"] == "warm"
    lives.check_logits(position)
