"""KV by blocks with real caches, files and threads: exact values, and random interleavings."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.kv import reader
from runtime.kv.block_memory import BlockMemory
from runtime.kv.cursor import CacheCursor
from runtime.kv.pack import RunKv
from runtime.kv.writer import Written
from runtime.kv_messages import Drop, Ended, Recall
from store.block_names import num_common, pack_ids
from store.heads import Whom
from store.keyed_names import Asker, conversation_key
from tests.kv_worker import BLOCK, PLAIN, SECRET, STATEFUL, KvWorker, Request, compute, names_of
from tests.waiting import PATIENCE_S


@pytest.fixture(params=["memory", "disk"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "disk" else None


@pytest.fixture
def workers() -> Iterator[Callable[..., KvWorker]]:
    made: list[KvWorker] = []

    def make(*args: Any, **fields: Any) -> KvWorker:
        made.append(KvWorker(*args, **fields))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_follow_up_takes_up_all_that_was_said(workers: Any, root: Path | None):
    for make in (PLAIN, STATEFUL):
        worker = workers(make, root)
        first = worker.ask(range(10), [100, 101, 102], "s")
        assert (first.num_reused, first.cursor.use.reason) == (0, "first_seen")
        second = worker.ask([*first.token_ids, 200, 201], [300], "s")
        assert second.num_reused == 13
        worker.settle()
        third = worker.ask([*second.token_ids, 202], [301], "s")
        assert third.num_reused == 16
        worker.close()
        root = root / "stateful" if root is not None else None


def test_a_branch_takes_up_what_it_shares_to_the_token(workers: Any, root: Path | None):
    worker = workers(PLAIN, root)
    worker.ask(range(10), [100, 101], "s")
    branch = worker.ask([*range(9), 50, 51], [102], "t")
    assert (branch.num_reused, branch.cursor.use.reason) == (9, "diverged")
    assert worker.ask([*range(10), 100, 60], [1], "u").num_reused == 11


def test_with_states_a_branch_takes_up_the_last_one_before_it(workers: Any, root: Path | None):
    worker = workers(STATEFUL, root)
    worker.ask(range(10), [100, 101], "s", boundaries=(6,))
    branch = worker.ask([*range(7), 50, 51], [102], "t")
    assert (branch.num_reused, branch.cursor.use.reason) == (6, "no_checkpoint")
    worker.close()
    if root is not None:
        again = workers(STATEFUL, root)
        branch = again.ask([*range(7), 60, 61], [102], "u")
        assert (branch.num_reused, branch.cursor.use.reason) == (4, "first_seen")


def test_a_state_that_is_in_memory_is_not_read(workers: Any, tmp_path: Path):
    worker = workers(STATEFUL, tmp_path)
    worker.ask(range(10), [100], "s", boundaries=(4,))
    worker.settle()
    use = worker.ask([*range(5), 50, 51], [102], "t").cursor.use
    assert (use.num_tokens, use.tier) == (4, "hot")


def test_after_a_restart_everything_is_taken_up(workers: Any, tmp_path: Path):
    for number, make in enumerate((PLAIN, STATEFUL)):
        root = tmp_path / str(number)
        worker = workers(make, root)
        said = worker.ask(range(10), [100, 101, 102], "s").token_ids
        worker.close()
        again = workers(make, root)
        second = again.ask([*said, 200, 201], [300], "s")
        assert (second.num_reused, second.cursor.use.tier) == (13, "warm")


class WrittenLate(KvWorker):
    """With `holds` it hears what was written only once it has heard what is on disk of a prompt."""

    holds = False

    def handle(self, news: Any) -> None:
        if isinstance(news, Written) and self.holds:
            self.inbox.put(news)
            return
        self.holds = self.holds and not isinstance(news, reader.OnDisk)
        super().handle(news)


def test_what_is_a_slot_only_after_it_was_looked_for_stays_in_memory_for_who_looked(tmp_path: Path):
    worker = WrittenLate(PLAIN, tmp_path, hot_bytes=1)
    first = worker.ask(range(8), [100], "s")
    worker.settle()
    second = worker.ask([*first.token_ids, *range(200, 205)], [300], "s")
    worker.holds = True
    third = worker.ask([*second.token_ids, 400, 401], [500], "s")
    assert third.num_reused >= 12
    worker.close()


class AnsweredLate(KvWorker):
    """Counts what was written; with `holds` no head that is told is answered."""

    holds = False

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.num_written: Counter[bytes] = Counter()
        self.unanswered: list[Ended] = []

    def handle(self, news: Any) -> None:
        if isinstance(news, Written):
            self.num_written.update(news.names)
        if isinstance(news, Ended) and self.holds:
            self.unanswered.append(news)
        else:
            super().handle(news)


def test_what_is_a_slot_is_not_written_again_before_its_head_is_answered(tmp_path: Path):
    worker = AnsweredLate(PLAIN, tmp_path)
    worker.holds = True
    first = worker.ask(range(9), [100], "s")
    worker.settle()
    assert len(worker.num_written) == 2
    second = worker.ask([*first.token_ids, *range(200, 205)], [300], "s")
    worker.settle()
    assert len(worker.num_written) == 4
    assert max(worker.num_written.values()) == 1
    worker.holds = False
    for ended in worker.unanswered:
        worker.handle(ended)
    third = worker.ask([*second.token_ids, 400], [500], "s")
    worker.settle()
    assert third.cursor.use.num_durable >= 12
    worker.close()
    assert max(worker.num_written.values()) == 1


def test_after_a_kill_whole_blocks_are_taken_up(workers: Any, tmp_path: Path):
    worker = workers(PLAIN, tmp_path / "a")
    said = worker.ask(range(10), [100, 101, 102], "s").token_ids
    worker.settle()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    again = workers(PLAIN, tmp_path / "b")
    second = again.ask([*said, 200], [300], "s")
    assert (second.num_reused, second.cursor.use.reason) == (12, "not_yet_durable")


def test_what_is_durable_is_said(workers: Any, tmp_path: Path):
    worker = workers(PLAIN, tmp_path)
    said = worker.ask(range(10), [100, 101, 102], "s").token_ids
    worker.settle()
    assert worker.ask([*said, 200], [300], "s").cursor.use.num_durable == 12


def test_what_was_deleted_is_not_taken_up(workers: Any, root: Path | None):
    worker = workers(PLAIN, root)
    shared = worker.ask(range(8), [100, 101], "keeps").token_ids
    gone = worker.ask([*range(8), 50, 51, 52], [60, 61], "goes").token_ids
    worker.settle()
    worker.delete("goes")
    again = worker.ask([*gone, 70], [1], "new")
    assert (again.num_reused, again.cursor.use.reason) == (8, "deleted")
    assert worker.ask([*shared, 71], [1], "keeps").num_reused == 10


def test_a_turn_that_ends_after_its_deletion_is_not_kept(workers: Any, root: Path | None):
    worker = workers(PLAIN, root)
    said = worker.ask(range(9), [100], "goes").token_ids
    late = Request(worker, [*said, 50, 51, 52, 53], [54], "goes")
    late.go_on(1)
    worker.delete("goes")
    late.finish()
    worker.settle()
    assert worker.ask([*said, 50, 51, 52, 53, 54, 55], [56], "new").num_reused == 0


def test_a_deletion_takes_nothing_from_who_goes_on_from_it_meanwhile(
    workers: Any, root: Path | None
):
    worker = workers(PLAIN, root)
    gone = worker.ask(range(10), [100], "goes").token_ids
    branch = Request(worker, [*range(9), 50, 51], [52], "stays")
    worker.delete("goes")
    said = branch.finish().token_ids
    worker.settle()
    assert worker.ask([*said, 60], [61], "stays").num_reused == 12
    assert worker.ask([*gone, 60], [61], "new").num_reused == 9
    worker.close()
    if root is not None:
        again = workers(PLAIN, root)
        assert again.ask([*said, 60, 62], [63], "stays").num_reused == 13


def test_a_stop_right_after_a_deletion_takes_nothing_from_who_shared_it(
    workers: Any, tmp_path: Path
):
    for number in range(10):
        root = tmp_path / str(number)
        worker = workers(PLAIN, root)
        gone = worker.ask(range(4), [100], "goes").token_ids
        branch = Request(worker, [*range(4), 50, 51], [52], "stays")
        late = Request(worker, [*gone, 60, 61], [62], "goes")
        worker.delete("goes")
        said = branch.finish().token_ids
        late.finish()
        worker.close()
        again = workers(PLAIN, root)
        assert again.ask([*said, 70], [71], "stays").num_reused == len(said)


def test_what_is_deleted_while_it_is_brought_back_is_not_taken_in(workers: Any, tmp_path: Path):
    worker = workers(PLAIN, tmp_path)
    said = worker.ask(range(10), [100], "goes").token_ids
    worker.close()
    worker = workers(PLAIN, tmp_path)
    worker.tiers.hear(Recall(pack_ids(said), b"", is_wanted=True))
    worker.tiers.set_idle(is_idle=True)
    while not isinstance(found := worker.inbox.get(timeout=PATIENCE_S), reader.OnDisk):
        pass
    worker.handle(found)  # from here on its files are being read
    read = worker.inbox.get(timeout=PATIENCE_S)
    assert isinstance(read, reader.FilesRead)
    assert worker.heads is not None
    gone = worker.heads.delete(Whom(session=conversation_key(SECRET, "goes")))
    worker.tiers.hear(Drop(number=1, names=tuple(one.name for one in gone)))
    worker.handle(read)
    worker.settle()
    assert not len(worker.tiers.memory)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_what_is_deleted_while_it_is_read_for_a_request_is_that_requests_own(
    workers: Any, tmp_path: Path, is_cancelled: bool
):
    worker = workers(PLAIN, tmp_path)
    said = worker.ask(range(10), [100], "goes").token_ids
    worker.close()
    worker = workers(PLAIN, tmp_path)
    prompt = [*said, 50, 51]
    cursor = CacheCursor(token_ids=prompt, asker=Asker("m", "other"))
    worker.tiers.set_idle(is_idle=False)
    worker.tiers.begin(cursor)
    worker.handle(worker.inbox.get(timeout=PATIENCE_S))
    reads = []
    while sum(len(one.reads) for one in reads) < 3:  # two blocks, and the end
        reads.append(worker.inbox.get(timeout=PATIENCE_S))
    assert worker.heads is not None
    gone = worker.heads.delete(Whom(session=conversation_key(SECRET, "goes")))
    worker.tiers.hear(Drop(number=1, names=tuple(one.name for one in gone)))
    for read in reads:
        worker.handle(read)
    if not is_cancelled:
        kv, num_tokens = worker.tiers.restore(cursor)
        assert num_tokens == 11
        compute(kv, prompt, num_tokens, 12)
        worker.tiers.on_prefill(cursor, kv, (num_tokens, 12), 1.0)
    worker.tiers.release(cursor)
    worker.settle()
    assert len(worker.tiers.memory) == (0 if is_cancelled else 3)
    assert bool(worker.heads.known) != is_cancelled


def test_nothing_of_what_was_deleted_stays_in_idle_caches(workers: Any, root: Path | None):
    worker = workers(PLAIN, root)
    worker.ask(range(10), [100], "goes")
    worker.settle()
    assert len(worker.state.idle_caches) == 1
    worker.delete("goes")
    assert len(worker.state.idle_caches) == 0


def test_memory_holds_no_more_than_its_budget(workers: Any, root: Path | None):
    worker = workers(PLAIN, root, hot_bytes=6 * BLOCK * 16)
    for number in range(6):
        worker.ask(range(100 * number, 100 * number + 21), [1], f"s{number}")
        worker.settle()
        worker.tiers.set_idle(is_idle=True)
        assert worker.tiers.memory.num_bytes <= worker.tiers.memory.budget_bytes
    again = worker.ask([*range(21), 1, 2], [3], "s0")
    assert again.num_reused == (20 if root is not None else 0)
    assert again.cursor.use.reason == "evicted"


def test_nothing_of_another_tenant_is_taken_up(workers: Any, root: Path | None):
    worker = workers(PLAIN, root)
    worker.ask(range(10), [1], "s", tenant="one")
    assert worker.ask(range(10), [1], "s", tenant="two").num_reused == 0
    assert worker.ask(range(10), [1], "s", tenant="one").num_reused == 9


def test_a_block_that_is_damaged_is_computed_again_and_what_follows_is_taken_up(
    workers: Any, tmp_path: Path
):
    worker = workers(PLAIN, tmp_path, slice_tokens=64)
    said = worker.ask(range(24), [100], "s").token_ids
    worker.close()
    name = worker.state.chain.block_hashes(said)[2]
    (path,) = (tmp_path / "slots").rglob(f"{name.hex()}.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    again = workers(PLAIN, tmp_path, slice_tokens=64)
    second = again.ask([*said, 200], [300], "s")
    assert (second.num_reused, second.cursor.use.reason) == (21, "damaged")
    again.close()
    assert again.damaged == [name]
    assert path.exists(), "it is written again"


def test_a_private_prompt_is_in_memory_only(workers: Any, tmp_path: Path):
    worker = workers(PLAIN, tmp_path)
    said = worker.ask(range(10), [100, 101], "s", ttl_s=0.0).token_ids
    assert worker.ask([*said, 9], [1], "s", ttl_s=0.0).num_reused == 12
    worker.close()
    assert not [*tmp_path.rglob("*.safetensors")]


def check_slabs(memory: BlockMemory[RunKv]) -> int:
    """All of each slab is counted: all blocks of it are in memory. How many slabs there are."""
    slabs = {one.kv.slab for one in memory} - {None}
    for slab in slabs:
        assert slab is not None
        of_slab = [one for one in memory if one.kv.slab is slab]
        assert sum(map(len, of_slab)) == slab.slices[0].shape[0]
    return len(slabs)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_slab_leaves_memory_as_soon_as_a_block_of_it_does(workers: Any, *, is_deleted: bool):
    worker = workers(PLAIN, slice_tokens=64)
    said = worker.ask(range(64), [100], "s").token_ids
    memory = worker.tiers.memory
    assert check_slabs(memory) == 2
    slabs = [weakref.ref(one.kv.slab) for one in memory if one.kv.slab is not None]
    if is_deleted:
        names = worker.state.chain.block_hashes(said)
        worker.tiers.hear(Drop(number=1, names=tuple(names[12:])))
    else:
        memory.budget_bytes = 12 * BLOCK * 16
        worker.state.shrink()
    assert [one.start for one in memory] == [*range(0, 12 * BLOCK, BLOCK)]
    assert check_slabs(memory) == 1
    assert [one() is not None for one in slabs] == [True] * 8 + [False] * 7
    assert worker.ask([*said, 200], [300], "s").num_reused == 12 * BLOCK


WHICH = st.integers(0, 2**20)


class Machine(RuleBasedStateMachine):
    """`live` are conversations, and what was said in each. Of that `whole` is in memory to the
    token, the blocks of `durable` are on disk, and of `rested` what is behind the last one as well.
    """

    has_states = False
    has_disk = False

    @initialize()
    def begin(self) -> None:
        self.home = Path(tempfile.mkdtemp())
        self.roots = (self.home / str(number) for number in itertools.count())
        self.root = next(self.roots) if self.has_disk else None
        self.worker = KvWorker(STATEFUL if self.has_states else PLAIN, self.root)
        self.fresh, self.sessions = itertools.count(1000), itertools.count(1000)
        self.live: dict[str, list[list[int]]] = {}
        self.whole: list[list[int]] = []
        self.durable: list[list[int]] = []
        self.rested: list[list[int]] = []
        self.asked: list[list[int]] = []
        """Since the last start."""
        self.damaged: set[bytes] = set()
        self.under_way: list[Request] = []
        self.turned_away: list[Request] = []
        self.undisturbed: list[Request] = []
        """Since they began nothing left memory."""

    def teardown(self) -> None:
        self.worker.close()
        shutil.rmtree(self.home)

    def session(self) -> str:
        return f"s{next(self.sessions)}"

    def said(self) -> list[list[int]]:
        return [one for each in self.live.values() for one in each]

    def ask(self, prompt: list[int], num: int, session: str, **fields: Any) -> None:
        self.finish_it(self.begin_it(prompt, num, session, **fields))

    def begin_it(self, prompt: list[int], num: int, session: str, **fields: Any) -> Request:
        answer = [next(self.fresh) for _ in range(num)]
        one = Request(self.worker, prompt, answer, session, **fields)
        self.compare(one)
        self.undisturbed.append(one)
        return one

    def compare(self, one: Request) -> None:
        last, num_reused = len(one.prompt) - 1, one.cursor.use.num_tokens
        under_way = [other.prompt for other in self.under_way]
        most = max((num_common(it, one.prompt) for it in self.said() + under_way), default=0)
        assert num_reused <= min(most, last), "what was deleted is nowhere"
        least = min(self.least(one.prompt), last)
        assert num_reused >= least, f"{least} of {one.prompt} were known"

    def finish_it(self, one: Request) -> None:
        said = one.finish().token_ids
        assert one.session is not None
        if one in self.turned_away:
            self.worker.settle()
            return
        self.rested = [each for each in self.rested if each != said[: len(each)]]
        self.live.setdefault(one.session, []).append(said)
        if not self.has_disk or one in self.undisturbed:
            self.whole.append(said)
        self.asked.append(said)

    def least(self, prompt: list[int]) -> int:
        """So much of a prompt is known at least."""
        if self.has_states:  # where it begins with all that was said
            passed = [one for one in self.whole + self.rested if one == prompt[: len(one)]]
            return max((len(one) for one in passed if len(one) < len(prompt)), default=0)
        known = [num_common(one, prompt) for one in self.whole]
        known += [num // BLOCK * BLOCK for one in self.durable if (num := num_common(one, prompt))]
        shared = ((one, num_common(one, prompt)) for one in self.rested)
        known += [num for one, num in shared if num > len(one) // BLOCK * BLOCK]
        return max(known, default=0)

    @rule(system=st.integers(0, 9), num=st.integers(1, 9))
    def start(self, system: int, num: int) -> None:
        prompt = [*range(system), *(next(self.fresh) for _ in range(num))]
        self.ask(prompt, num, self.session(), boundaries=(system,))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num=st.integers(1, 6), is_branch=st.booleans())
    def go_on(self, data: st.DataObject, num: int, is_branch: bool) -> None:
        session = data.draw(st.sampled_from(sorted(self.live)))
        before = data.draw(st.sampled_from(self.live[session]))
        if is_branch:
            before = before[: data.draw(st.integers(1, len(before)))]
            session = self.session()
        self.ask([*before, *(next(self.fresh) for _ in range(num))], num, session)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num=st.integers(1, 9), num_slices=st.integers(0, 3))
    def begin_one(self, data: st.DataObject, num: int, num_slices: int) -> None:
        """A turn of a conversation that does not end yet, or the first of another one."""
        session = data.draw(st.sampled_from(sorted(self.live)))
        before = data.draw(st.sampled_from(self.live[session]))
        if data.draw(st.booleans()):
            before, session = before[: data.draw(st.integers(1, len(before)))], self.session()
        new = [next(self.fresh) for _ in range(num)]
        one = self.begin_it([*before, *new], num, session)
        one.go_on(num_slices)
        self.under_way.append(one)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        one = self.under_way[data.draw(WHICH) % len(self.under_way)]
        self.finish_it(one)
        self.under_way.remove(one)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[session]
        self.worker.delete(session)
        self.turned_away += [one for one in self.under_way if one.session == session]
        self.whole = [one for one in self.whole if one in self.said()]
        self.durable = [one for one in self.durable if one in self.said()]
        self.rested = [one for one in self.rested if one in self.said()]
        said = [*self.said(), *(one.prompt for one in self.under_way)]
        there = {name for one in said for name in names_of(one, range(1, len(one) + 1))}
        assert all(piece.name in there for piece in self.worker.tiers.memory)

    @rule(share=st.integers(0, 4))
    def evict(self, share: int) -> None:
        self.settled()
        memory = self.worker.tiers.memory
        memory.budget_bytes = memory.num_bytes * share // 4
        self.worker.state.shrink()
        assert memory.num_bytes <= memory.budget_bytes
        memory.budget_bytes = 1 << 20
        self.whole, self.undisturbed = [], []

    def settled(self) -> None:
        self.worker.settle()
        if self.has_disk:
            self.durable = self.undamaged()

    def undamaged(self) -> list[list[int]]:
        return [one for one in self.said() if self.damaged.isdisjoint(names_of(one, ()))]

    @precondition(lambda self: self.has_disk)
    @rule(is_killed=st.booleans())
    def start_again(self, is_killed: bool) -> None:
        """As it was when the last turns were published, or when the model rested."""
        assert self.root is not None
        for one in self.under_way:
            self.finish_it(one)
        self.under_way = []
        if is_killed:
            self.settled()
            before, self.root = self.root, next(self.roots)
            shutil.copytree(before, self.root)
        self.worker.close()
        self.worker = KvWorker(STATEFUL if self.has_states else PLAIN, self.root)
        self.durable, self.whole = self.undamaged(), []
        if not is_killed:
            self.rested += [one for one in self.asked if one in self.durable]
        self.rested = [one for one in self.rested if one in self.durable and not self.goes_on(one)]
        self.asked = []

    def goes_on(self, said: list[int]) -> bool:
        """Its conversation does, so that another head has taken the place of its own."""
        of_it = next(each for each in self.live.values() if said in each)
        return any(one[: len(said)] == said and one != said for one in of_it)

    @precondition(lambda self: self.has_disk and self.live)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        self.settled()
        assert self.root is not None
        files = sorted((self.root / "slots").rglob("*.safetensors"))
        if not files:
            return
        path = files[data.draw(WHICH) % len(files)]
        content = bytearray(path.read_bytes())
        content[data.draw(WHICH) % len(content)] ^= 1
        path.write_bytes(content)
        name = bytes.fromhex(path.name.partition(".")[0])
        self.damaged.add(name)
        self.durable = self.undamaged()
        self.rested = [one for one in self.rested if one in self.durable]

    @invariant()
    def adds_up(self) -> None:
        memory = self.worker.tiers.memory
        memory.check()
        check_slabs(memory)


class InMemory(Machine):
    pass


class InMemoryWithStates(Machine):
    has_states = True


class OnDisk(Machine):
    has_disk = True


class OnDiskWithStates(Machine):
    has_states = True
    has_disk = True


HOW = settings(stateful_step_count=20, max_examples=25)
TestInMemory, TestInMemoryWithStates = InMemory.TestCase, InMemoryWithStates.TestCase
TestOnDisk, TestOnDiskWithStates = OnDisk.TestCase, OnDiskWithStates.TestCase
TestInMemory.settings = TestInMemoryWithStates.settings = HOW
TestOnDisk.settings = TestOnDiskWithStates.settings = HOW
