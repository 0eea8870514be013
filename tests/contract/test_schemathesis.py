"""Whatever the schema allows, and what it does not, is answered; never with a server's error."""

from __future__ import annotations

import re
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
KEPT_OUT = ("/admin/events", "/admin/dashboard/events")
"""Streams without an end, which a client that reads answers whole would wait for."""

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
    asked = [one for one in operations if one.path not in KEPT_OUT]
    assert len(asked) == len(operations) - len(KEPT_OUT) > 80
    statuses: Counter[int] = Counter()
    assert not [line for one in asked for line in refusals(one, statuses)]
    assert min(statuses[2], statuses[4]) > len(asked) / 2, "both kinds of answers were given"
    assert server.get("/health").status_code == 200
    assert "unexpected error" not in server.stderr


CHECKS = ("response_schema_conformance", "status_code_conformance", "content_type_conformance")
PHASES = ("examples", "fuzzing", "stateful")
LONG_PHASES = ("coverage",)
"""Every boundary of every field: seven minutes."""


@pytest.mark.parametrize(
    "phases",
    [PHASES, pytest.param(LONG_PHASES, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
)
def test_every_answer_is_what_the_schema_says_of_it(
    server: RunningServer, phases: tuple[str, ...]
) -> None:
    """That too much is asked at once is one of the answers."""
    options = {
        "--exclude-path-regex": f"^({'|'.join(KEPT_OUT)})$",
        "--phases": ",".join(phases),
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
    for phase in phases:
        assert re.search(rf"✅ +{phase.capitalize()} \(in ", ended.stdout), phase


def test_every_example_of_the_schema_is_answered(server: RunningServer):
    document = server.get("/schema/openapi.json").json()
    shown = [
        (method.upper(), path, media["example"])
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if isinstance(operation, dict)
        for media in operation.get("requestBody", {}).get("content", {}).values()
        if "example" in media
    ]
    assert len(shown) > 25
    agent = server.post("/v1/agents", {}).json()["id"]
    for method, path, example in shown:
        answer = server.request(method, path.replace("{agent_id}", agent), json=example)
        if "embeddings" in path:  # of a model that has none
            assert answer.json()["error"]["param"] == "model", answer.text
        else:
            assert answer.is_success, (path, answer.text)


def test_a_streamed_answer_is_of_a_type_that_the_schema_says(server: RunningServer):
    document = server.get("/schema/openapi.json").json()
    agent = server.post("/v1/agents", {}).json()["id"]
    kinds: Counter[str] = Counter()
    for path, item in document["paths"].items():
        body = item.get("post", {}).get("requestBody", {}).get("content", {})
        documented = item.get("post", {}).get("responses", {}).get("200", {}).get("content", {})
        if len(documented) > 1:
            example = body["application/json"]["example"] | {"stream": True}
            answer = server.post(path.replace("{agent_id}", agent), example)
            assert answer.is_success, (path, answer.text)
            kind = answer.headers["content-type"].partition(";")[0]
            assert kind in documented
            kinds[kind] += 1
    assert kinds == {"text/event-stream": 9, "application/x-ndjson": 2}


@pytest.mark.parametrize("path", KEPT_OUT)
def test_a_stream_without_an_end_is_of_the_type_that_the_schema_says(
    server: RunningServer, path: str
):
    document = server.get("/schema/openapi.json").json()
    (documented,) = document["paths"][path]["get"]["responses"]["200"]["content"]
    with server.stream("GET", path) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(documented)
        lines = answer.iter_lines()
        assert next(lines).startswith("event: ")
