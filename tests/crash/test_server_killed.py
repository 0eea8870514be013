"""Row 1: a server killed at any moment loses nothing it acknowledged and never answers wrongly.

What is deleted stays deleted, and what is damaged costs nobody else. `HEARTH_TEST_SEED=N` has only
that seed tried, `HEARTH_TEST_KILLS=N` so many kills of each.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from tests.crash.kill_loop import looped

FORCED = os.environ.get("HEARTH_TEST_SEED")
KILLS = os.environ.get("HEARTH_TEST_KILLS")


def seeds(*usual: int) -> list[int]:
    return [int(FORCED)] if FORCED else list(usual)


def kill_again_and_again(folder: Path, seed: int, num_kills: int, settings: str = "") -> None:
    with looped(folder, seed, settings=settings) as loop:
        sys.stdout.write(f"HEARTH_TEST_SEED={seed}\n")
        loop.run(int(KILLS or num_kills))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", seeds(1))
def test_killed_at_random_moments(tmp_path: Path, seed: int):
    kill_again_and_again(tmp_path, seed, 10)


def test_what_is_acknowledged_and_not_there_is_noticed(tmp_path: Path):
    """The negative control."""
    with looped(tmp_path, seed=1) as loop:
        loop.run(1)
        shutil.rmtree(loop.root / "slots")
        for talk in loop.talks.values():
            talk.is_awake = False
        with loop.served() as server, pytest.raises(AssertionError, match="cached_tokens"):
            loop.answer_all(server)


def test_what_was_deleted_and_is_there_is_noticed(tmp_path: Path):
    """The negative control."""
    with looped(tmp_path, seed=1) as loop:
        loop.run(1)
        kept = shutil.copytree(loop.root / "slots", tmp_path / "kept")
        with loop.served() as server:
            for talk in list(loop.talks.values()):
                loop.delete(server, talk)
        loop.look_at_files()
        shutil.copytree(kept, loop.root / "slots", dirs_exist_ok=True)
        with pytest.raises(AssertionError, match="has what was deleted"):
            loop.look_at_files()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not mx.distributed.is_available("ring"), reason="no ring in this build of mlx")
def test_a_model_on_two_ranks_killed_at_random_moments(tmp_path: Path):
    kill_again_and_again(tmp_path, 7, 20, "[models.tiny]\nranks = 2\n")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", seeds(*range(1, 12)))
def test_killed_at_random_moments_for_long(tmp_path: Path, seed: int):
    kill_again_and_again(tmp_path, seed, 60)
