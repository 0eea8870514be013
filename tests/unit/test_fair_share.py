"""Who is next: tenants take turns by cost, and within one its conversations do."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import Overloaded
from runtime.fair_share import FairShare
from runtime.supervisor.refusals import check_number
from runtime.types import CacheParams, GenerateRequest, TokenPrompt
from tests.unit.test_scheduler import carry_out, new_group, new_scheduler, slice_of


def request(name: str, tenant: str = "", session: str | None = None) -> GenerateRequest:
    cache = CacheParams(tenant=tenant, session_id=session)
    return GenerateRequest(name, "m", TokenPrompt(token_ids=()), cache=cache)


def share() -> FairShare[GenerateRequest]:
    return FairShare(lambda one: one)


def served(waiting: list[GenerateRequest], fair: FairShare[GenerateRequest] | None = None) -> str:
    """In what order they are served, one after the other, each at a cost of one."""
    fair, left, order = fair or share(), [*waiting], ""
    while left:
        one = fair.next(left)
        fair.charge(one)
        left.remove(one)
        order += one.request_id
    return order


def test_tenants_take_turns_and_each_is_served_in_its_order() -> None:
    waiting = [request(name, "many") for name in "abcd"] + [request(name, "few") for name in "xy"]
    assert served(waiting) == "axbycd"


def test_conversations_of_a_tenant_take_turns_within_its_share() -> None:
    waiting = [request(name, "a", "one") for name in "123"]
    waiting += [request("4", "a", "two"), *(request(name, "b") for name in "xyz")]
    assert served(waiting) == "1x4y2z3"


def test_without_keys_or_sessions_who_came_first_is_first() -> None:
    assert served([request(name) for name in "cab"]) == "cab"


def test_a_newcomer_is_next_and_has_no_claim_on_what_it_left_unused() -> None:
    fair = share()
    assert served([request(name, "a") for name in "12345"], fair) == "12345"
    # It missed five turns: it has the next one, and then they take turns.
    waiting = [request(name, "a") for name in "678"] + [request(name, "b") for name in "xyz"]
    assert served(waiting, fair) == "x6y7z8"


def test_however_many_conversations_there_are_few_are_remembered_and_debts_are_kept() -> None:
    fair, debtor, new = share(), request("debtor", "a", "debtor"), request("new", "a", "new")
    fair.charge(debtor, 1e9)
    for number in range(5000):
        fair.charge(request("one", "a", f"s{number}"))
    assert fair.next([debtor, new]) is new
    assert fair.num_known <= 1024


def test_who_asks_for_much_at_once_waits_longer_for_the_next_turn() -> None:
    fair, big, small = share(), request("big", "a"), request("small", "b")
    fair.charge(big, 100.0)
    for _ in range(9):
        assert fair.next([big, small]) is small
        fair.charge(small, 12.0)
    assert fair.next([big, small]) is big


@given(
    costs=st.dictionaries(
        st.sampled_from("abcde"),
        st.lists(st.integers(1, 50), min_size=1, max_size=30),
        min_size=1,
    )
)
def test_of_two_who_always_wait_neither_gets_more_than_one_thing_ahead(
    costs: dict[str, list[int]],
) -> None:
    """The bound of start-time fair queueing: the largest thing of one and of the other."""
    fair, given_to = share(), Counter[str]()
    left = {name: [*some] for name, some in costs.items()}
    while all(left.values()):
        name = fair.next([request(name, name) for name in left]).request_id
        cost = left[name].pop(0)
        fair.charge(request(name, name), float(cost))
        given_to[name] += cost
        for one in left:
            for other in left:
                most = max(costs[one]) + max(costs[other])
                assert given_to[one] - given_to[other] <= most


def test_a_tenant_with_less_than_its_share_is_let_in_although_others_took_all() -> None:
    def check(tenant: str, owners: str, limit: int) -> None:
        check_number(tenant, owners, limit, "requests are open", "max_queue")

    check("b", "aaaa", 4)
    check("b", "aaaab", 4)
    check("c", "aaaabb", 4)
    for tenant, owners in (("a", "aaaa"), ("b", "aaaabb"), ("c", "aaaabbc"), ("a", "aabb")):
        with pytest.raises(Overloaded, match=f"{len(owners)} requests are open"):
            check(tenant, owners, 4)


# In the scheduler of a worker


def group(num_tokens: int, name: str, tenant: str, session: str | None = None):
    made = new_group(num_tokens, name=name)
    made.request = request(name, tenant, session)
    return made


def test_a_small_prompt_of_a_second_key_waits_for_one_slice_of_the_first() -> None:
    scheduler = new_scheduler(max_slice=64)
    for number in range(200):
        scheduler.add(group(33, f"many{number}", "many"))
    carry_out(scheduler, scheduler.plan(0), joins=False)
    scheduler.add(group(33, "few", "few"))
    order: list[str] = []
    for _ in range(4):
        plan = scheduler.plan(0)
        order.append(slice_of(scheduler, plan)[0].request.request_id)
        carry_out(scheduler, plan, joins=False)
    assert order == ["few", "many1", "many2", "many3"]


def test_slices_of_two_keys_alternate_however_long_their_prompts_are() -> None:
    scheduler = new_scheduler(max_slice=64)
    scheduler.add(group(641, "long", "a"))
    scheduler.add(group(193, "short", "b"))
    order: list[str] = []
    while scheduler.waiting:
        plan = scheduler.plan(0)
        order.append(slice_of(scheduler, plan)[0].request.request_id)
        carry_out(scheduler, plan, joins=False)
    assert order == 3 * ["long", "short"] + 7 * ["long"]


def test_prompts_of_about_the_same_length_take_turns_by_conversation() -> None:
    scheduler = new_scheduler(max_slice=64)
    for number in range(3):
        scheduler.add(group(40 + number, f"swarm{number}", "a", "swarm"))
    scheduler.add(group(50, "talk", "a", "talk"))
    order: list[str] = []
    while scheduler.waiting:
        plan = scheduler.plan(0)
        order.append(slice_of(scheduler, plan)[0].request.request_id)
        carry_out(scheduler, plan, joins=False)
    assert order == ["swarm0", "talk", "swarm1", "swarm2"]


def test_the_next_free_row_is_that_of_the_key_that_had_none() -> None:
    scheduler = new_scheduler(max_batch=1)
    groups = [group(10, "a1", "a"), group(10, "a2", "a"), group(10, "b", "b")]
    for one in groups:
        scheduler.add(one)
        scheduler.on_computed(one)
    joined: list[str] = []
    for _ in range(3):
        (choice,) = scheduler.plan(0).joining
        joined.append(choice.group.request.request_id)
    assert joined == ["a1", "b", "a2"]


def test_tiny_prompts_of_one_key_begin_to_decode_together_while_nobody_waits_for_a_step() -> None:
    scheduler = new_scheduler()
    for number in range(5):
        scheduler.add(group(33, f"many{number}", "many"))
    scheduler.on_decode(0.05)  # so long a step takes: computed prompts wait for twice as long
    for _ in range(3):
        plan = scheduler.plan(0)
        assert (plan.joining, plan.num_running) == ((), 0)
        carry_out(scheduler, plan, seconds=0.06)
    plan = scheduler.plan(0)
    assert [one.group.request.request_id for one in plan.joining] == ["many0", "many1", "many2"]
    assert slice_of(scheduler, plan)[0].request.request_id == "many3"


def test_nobody_waits_for_the_tiny_prompts_of_another_key_or_for_longer_ones() -> None:
    for other in (group(33, "other", "b"), group(66, "longer", "a")):
        scheduler = new_scheduler()
        scheduler.add(group(33, "first", "a"))
        scheduler.on_decode(0.05)
        carry_out(scheduler, scheduler.plan(0), seconds=0.01)
        scheduler.add(other)
        (choice,) = scheduler.plan(0).joining
        assert choice.group.request.request_id == "first"
