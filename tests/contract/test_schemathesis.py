"""Whatever the schema allows, and what it does not, is answered; never with a server's error."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies

from tests.running_server import RunningServer, running

MODES = list(schemathesis.GenerationMode)
EXAMPLES = 8
KEPT_OUT = ("/admin/",)
"""Loading, stopping and deleting would leave nothing for the other examples; they have tests."""

BUSY = frozenset({503, 529})
"""Too much is asked at once, or in vain: a documented answer."""

CONFIG = """
max_wait_s = 5
request_deadline_s = 5
prewarm_share = 0
[models.hearth-tiny]
context = 512
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running(tmp_path_factory.mktemp("home"), config=CONFIG) as server:
        yield server


def refusals(operation: Any, statuses: Counter[int]) -> list[str]:
    """What of this operation is answered with a server's error, by examples of all kinds."""
    found: list[str] = []

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.large_base_example,
            HealthCheck.data_too_large,
        ],
    )
    @given(case=strategies.one_of(*(operation.as_strategy(generation_mode=m) for m in MODES)))
    def ask(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            # Any other name is a 404 whatever else is said.
            case.body |= {"model": "hearth-tiny", "max_tokens": 2, "max_output_tokens": 16}
        answer = case.call(timeout=30)
        statuses[answer.status_code // 100] += 1
        if answer.status_code >= 500 and answer.status_code not in BUSY:
            found.append(f"{answer.status_code} {case.as_curl_command()[:600]} {answer.text[:200]}")

    ask()
    return found


def test_nothing_that_is_sent_breaks_the_server(server: RunningServer):
    schema = schemathesis.openapi.from_url(f"{server.url}/schema/openapi.json")
    operations: list[Any] = [cast("Any", one).ok() for one in schema.get_all_operations()]
    asked = [one for one in operations if not one.path.startswith(KEPT_OUT)]
    assert len(asked) > 30
    statuses: Counter[int] = Counter()
    assert not [line for one in asked for line in refusals(one, statuses)]
    assert min(statuses[2], statuses[4]) > len(asked) / 2, "both kinds of answers were given"
    assert server.get("/health").status_code == 200
    assert "unexpected error" not in server.stderr


CHECKS = ("response_schema_conformance", "status_code_conformance", "content_type_conformance")
PHASES = ("examples", "coverage", "fuzzing", "stateful")


def test_every_answer_is_what_the_schema_says_of_it(server: RunningServer):
    """In all phases of schemathesis; that too much is asked at once is one of the answers."""
    options = {
        "--exclude-path-regex": f"^{KEPT_OUT[0]}",
        "--phases": ",".join(PHASES),
        "--checks": ",".join(CHECKS),
        "--max-examples": "3",
        "--seed": "1",
        "--request-timeout": "30",
        "--generation-database": "none",
        "--suppress-health-check": "all",
    }
    flags = [word for pair in options.items() for word in pair]
    program = [str(Path(sys.executable).with_name("schemathesis")), "run"]
    address = f"{server.url}/schema/openapi.json"
    ended = subprocess.run(
        [*program, address, *flags, "--no-color"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert "Coverage" in ended.stdout
    assert "Stateful" in ended.stdout
