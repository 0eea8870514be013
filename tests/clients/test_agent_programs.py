"""Whole agents, as their users install them: exactly the requests that their turns need, each of
which finds the one before in the cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.programs import (
    CONTEXT,
    PI_APIS,
    RECOMPUTED,
    ROOMY,
    SCRIPTED,
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
    scripted_config,
)
from tests.clients.scripted_model import Step
from tests.documents import blocks
from tests.running_server import RunningServer, running

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


def test_codex_compacts_near_the_full_window_from_what_is_cached(tmp_path: Path) -> None:
    """With the settings of its page; the words make a turn of a fifth of the window."""
    config = scripted_config(tmp_path / "models", [Step(says=f"Step {i}.") for i in range(4)])
    config = config.replace(f"context = {ROOMY}", f"context = {CONTEXT}")
    (page,) = (one.text for one in blocks("toml") if one.page.name == "codex.md")
    for given, ours in (
        ("http://127.0.0.1:8420", "{url}"),
        ('"qwen"', f'"{SCRIPTED}"'),
        ("= 65536 ", f"= {CONTEXT} "),
        ("= 49152 ", f"= {3 * CONTEXT // 4} "),
    ):
        assert given in page
        page = page.replace(given, ours)
    codex, home = codex_program(), tmp_path / "home"
    home.mkdir()
    with running(tmp_path / "server", config=config) as server:
        (home / "config.toml").write_text(page.replace("{url}", server.url))
        long = "rain falls on the hearth while the kettle hums "
        codex_turn(codex, home, "Say hello.")
        codex_turn(codex, home, "resume", "--last", long * 450)
        codex_turn(codex, home, "resume", "--last", long * 480)
        before = requests_of(server)[-1]
        codex_turn(codex, home, "resume", "--last", "Go on.")
        compaction = asked_since(server, 3, 2)[0]
    assert before.prompt > 0.89 * CONTEXT
    assert compaction.prompt > before.known
    assert compaction.cached >= before.known - RECOMPUTED


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
