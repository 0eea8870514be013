"""Checkpoints that a conversation leaves behind: in memory only, few, and never needed on disk."""

from pathlib import Path

import pytest

from tests.kv_sessions import Session, load
from tests.tiny_models import write_model

PROMPT = list(range(20, 20 + 400))
INNER = tuple(range(32, 384, 32))
LAST = 390


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen3_next", vocab_size=512)


def asked(session: Session, *, num_tokens: int = len(PROMPT)) -> int:
    """How much of the prompt's beginning is known."""
    cursor = session.cursor([*PROMPT[:num_tokens], 7, 7])
    _, known = session.take_up(cursor)
    return known


def turn(session: Session) -> None:
    boundaries = (*INNER, LAST)
    session.turn(PROMPT, [5, 6], boundaries=boundaries, passing=frozenset(INNER))


def test_passing_checkpoints_serve_branches_and_are_few(path: Path):
    session = Session(load(path))
    turn(session)
    states = sorted(run.end for run in session.tiers.hot.tree if run.has_state)
    assert len([end for end in states if end in INNER]) == 8
    assert {LAST, len(PROMPT) - 1, len(PROMPT) + 2} <= set(states)
    assert asked(session, num_tokens=380) == INNER[-1]


def test_only_lasting_checkpoints_are_written(path: Path, tmp_path: Path):
    session = Session(load(path), tmp_path)
    turn(session)
    known = session.publish()
    assert {slot.end for slot in known if slot.has_state} == {
        LAST,
        len(PROMPT) - 1,
        len(PROMPT) + 2,
    }
    again = Session(load(path), tmp_path)
    again.tiers.learn(known)
    assert asked(again, num_tokens=395) == LAST
    assert asked(again, num_tokens=380) == 0
    assert again.tiers.counts.num_damaged == 0


def test_what_passes_for_one_is_kept_for_another(path: Path, tmp_path: Path):
    session = Session(load(path), tmp_path)
    turn(session)
    cursor = session.cursor(PROMPT[: INNER[-1] + 1])
    kv, start = session.take_up(cursor)
    session.compute(cursor, kv, start)
    known = session.publish()
    assert INNER[-1] in {slot.end for slot in known if slot.has_state}
