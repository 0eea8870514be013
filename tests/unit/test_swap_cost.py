"""What a swap took, part by part."""

from runtime.supervisor.lifecycle import ModelEvent, ModelState, Transition
from runtime.supervisor.swap_cost import LeaveCost, StartCost, SwapCost, SwapCosts
from runtime.supervisor.worker_clock import WorkerClock


def step(before: ModelState, event: ModelEvent, after: ModelState, at_s: float) -> Transition:
    return Transition(model="m", before=before, event=event, after=after, at_s=at_s)


def test_a_start_is_split_where_the_process_is_up_and_knows_what_to_load():
    clock = WorkerClock()
    clock.began(10.0)
    clock.sent_load(10.5)
    clock.said_hello(12.0)
    clock.read_weights(15.0)
    clock.became_ready(15.25)
    assert clock.start_cost == StartCost(spawn_ms=2000.0, load_ms=3000.0, warm_ms=250.0)
    assert clock.start_cost.total_ms == 5250.0


def test_a_spare_costs_what_it_takes_to_tell_it_what_to_load():
    clock = WorkerClock()
    clock.began(10.0)
    clock.said_hello(10.0)
    clock.sent_load(10.5)
    clock.read_weights(11.0)
    assert clock.start_cost == StartCost(spawn_ms=500.0, load_ms=500.0)


def test_what_the_first_process_imports_for_all_is_no_part_of_what_a_model_costs():
    clock = WorkerClock(is_first=True)
    clock.began(10.0)
    clock.sent_load(10.5)
    clock.said_hello(12.0)
    clock.read_weights(15.0)
    clock.became_ready(15.25)
    assert clock.start_cost == StartCost(spawn_ms=0.0, load_ms=3000.0, warm_ms=250.0)


def test_an_end_is_split_at_the_flush():
    clock = WorkerClock()
    clock.asked_to_leave(10.0)
    clock.began_flush(11.0)
    clock.flushed(13.0)
    clock.exited(13.5)
    assert clock.leave_cost == LeaveCost(drain_ms=1000.0, flush_ms=2000.0, exit_ms=500.0)


def test_what_was_not_reached_costs_nothing():
    assert WorkerClock().start_cost == StartCost()
    killed = WorkerClock()
    killed.exited(5.0)
    assert killed.leave_cost == LeaveCost()
    never_loaded = WorkerClock()
    never_loaded.asked_to_leave(5.0)
    never_loaded.exited(6.0)
    assert never_loaded.leave_cost == LeaveCost(exit_ms=1000.0)


def test_a_swap_is_the_last_leave_and_the_last_start_with_the_drain_seen_from_outside():
    costs = SwapCosts()
    assert costs.of("m") is None
    costs.started("m", StartCost(spawn_ms=1.0, load_ms=2.0, warm_ms=3.0))
    assert costs.of("m") == SwapCost(spawn_ms=1.0, load_ms=2.0, warm_ms=3.0)
    costs.observe(step("busy", "leave", "draining", 100.0))
    costs.observe(step("draining", "drained", "flushing", 100.5))
    costs.left("m", LeaveCost(drain_ms=4.0, flush_ms=5.0, exit_ms=6.0))
    swap = costs.of("m")
    assert swap == SwapCost(
        drain_ms=504.0, flush_ms=5.0, exit_ms=6.0, spawn_ms=1.0, load_ms=2.0, warm_ms=3.0
    )
    assert swap is not None
    assert swap.total_ms == 521.0


def test_an_idle_model_drains_nothing_and_an_opened_one_forgets_its_drain():
    costs = SwapCosts()
    costs.started("m", StartCost())
    costs.observe(step("busy", "leave", "draining", 50.0))
    costs.observe(step("draining", "lost", "crashed", 60.0))
    costs.observe(step("ready", "leave", "flushing", 100.0))
    costs.left("m", LeaveCost(flush_ms=5.0))
    swap = costs.of("m")
    assert swap is not None
    assert (swap.drain_ms, swap.flush_ms) == (0.0, 5.0)
