"""What the count of hops counts: the way of a request and of a token, and nothing besides."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from ops.bench.hops import Called, hops, parts

LOOP, MLX = 1, 2
LINK, GENERATION = "runtime/supervisor/worker_link.py", "runtime/supervisor/generation.py"
ENGINE = "runtime/worker/engine.py"


def request(ticks: Iterator[int], num_tokens: int) -> tuple[list[Called], list[Called]]:
    """What the server and the worker call for one request: one of both for each token."""
    server = [
        Called(next(ticks), LOOP, "api/openai/chat.py", "chat_completions"),
        Called(next(ticks), LOOP, LINK, "WorkerConnection.send"),
    ]
    worker = [
        Called(next(ticks), 3, "runtime/worker/input/intake.py", "Intake.admit"),
        Called(next(ticks), MLX, ENGINE, "Engine._receive"),
    ]
    for _ in range(num_tokens):
        worker.append(Called(next(ticks), MLX, ENGINE, "Engine._on_token"))
        worker.append(Called(next(ticks), MLX, "runtime/worker/decode.py", "Decoder.step"))
        server.append(Called(next(ticks), LOOP, GENERATION, "Generation.push"))
        server.append(Called(next(ticks), LOOP, LINK, "WorkerConnection.data_received"))
    return server, worker


def test_a_request_is_counted_up_to_the_frame_and_up_to_the_engine():
    found = hops(parts(*request(count(), 8), asked_ns=0, until_ns=1000))
    assert (found.to_the_frame.calls, found.to_the_frame.files) == (2, 2)
    assert (found.to_the_engine.calls, found.to_the_engine.files) == (2, 2)
    assert found.request_files == 4


def test_a_token_is_what_each_of_them_comes_with():
    found = hops(parts(*request(count(), 8), asked_ns=0, until_ns=1000))
    assert (found.token_in_worker.calls, found.token_in_worker.files) == (2.0, 2)
    assert (found.token_in_server.calls, found.token_in_server.files) == (2.0, 2)
    assert found.token_files == 4


def test_timers_and_other_threads_are_no_tokens():
    server, worker = request(count(), 8)
    at_ns = server[-1].at_ns
    server.append(Called(at_ns, LOOP, "runtime/supervisor/health.py", "Watchdog.beat"))
    server += [Called(at_ns, 9, "store/database.py", "Database.write")] * 8
    found = hops(parts(sorted(server), worker, asked_ns=0, until_ns=1000))
    assert (found.token_in_server.calls, found.token_in_server.files) == (2.0, 2)


def test_another_request_counts_nothing():
    ticks = count()
    (first, first_worker), (second, second_worker) = request(ticks, 8), request(ticks, 8)
    both = [*first, *second], [*first_worker, *second_worker]
    alone = hops(parts(first, first_worker, asked_ns=0, until_ns=1000))
    assert hops(parts(*both, asked_ns=0, until_ns=second[0].at_ns)) == alone
    assert hops(parts(*both, asked_ns=second[0].at_ns, until_ns=1000)) == alone
