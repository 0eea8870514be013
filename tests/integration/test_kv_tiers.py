"""The tiers over a real model and a real store: what is damaged, late, gone, private or doubled."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from runtime.kv_messages import HotBudget
from runtime.worker.model import LoadedModel
from store.slots import BlockKey, SlotAbout, Slots
from tests.kv_sessions import (
    BLOCK_TOKENS,
    FIRST,
    NEXT,
    SAID,
    TURN_2,
    Session,
    check_right,
    have_said,
    ids,
    last_logits,
    load,
    reused,
)
from tests.kv_worker import MODEL
from tests.tiny_models import write_model

HELD = len(FIRST) + len(SAID)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_model(tmp_path_factory.mktemp("dense"), num_hidden_layers=1))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_model(tmp_path_factory.mktemp("hybrid"), "lfm2"))


@pytest.fixture(params=["dense", "hybrid"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return request.getfixturevalue(request.param)


@pytest.fixture
def stored(model: LoadedModel, tmp_path: Path) -> tuple[LoadedModel, Path]:
    """A model, and a store with one conversation of it."""
    have_said(model, tmp_path)
    return model, tmp_path


def spoil(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def files(root: Path) -> set[Path]:
    return {*(root / "slots").rglob("*.safetensors")}


def test_a_stored_conversation_is_read_once(stored: tuple[LoadedModel, Path]):
    session = Session(*stored)
    assert reused(check_right(session, TURN_2)) == (HELD, "warm", "first_seen")
    assert session.tiers.counts.num_restored_bytes > 0
    assert reused(check_right(session, [*FIRST, *SAID, 9, 8, 7]))[:2] == (HELD, "hot")
    session.close()


def test_what_there_is_no_room_for_twice_is_moved_and_right(stored: tuple[LoadedModel, Path]):
    session = Session(*stored, hot_bytes=1)
    assert reused(check_right(session, TURN_2)) == (HELD, "warm", "first_seen")
    assert reused(check_right(session, [*FIRST, *SAID, 9, 8, 7]))[:2] == (HELD, "warm")
    session.close()


@pytest.mark.parametrize("at", [9, 300, -1])
@pytest.mark.parametrize("blocks", [(0,), (5,), (1, 2, 4)])
def test_damage_costs_the_blocks_that_it_is_in(
    dense: LoadedModel, tmp_path: Path, blocks: tuple[int, ...], at: int
):
    have_said(dense, tmp_path)
    session = Session(dense, tmp_path)
    paths = [session.slot_of(TURN_2, number) for number in blocks]
    for path in paths:
        spoil(path, at)
    cursor = check_right(session, TURN_2)
    assert reused(cursor) == (HELD - len(blocks) * BLOCK_TOKENS, "warm", "damaged")
    assert session.tiers.counts.num_damaged == len(blocks)
    session.close()
    assert all(path.exists() for path in paths), "they are written again"
    session = Session(dense, tmp_path)
    assert reused(check_right(session, TURN_2)) == (HELD, "warm", "first_seen")
    session.close()


@pytest.mark.parametrize("block", [0, 3, 6])
def test_a_block_that_is_gone_costs_itself(dense: LoadedModel, tmp_path: Path, block: int):
    """And what is behind the last one."""
    have_said(dense, tmp_path)
    session = Session(dense, tmp_path)
    session.slot_of(TURN_2, block).unlink()
    num_tokens = HELD - HELD % BLOCK_TOKENS - BLOCK_TOKENS
    assert reused(check_right(session, TURN_2))[:2] == (num_tokens, "warm")
    assert session.tiers.counts.num_damaged == 0
    session.close()


def test_a_damaged_end_costs_the_end(stored: tuple[LoadedModel, Path]):
    (head,) = (stored[1] / "heads").rglob("*.safetensors")
    spoil(head, -1)
    session = Session(*stored)
    whole = 0 if session.tiers.needs_state else HELD - HELD % BLOCK_TOKENS
    assert reused(check_right(session, TURN_2))[0] == whole
    session.close()


def test_a_damaged_state_costs_the_state(hybrid: LoadedModel, tmp_path: Path):
    session = Session(hybrid, tmp_path)
    session.turn(FIRST, SAID, boundaries=(32, 64))
    session.close()
    session = Session(hybrid, tmp_path)
    path = session.slot_of(FIRST, 3)
    spoil(path.with_name(path.name.replace(".safetensors", ".state.safetensors")), -1)
    branch = [*FIRST[:70], *ids(9, 20)]
    assert reused(check_right(session, branch))[2] == "damaged"
    assert session.tiers.counts.num_damaged == 1
    session.close()
    session = Session(hybrid, tmp_path)
    assert reused(check_right(session, branch))[:2] == (32, "warm")
    session.close()


def test_tokens_decide_when_names_agree(dense: LoadedModel, tmp_path: Path):
    have_said(dense, tmp_path)
    session = Session(dense, tmp_path)
    path, slots = session.slot_of(FIRST, 2), Slots(tmp_path / "slots")
    key = BlockKey(MODEL, session.chain.block_hashes(FIRST)[2])
    slot = slots.read(key, FIRST[32:48])
    assert slot is not None
    path.unlink()
    about = SlotAbout(*key, slot.about.layout)
    slots.put(about, array("I", [*FIRST[32:47], 7]), slot.tensors)
    assert check_right(session, TURN_2).use.num_tokens < HELD
    assert session.tiers.counts.exact_key_rejected_by_model_lcp == 1
    session.close()


def test_reading_that_takes_longer_than_prefill_is_not_begun(stored: tuple[LoadedModel, Path]):
    session = Session(*stored)
    session.state.rates.read_bytes_per_s = 10.0
    session.state.rates.prefill_s_per_token = 1e-6
    assert reused(check_right(session, TURN_2)) == (0, "none", "slower_than_prefill")
    session.close()


def test_one_slow_read_does_not_end_reading(stored: tuple[LoadedModel, Path]):
    session = Session(*stored)
    session.state.rates.prefill_s_per_token = 1e-3
    session.state.rates.on_read(1 << 21, 600.0)
    assert reused(check_right(session, TURN_2))[1] == "warm"
    session.close()


def test_all_that_want_the_same_blocks_get_them(stored: tuple[LoadedModel, Path]):
    session = Session(*stored)
    cursors = [session.cursor(one) for one in (TURN_2, FIRST[:23], TURN_2, TURN_2)]
    for cursor in cursors:
        session.tiers.begin(cursor)
    session.tiers.release(cursors.pop())
    session.wait_for(*cursors)
    num_tokens = [session.tiers.restore(cursor)[1] for cursor in cursors]
    assert num_tokens == [HELD, 0 if session.tiers.needs_state else 22, HELD]
    session.check()
    assert all(piece.num_readers == 0 for piece in session.tiers.memory)
    session.close()


def test_only_what_is_new_is_written(stored: tuple[LoadedModel, Path]):
    model, root = stored
    before = {path: path.stat().st_ino for path in files(root)}
    session = Session(model, root)
    session.turn(TURN_2, SAID)
    session.close()
    assert {path: path.stat().st_ino for path in before} == before
    blocks = {path for path in files(root) if ".state." not in path.name}
    assert len(blocks) == (len(TURN_2) + len(SAID)) // BLOCK_TOKENS


def test_who_begins_like_a_private_prompt_is_kept_and_the_private_rest_is_not(
    model: LoadedModel, tmp_path: Path
):
    session = Session(model, tmp_path)
    session.turn(FIRST, SAID, ttl_s=0.0)
    own = [[*FIRST[:50], *NEXT], [*FIRST[:40], *ids(5, 60)]]
    for number, prompt in enumerate((*own, own[0])):
        session.turn(prompt, SAID, session=f"{number % 2}")
    session.close()
    names = {path.name.partition(".")[0] for path in files(tmp_path)}
    said = {one.hex() for prompt in own for one in session.chain.block_hashes([*prompt, *SAID])}
    assert names == said
    again = Session(model, tmp_path)
    for prompt in own:
        end = len(prompt) + len(SAID)
        assert reused(check_right(again, [*prompt, *SAID, 7]))[:2] == (end, "warm")
    again.close()


def pin(session: Session, token_ids: list[int]) -> None:
    """As a prewarmed prompt is pinned: all but its last token."""
    cursor = session.cursor(token_ids)
    kv, start = session.take_up(cursor)
    session.compute(cursor, kv, start)
    session.tiers.pin(cursor, kv, "asked")


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 64, 70, 99])
@pytest.mark.parametrize("ttl_s", [0.0, 60.0])
def test_a_pinned_prompt_needs_nothing_of_the_conversation_that_it_is_the_beginning_of(
    dense: LoadedModel, tmp_path: Path, num_tokens: int, ttl_s: float
):
    session = Session(dense, tmp_path)
    session.turn(FIRST, SAID, session="goes", ttl_s=ttl_s)
    pin(session, FIRST[: num_tokens + 1])
    session.delete("goes")
    session.close()
    later = Session(dense, tmp_path)
    cursor = check_right(later, [*FIRST[:num_tokens], *ids(9, 40)])
    assert num_tokens - num_tokens % BLOCK_TOKENS <= cursor.use.num_tokens <= num_tokens
    assert check_right(later, TURN_2).use.num_tokens <= num_tokens
    later.close()


def test_state_is_never_kept_for_another_position(hybrid: LoadedModel):
    """What is kept of a prefix is evicted between its commit and the end of its prompt."""
    session = Session(hybrid)
    cursor = session.cursor(FIRST, mode="prefix", prefix_end=40, boundaries=(40,))
    kv, _ = session.take_up(cursor)
    for start, end in ((0, 32), (32, 40)):
        session.forward(FIRST[start:end], kv)
        session.tiers.on_prefill(cursor, kv, (start, end), 0.001)
    assert cursor.num_kept == 40
    session.tiers.hear(HotBudget(num_bytes=1))
    assert not len(session.tiers.memory)
    session.compute(cursor, kv, 40)
    assert reused(check_right(session, FIRST))[0] == 0


def test_a_boundary_inside_what_is_known_gets_its_state(hybrid: LoadedModel):
    session = Session(hybrid)
    session.turn(FIRST, SAID)
    for end in (48, 77):
        prompt = [*FIRST[:end], *ids(end, 20)]
        last_logits(session, prompt, session.cursor(prompt, boundaries=(end,)))
        assert reused(check_right(session, [*FIRST[:end], 9, 8, 7]))[:2] == (end, "hot")
    num_pieces = len(session.tiers.memory)
    check_right(session, FIRST[:49])
    check_right(session, FIRST[:78])
    assert len(session.tiers.memory) == num_pieces


def test_a_recomputed_sequence_takes_up_what_was_kept_of_it(model: LoadedModel):
    session = Session(model)
    cursor = session.turn(FIRST, [])
    longer = session.tiers.lengthened(cursor, [*FIRST, *SAID])
    kv, num_tokens = session.take_up(longer)
    assert num_tokens == 100
    assert longer.block_hashes == session.chain.block_hashes([*FIRST, *SAID])
    session.compute(longer, kv, num_tokens)
    assert reused(check_right(session, [*FIRST, *SAID, 7]))[0] == 119


def test_a_conversation_larger_than_memory_is_read_back_whole(model: LoadedModel, tmp_path: Path):
    session = Session(model, tmp_path)
    session.turn(TURN_2, SAID)
    whole = [*TURN_2, *SAID, *ids(4, 60), *SAID]
    session.turn(whole[: -len(SAID)], SAID)
    session.close()
    whole_bytes = session.tiers.memory.num_bytes
    session = Session(model, tmp_path, hot_bytes=whole_bytes - 1)
    for tiers in (("warm",), ("hot", "warm")):
        cursor = check_right(session, [*whole, 5])
        assert cursor.use.num_tokens == len(whole)
        assert cursor.use.tier in tiers
        session.tiers.release(cursor)
        assert session.tiers.memory.num_bytes < whole_bytes
    session.close()


def test_what_no_disk_takes_is_cut_only_as_far_as_memory_holds_it(model: LoadedModel):
    session = Session(model)
    session.turn(FIRST, SAID)
    half = session.tiers.memory.num_bytes // 2
    small = Session(model, hot_bytes=half)
    cursor = small.turn(FIRST, SAID)
    assert small.tiers.memory.num_bytes <= half
    assert cursor.num_kept <= len(FIRST)
    check_right(small, [*FIRST, *SAID, 5])


def test_states_that_a_conversation_leaves_behind_serve_branches_and_are_few(hybrid: LoadedModel):
    session = Session(hybrid)
    inner = tuple(range(32, 384, 32))
    prompt = ids(4, 400)
    session.turn(prompt, SAID, boundaries=(*inner, 390))
    states = {piece.end for piece in session.tiers.memory if piece.has_state}
    assert len(states) == 8
    assert {inner[-1], 390, 399, 420} <= states
    assert check_right(session, [*prompt[:380], 7, 7]).use.num_tokens == inner[-1]
