"""What is pinned of a prompt that others go on from is stored once, but for its last tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.slot_events import PinWanted
from runtime.worker.model import LoadedModel
from tests.kv_sessions import BLOCK_TOKENS, FIRST, SAID, Session, check_right, ids, load
from tests.tiny_models import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_model(tmp_path_factory.mktemp("models") / "tiny"))


def pin(session: Session, token_ids: list[int]) -> None:
    """As a prewarmed prompt is pinned: all but its last token."""
    cursor = session.cursor(token_ids)
    kv, start = session.take_up(cursor)
    session.compute(cursor, kv, start)
    session.tiers.pin(cursor, kv, "asked")


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 63, 64, 70, 98, 99])
def test_a_pinned_prompt_within_a_longer_run_has_its_last_tokens_of_its_own(
    model: LoadedModel, tmp_path: Path, num_tokens: int
):
    alone = Session(model, tmp_path / "alone")
    alone.turn(FIRST, SAID)
    before = alone.finish()
    session = Session(model, tmp_path / "store")
    session.turn(FIRST, SAID)
    pin(session, FIRST[: num_tokens + 1])
    after = session.publish()
    new = sum(one.end - one.start for one in after) - sum(
        job.header.num_tokens for job, _ in before
    )
    assert new <= min(BLOCK_TOKENS, num_tokens)
    own_bytes = sum(staged.num_bytes for _, staged in session.written)
    own_bytes -= sum(staged.num_bytes for _, staged in before)
    bytes_per_token = max(staged.num_bytes / job.header.num_tokens for job, staged in before)
    assert own_bytes <= new * bytes_per_token + 4096
    [wanted] = [one for one in session.reports if isinstance(one, PinWanted)]
    [slot] = [one for one in after if one.end_hash == wanted.end_hash]
    assert slot.end == num_tokens
    later = Session(model, tmp_path / "store")
    later.tiers.learn(after)
    for token_ids in (FIRST[: num_tokens + 1], [*FIRST[:num_tokens], *ids(9, 40)]):
        cursor = check_right(later, token_ids)
        assert cursor.use.num_tokens >= num_tokens
    assert check_right(later, [*FIRST, *SAID, *ids(3, 30)]).use.num_tokens == 120
    later.finish()


def test_what_is_pinned_of_a_private_conversation_needs_nothing_of_it(
    model: LoadedModel, tmp_path: Path
):
    session = Session(model, tmp_path / "store")
    session.turn(FIRST, SAID, ttl_s=0)
    pin(session, FIRST[:71])
    after = session.publish()
    assert sum(one.end - one.start for one in after) == 70
    later = Session(model, tmp_path / "store")
    later.tiers.learn(after)
    assert check_right(later, FIRST[:71]).use.num_tokens == 70
    later.finish()
