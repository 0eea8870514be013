"""Whole agents, as their users install them: exactly the requests that their turns need, each of
which finds the one before in the cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.programs import (
    PI_APIS,
    asked_since,
    check_cached,
    claude_program,
    claude_turn,
    codex_home,
    codex_program,
    codex_turn,
    pi_home,
    pi_program,
    pi_turn,
    requests_of,
)
from tests.running_server import RunningServer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("provider", PI_APIS)
def test_pi_asks_once_for_each_turn_and_keeps_its_cache(
    tiny_server: RunningServer, tmp_path: Path, provider: str
) -> None:
    pi = pi_program()
    home = pi_home(tmp_path, tiny_server.url)
    num_before = len(requests_of(tiny_server))
    num_answers = pi_turn(pi, home, provider, "-p", "Say hello.")
    num_answers += pi_turn(pi, home, provider, "-c", "-p", "And once more, please.")
    asked = asked_since(tiny_server, num_before, num_answers)
    assert len(asked) == num_answers
    check_cached(asked)


def test_codex_asks_through_responses_and_keeps_its_cache(
    tiny_server: RunningServer, tmp_path: Path
) -> None:
    codex = codex_program()
    codex_home(tmp_path, tiny_server.url)
    num_before = len(requests_of(tiny_server))
    num_items = codex_turn(codex, tmp_path, "Say hello.")
    num_items += codex_turn(codex, tmp_path, "resume", "--last", "And once more, please.")
    asked = asked_since(tiny_server, num_before, 2)
    assert {one.path for one in asked} == {"/v1/responses"}
    assert 2 <= len(asked) <= num_items
    check_cached(asked)


def test_claude_code_never_repeats_a_request_and_keeps_its_cache(
    tiny_server: RunningServer, tmp_path: Path
) -> None:
    claude = claude_program()
    num_before = len(requests_of(tiny_server))
    num_turns = claude_turn(claude, tmp_path, tiny_server.url, "-p", "Say hello.")
    num_turns += claude_turn(claude, tmp_path, tiny_server.url, "--continue", "-p", "Once more.")
    asked = asked_since(tiny_server, num_before, num_turns)
    assert {one.path for one in asked} == {"/v1/messages"}
    # Whatever it does not understand in a stream it asks for again without one.
    assert len(asked) == num_turns
    check_cached(asked)
