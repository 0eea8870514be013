"""opencode as its users install it, over each of the three protocols that it speaks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.clients.programs import (
    CONTEXT,
    OPENCODE_APIS,
    RECOMPUTED,
    asked_since,
    opencode_home,
    opencode_program,
    opencode_turn,
    requests_of,
)
from tests.running_server import RunningServer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("protocol", OPENCODE_APIS)
def test_opencode_asks_once_for_each_step_and_keeps_its_cache(
    tiny_server: RunningServer, tmp_path: Path, protocol: str
) -> None:
    opencode = opencode_program()
    home = opencode_home(tmp_path, tiny_server.url, protocol)
    num_before = len(requests_of(tiny_server))
    num_steps = opencode_turn(opencode, home, "Say hello.")
    num_steps += opencode_turn(opencode, home, "-c", "And once more, please.")
    asked = asked_since(tiny_server, num_before, num_steps + 1)
    assert {(one.path, one.status) for one in asked} == {(OPENCODE_APIS[protocol][1], 200)}
    # Whatever it misses in an answer it asks for for ever; a session also asks for its title.
    assert len(asked) == num_steps + 1
    main = [one for one in asked if one.prompt > CONTEXT // 8]
    assert len(main) == num_steps
    for before, after in pairwise(main):
        assert after.cached >= before.prompt - RECOMPUTED, (before, after)
