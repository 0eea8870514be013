"""The gate of a replay, and what its turns add up to."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import msgspec
import pytest

from api.bench.agents.command import check_window
from api.bench.agents.figures import agents_rows, num_computed, percentile, shared_turns, spelled
from api.bench.agents.gate import MAX_FAILURES, Gate, Happening, ReplayEnded
from api.bench.agents.replay import ServerRun, TurnRecord
from api.bench.recipes import RecipeError
from tests.waiting import PATIENCE_S


def turn(agent: str, number: int, ttft_ms: float, **others: object) -> TurnRecord:
    sent = {"prompt_tokens": 100, "cached_tokens": 90, "output_tokens": 5} | others
    known = {"agent": agent, "turn": number, "sent_s": 0.0, "ttft_ms": ttft_ms}
    return msgspec.convert(known | sent, TurnRecord)


def test_nothing_runs_while_something_happens_and_all_is_counted():
    done: list[str] = []
    gate = Gate([Happening("restart", 2, lambda: done.append("restart"))], None)
    assert [gate.enter(), gate.enter()] == [0, 0]
    third = Thread(target=lambda: done.append(f"entered {gate.enter()}"))
    third.start()
    assert done == []
    gate.leave(is_answered=True)
    assert done == []
    gate.leave(is_answered=True)
    third.join(PATIENCE_S)
    assert done == ["restart", "entered 1"]
    assert gate.happened == ["restart"]


def test_two_things_happen_in_the_order_of_their_turns():
    done: list[str] = []
    late = Happening("swap", 1, lambda: done.append("swap"))
    early = Happening("restart", 0, lambda: done.append("restart"))
    gate = Gate([late, early], None)
    assert gate.enter() == 1
    gate.leave(is_answered=True)
    assert gate.enter() == 2
    assert done == ["restart", "swap"]


def test_no_turn_begins_after_the_deadline():
    gate = Gate([], 0.0)
    with pytest.raises(ReplayEnded, match="the time was up"):
        gate.enter()
    assert gate.ended == "the time was up"


def test_a_server_that_does_not_come_back_ends_the_replay():
    def fail() -> None:
        raise RecipeError("it ended: no memory")

    gate = Gate([Happening("restart", 0, fail)], None)
    with pytest.raises(ReplayEnded, match="restart: it ended: no memory"):
        gate.enter()
    assert gate.happened == []


def test_many_failures_in_a_row_end_the_replay_and_others_do_not():
    gate = Gate([], None)
    for number in range(2 * MAX_FAILURES):
        gate.enter()
        gate.leave(is_answered=number % 2 == 1)
    for _ in range(MAX_FAILURES):
        gate.enter()
        gate.leave(is_answered=False)
    with pytest.raises(ReplayEnded, match="turns in a row failed"):
        gate.enter()


def test_percentiles_are_values_that_were_measured():
    values = [float(one) for one in range(1, 201)]
    assert percentile(values, 0.5) == 100
    assert percentile(values, 0.99) == 198
    assert percentile(values, 1.0) == 200
    assert percentile([7.0], 0.5) == 7
    assert percentile([], 0.5) is None


def test_what_was_computed_is_not_told_if_one_answer_does_not_tell():
    assert num_computed([turn("1", 0, 5), turn("1", 1, 5, cached_tokens=0)]) == 110
    assert num_computed([turn("1", 0, 5), turn("1", 1, 5, cached_tokens=None)]) is None
    failed = turn("1", 1, 0, cached_tokens=None, prompt_tokens=0, failure="status 500")
    assert num_computed([turn("1", 0, 5), failed]) == 10
    assert num_computed([failed]) is None


def figures_of(runs: list[ServerRun], peer: str) -> dict[str, str]:
    return {row.title: spelled(row) for row in agents_rows(runs, "b") if row.peer == peer}


def test_servers_are_compared_over_the_turns_that_all_were_asked():
    whole = ServerRun("a", 0, wall_s=9.0, written_bytes=3 << 20)
    whole.turns = [turn("1", 0, 10), turn("1", 1, 20, is_right=True), turn("1.1", 0, 30)]
    whole.turns[2].is_sub_agent = True
    cut = ServerRun("b", 0, wall_s=4.0, written_bytes=1 << 20, ended_early="the time was up")
    cut.turns = [turn("1", 0, 40, cached_tokens=0), turn("1.1", 0, 90, is_sub_agent=True)]
    assert shared_turns([whole, cut]) == {("1", 0), ("1.1", 0)}
    a, b = figures_of([whole, cut], "a"), figures_of([whole, cut], "b")
    assert (a["turns"], b["turns"]) == ("2", "2")
    assert (a["prefill computed"], b["prefill computed"]) == ("20 tokens", "110 tokens")
    assert (a["share computed"], b["share computed"]) == ("10.0 %", "55.0 %")
    assert (a["first token, p50"], b["first token, p50"]) == ("10 ms", "40 ms")
    assert (a["sub-agents, p50"], b["sub-agents begin, p50"]) == ("30 ms", "90 ms")
    assert (a["wall time"], b["wall time"]) == ("9.0 s", "not told")
    assert (a["bytes written"], b["bytes written"]) == ("3 MiB", "not told")
    times = {row.title: row.times_better for row in agents_rows([whole, cut], "b")[::2]}
    assert times["first token, p50"] == 4
    assert times["prefill computed"] == 5.5
    assert times["turns"] is None


def test_rounds_are_compared_by_their_median_and_recalls_are_shares():
    runs = [ServerRun("a", number, wall_s=wall_s) for number, wall_s in enumerate((3.0, 9.0, 4.0))]
    for run in runs:
        run.turns = [turn("1", 0, 10, is_right=True), turn("2", 0, 10, is_right=False)]
    said = figures_of(runs, "a")
    assert said["wall time"] == "4.0 s"
    assert said["recalled"] == "50.0 %"
    assert said["failed"] == "0"
    assert "after a restart, p50" not in said


def test_a_run_that_is_not_over_has_no_figures_of_a_whole_one():
    run = ServerRun("a", 0, cpu_s=3.0, written_bytes=5)
    run.turns = [turn("1", 0, 10)]
    said = figures_of([run], "a")
    assert said["turns"] == "1"
    assert not {"wall time", "CPU time", "bytes written"} & said.keys()


def test_a_prompt_longer_than_the_model_takes_is_refused_with_a_scale_that_fits(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 8000}}')
    check_window(tmp_path, 8000, 0.1)
    with pytest.raises(RecipeError, match=r"16,000 tokens.*takes 8,000. --scale 0.045 fits"):
        check_window(tmp_path, 16_000, 0.1)
    check_window(tmp_path / "no-directory", 16_000, 0.1)
