"""Random requests to a server that reuses all it can are answered as by one that never does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.duel import Difference, Duel
from tests.random_asks import SEEING, plan_of
from tests.tiny_models import write_model

FAMILIES = (
    *("qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "lfm2", "qwen3_next", "qwen3_5"),
    *("falcon_h1", "jamba", "deepseek_v3", "deepseek_v32", "llama4"),
)
SEEING_FAMILIES = ("qwen3_vl", "qwen3_5", "gemma3")


def check_answers(model: Path, home: Path, seed: int, **changes: Any) -> None:
    """Raises AssertionError with all that was asked up to the first answer that differs."""
    duel = Duel(model, home, plan_of(seed, home, **changes))
    try:
        compared = duel.run()
    except Difference as error:
        raise AssertionError(f"{error.told()}\n{duel.plan}") from error
    assert compared.tiers["hot"] + compared.tiers["warm"] + compared.tiers["cold"]


def test_what_is_reused_changes_no_answer(tmp_path: Path):
    model = write_model(tmp_path / "models" / "m")
    check_answers(model, tmp_path, seed=7, num_rounds=14, troubles=("unload", "chain"))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", FAMILIES)
def test_in_no_family(tmp_path: Path, family: str, seed: int):
    model = write_model(tmp_path / "models" / family, family)
    check_answers(model, tmp_path, seed)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(10, 12))
@pytest.mark.parametrize(("bits", "tolerance"), [(8, 1e-3), (4, 1e-2)])
def test_nor_where_kv_is_quantised(tmp_path: Path, bits: int, tolerance: float, seed: int):
    """What is one bit apart before it is rounded may be a step of the rounding apart then."""
    model = write_model(tmp_path / "models" / "m", head_dim=64)
    settings = f"kv_bits = {bits}\n"
    check_answers(model, tmp_path, seed, settings=settings, tolerance=tolerance)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(40, 44))
@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_nor_where_long_conversations_are_quantised(tmp_path: Path, family: str, seed: int):
    model = write_model(tmp_path / "models" / "m", family, head_dim=64)
    settings = f"kv_bits = 8\nquantized_kv_start = {40 if seed % 2 else 90}\n"
    check_answers(model, tmp_path, seed, settings=settings, tolerance=1e-3)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(20, 22))
def test_nor_on_two_ranks(tmp_path: Path, seed: int):
    model = write_model(tmp_path / "models" / "m")
    check_answers(model, tmp_path, seed, settings="[models.m]\nranks = 2\n")


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(30, 32))
@pytest.mark.parametrize("family", SEEING_FAMILIES)
def test_nor_with_pictures(tmp_path: Path, vlms_dir: Path, family: str, seed: int):
    check_answers(vlms_dir / family, tmp_path, seed, doors=SEEING)
