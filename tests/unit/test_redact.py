"""What clients say stays out of the log: a canary in every way a line can be written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import structlog

from api.observe.log_output import Format, configure_logging
from api.observe.redact import HIDDEN, hiding
from runtime.errors import InvalidRequest

CANARY = "zebra harbour 7351x9"
KEY = "hearth-Qk3vJ8sXw2LmN5pR7tY9uA1bC4dE6fG0"


class Said(msgspec.Struct):
    text: str


def fail_deeply() -> None:
    prompt = CANARY
    try:
        {}[prompt]
    except KeyError as error:
        raise ExceptionGroup(prompt, [ValueError(prompt), RuntimeError([prompt])]) from error


def by_exception(log: structlog.stdlib.BoundLogger) -> None:
    try:
        fail_deeply()
    except ExceptionGroup:
        log.exception("it failed", why="kept")


def by_exc_info(log: structlog.stdlib.BoundLogger) -> None:
    try:
        fail_deeply()
    except ExceptionGroup as error:
        log.error("it failed", exc_info=error, error=error)


def by_library(log: structlog.stdlib.BoundLogger) -> None:
    del log
    try:
        fail_deeply()
    except ExceptionGroup:
        logging.getLogger("asyncio").exception("it failed")
    logging.getLogger("asyncio").error("<Task exception=KeyError(%r)> it failed", CANARY)


def by_name(log: structlog.stdlib.BoundLogger) -> None:
    for name in ("prompt", "messages", "session_id", "token_ids", "headers"):
        log.debug("it failed", **{name: CANARY})
    log.debug("it failed", more={"text": CANARY, "many": [Said(CANARY), CANARY.encode()]})


def by_key(log: structlog.stdlib.BoundLogger) -> None:
    said = f"it failed with {KEY}"
    log.info(said, given=f"Bearer {CANARY.partition(' ')[0]}")
    with hiding([CANARY, ""]):
        said = f"it failed for {CANARY}"
        log.info(said, many=[f"<{CANARY}>"])


WAYS = [by_exception, by_exc_info, by_library, by_name, by_key]


@pytest.fixture
def restored():
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    structlog.reset_defaults()


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("log_format", ["json", "console"])
@pytest.mark.parametrize("way", WAYS)
def test_no_way_of_logging_lets_the_canary_out(
    way: Callable[[structlog.stdlib.BoundLogger], None], log_format: Format, tmp_path: Path
):
    path = tmp_path / "hearth.log"
    configure_logging("debug", log_format, path)
    way(structlog.stdlib.get_logger("hearth.test"))
    text = path.read_text()
    assert "it failed" in text
    assert not [word for word in (*CANARY.split(), KEY) if word in text], text


@pytest.mark.usefixtures("restored")
def test_what_helps_to_find_a_fault_stays(tmp_path: Path):
    path = tmp_path / "hearth.log"
    configure_logging("info", "json", path)
    log = structlog.stdlib.get_logger("hearth.test")
    by_exception(log)
    log.error("refused", exc_info=InvalidRequest("top_p must be at most 1.", "top_p"), prompt="x")
    first, second = (msgspec.json.decode(line) for line in path.read_text().splitlines())
    for part in ("KeyError", "fail_deeply", "ExceptionGroup", "ValueError", "RuntimeError"):
        assert part in first["exception"]
    assert (first["event"], first["why"]) == ("it failed", "kept")
    assert "top_p must be at most 1." in second["exception"]
    assert second["prompt"] == HIDDEN
