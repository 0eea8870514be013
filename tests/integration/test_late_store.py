"""A store that opens late, fails, comes back or is another one: what is in memory stays."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from runtime.cache.owned import OpenStore
from runtime.cache.service import KvStore
from runtime.cache.store_opening import open_store
from runtime.slot_events import AllSlotsTold, Attach, HotBudget, PinWanted, Slots
from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheUse, GenerateRequest, TokenPrompt
from runtime.worker.model import LoadedModel
from store.block_names import HashChain
from store.errors import StoreFailed
from store.keyed_names import Asker
from tests.asking import answer, request, supervising_opened_by, worker_of
from tests.kv_sessions import (
    BLOCK_TOKENS,
    FIRST,
    TURN_2,
    Session,
    Stored,
    ids,
    known,
    load,
    reused,
)
from tests.tiny_models import write_model
from tests.waiting import until

NAMES = Attach(model_hash=b"model", secret=b"secret")
OTHERS = Attach(model_hash=b"model", secret=b"another store's")
NUM_TOKENS = 600


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    if request.param == "hybrid":
        return load(write_model(folder, "lfm2"))
    return load(write_model(folder, num_hidden_layers=1))


def apart(model: LoadedModel, root: Path) -> Session:
    """A worker whose store is not open yet."""
    session = Session(model, root)
    session.tier_state.rename(HashChain(b"its own", b"", block_size=BLOCK_TOKENS), b"")
    session.tier_state.is_apart = True
    return session


def attach(session: Session, names: Attach = NAMES, slots: tuple[Any, ...] = ()) -> None:
    for news in (names, Slots(slots=slots), AllSlotsTold()):
        session.tiers.hear(news)
        session.check()


# What a worker does


def test_what_was_computed_before_the_store_opened_is_kept_under_its_names(
    model: LoadedModel, tmp_path: Path
):
    early = apart(model, tmp_path / "store")
    first = early.turn(FIRST, ids(2, 20), asker=Asker("m", "s"), tenant="alice")
    assert reused(first) == (0, "none", "away")
    assert not [run for run in early.tiers.hot.tree if early.tiers.hot[run].is_written]
    attach(early)
    again = early.cursor(TURN_2, tenant="alice")
    assert early.take_up(again)[1] == 120
    assert reused(again) == (120, "hot", "first_seen")
    slots = early.publish()
    assert [(job.asker.session_id, job.ends_turn) for job, _ in early.written][-1] == ("s", True)
    later = Session(model, tmp_path / "store")
    later.tiers.learn(slots)
    cursor = later.cursor(TURN_2, tenant="alice")
    assert later.take_up(cursor)[1] == 120
    assert later.take_up(later.cursor(TURN_2))[1] == 0


def test_what_lies_on_disk_as_well_is_not_written_again(model: LoadedModel, tmp_path: Path):
    stored = Stored(model, tmp_path / "store")
    early = apart(model, tmp_path / "store")
    early.turn(FIRST, ids(2, 20))
    attach(early, NAMES, tuple(stored.known))
    assert early.finish() == []
    cursor = early.cursor(TURN_2)
    assert early.take_up(cursor)[1] == 120
    assert cursor.use.tier == "hot"


def test_a_store_that_is_opened_again_is_believed_and_what_it_lost_is_written_again(
    model: LoadedModel, tmp_path: Path
):
    session = Session(model, tmp_path / "store")
    session.turn(FIRST, ids(2, 20))
    session.wait_until_written()
    jobs = list(session.written)
    session.tiers.on_saved([job.header.id for job, _ in jobs])
    attach(session, NAMES, (known(jobs[0][0].header),))
    assert session.take_up(session.cursor(TURN_2))[1] == 120
    written = [job.header.id for job, _ in session.finish()]
    assert written[len(jobs) :] == [job.header.id for job, _ in jobs[1:]]


def test_a_pin_is_asked_for_by_the_stores_name(model: LoadedModel, tmp_path: Path):
    session = apart(model, tmp_path / "store")
    cursor = session.cursor(FIRST)
    kv, start = session.take_up(cursor)
    session.compute(cursor, kv, start)
    session.tiers.pin(cursor, kv, "asked")
    assert not [one for one in session.reports if isinstance(one, PinWanted)]
    attach(session)
    [pin] = [one for one in session.reports if isinstance(one, PinWanted)]
    expected = Session(model, tmp_path / "other")
    cursor = expected.cursor(FIRST)
    kv, start = expected.take_up(cursor)
    expected.compute(cursor, kv, start)
    expected.tiers.pin(cursor, kv, "asked")
    assert expected.reports == [pin]
    session.finish()
    expected.finish()


def test_why_something_is_missed_is_known_under_the_stores_names_as_well(
    model: LoadedModel, tmp_path: Path
):
    session = apart(model, tmp_path / "store")
    session.turn(FIRST, ids(2, 20))
    session.turn(ids(7, 40), ids(8, 2))
    session.tiers.hear(HotBudget(num_bytes=0))
    attach(session)
    cursor = session.cursor(FIRST)
    session.take_up(cursor)
    assert reused(cursor) == (0, "none", "evicted")
    session.finish()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_store_does_every_prompt_finds_what_it_would_have_found(
    model: LoadedModel, tmp_path: Path, seed: int
):
    """Against tiers that never heard of a store."""
    draw = random.Random(seed)
    session, plain = apart(model, tmp_path / "store"), Session(model)
    said: list[tuple[str, list[int]]] = [("", ids(1, 40))]
    for number in range(14):
        event = draw.choice(["turn", "turn", "turn", "attach", "other", "told"])
        if event == "turn":
            tenant, before = draw.choice(said)
            tenant = draw.choice([tenant, "alice"])
            cut = draw.randrange(1, len(before) + 1)
            prompt = [*before[: draw.choice([cut, len(before)])], *ids(100 + number, 30)]
            output = ids(200 + number, draw.randrange(1, 20))
            cursors = [one.turn(prompt, output, tenant=tenant) for one in (session, plain)]
            assert len({cursor.use.num_tokens for cursor in cursors}) == 1
            said.append((tenant, [*prompt, *output]))
        elif event == "told":
            session.tiers.hear(AllSlotsTold())
        else:
            attach(session, OTHERS if event == "other" else NAMES)
    attach(session)
    assert {run.end for run in session.tiers.hot.tree} == {run.end for run in plain.tiers.hot.tree}
    assert all(session.tiers.hot[run].is_written for run in session.tiers.hot.tree)
    last = session.tiers.hot
    there = {slot.id: slot for slot in session.publish()}
    later = Session(model, tmp_path / "store")
    later.tiers.learn([there[last[run].id] for run in last.tree])
    for tenant, ids_said in said[1:]:
        found = [one.cursor([*ids_said, 7], tenant=tenant) for one in (later, plain)]
        assert (
            len({one.take_up(cursor)[1] for one, cursor in zip((later, plain), found, strict=True)})
            == 1
        )


# What a server does


class Gate:
    """Opens the store when the test lets it, or fails as long as the test wants."""

    def __init__(self, *, is_open: bool = False, fails: bool = False) -> None:
        self.fails = fails
        self.reached = threading.Event()
        self._open = threading.Event()
        if is_open:
            self.open()

    def open(self) -> None:
        self._open.set()

    def __call__(self, root: Path, cold: str | None, secret: bytes | None) -> OpenStore:
        self.reached.set()
        self._open.wait()
        if self.fails:
            raise StoreFailed("not yet")
        return open_store(root, cold, secret)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "m")
    write_model(folder / "n", seed=1)
    return folder


@pytest.fixture
def home(tmp_path: Path, models: Path) -> Path:
    (tmp_path / "models").symlink_to(models)
    return tmp_path


def serving(home: Path, gate: Gate, **settings: Any) -> Any:
    fields = {"kv_disk": True, "prewarm_share": 0.0}
    return supervising_opened_by(gate, home, **(fields | settings))


def prompt(number: int, model: str = "m") -> GenerateRequest:
    tokens = TokenPrompt(token_ids=tuple(ids(number, NUM_TOKENS)))
    return request(tokens, model=model, max_tokens=2)


async def use_of(supervisor: Supervisor, number: int, model: str = "m") -> CacheUse:
    said = await answer(supervisor.submit(prompt(number, model)))
    return said.finished.usage.cache


async def saved(kv: KvStore, num_tokens: int = NUM_TOKENS) -> None:
    def is_there() -> bool:
        store = kv.store
        return (
            store is not None and sum(one.num_tokens for one in store.index.totals()) >= num_tokens
        )

    await until(is_there, f"it is saved: {kv.status}")


async def test_while_the_store_is_being_opened_models_load_and_requests_wait(home: Path):
    async with serving(home, Gate(is_open=True)) as (supervisor, kv):
        assert (await use_of(supervisor, 1)).reason == "first_seen"
        await saved(kv)
    gate = Gate()
    async with serving(home, gate) as (supervisor, kv):
        try:
            asked = [supervisor.submit(prompt(1)), supervisor.submit(prompt(2))]
            await until(lambda: supervisor.worker("m") is not None, "a process")
            await until(lambda: worker_of(supervisor).ready is not None, "its weights are loaded")
            assert (kv.status.state, supervisor.status_of("m").state) == ("opening", "warming")
        finally:
            gate.open()
        uses = [(await answer(one)).finished.usage.cache for one in asked]
        assert uses[0].num_tokens == NUM_TOKENS - 1
        assert (uses[1].num_tokens, uses[1].reason) == (0, "first_seen")
        assert kv.status.state == "ok"


async def test_models_take_turns_while_the_store_is_being_opened_and_lose_nothing(home: Path):
    gate = Gate()
    async with serving(home, gate, max_loaded_models=1) as (supervisor, kv):
        try:
            asked = [supervisor.submit(prompt(1, model)) for model in ("m", "n")]
            await until(lambda: supervisor.worker("m") is not None, "a process")
            await until(lambda: worker_of(supervisor).ready is not None, "its weights are loaded")
        finally:
            gate.open()
        for one in asked:
            assert (await answer(one)).finished.usage.cache.reason == "first_seen"
        assert (await use_of(supervisor, 1, "m")).tier == "warm"
        assert (await use_of(supervisor, 1, "n")).tier == "warm"
        assert kv.status.state == "ok"


@pytest.mark.parametrize("trouble", ["fails", "takes long"])
async def test_a_store_that_comes_late_gets_what_is_in_memory_and_nobody_is_replaced(
    home: Path, trouble: str
):
    fails = trouble == "fails"
    gate = Gate(is_open=fails, fails=fails)
    async with serving(home, gate, load_timeout_s=8.0) as (supervisor, kv):
        try:
            first = await use_of(supervisor, 1)
            assert (first.num_tokens, first.reason) == (0, "away")
            assert kv.status.state == ("degraded" if fails else "opening")
            pid = worker_of(supervisor).pid
            assert (await use_of(supervisor, 1)).tier == "hot"
        finally:
            gate.fails = False
            gate.open()
        await saved(kv)
        again = await use_of(supervisor, 1)
        assert (again.tier, again.num_tokens) == ("hot", NUM_TOKENS - 1)
        assert (kv.status.state, worker_of(supervisor).pid) == ("ok", pid)
    async with serving(home, Gate(is_open=True)) as (supervisor, kv):
        assert (await use_of(supervisor, 1)).num_tokens == NUM_TOKENS - 1
