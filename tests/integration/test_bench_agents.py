"""`hearth bench agents`: a small replay against a Hearth that runs, and against worse servers."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import msgspec
import pytest

from api.bench.agents.replay import ServerRun
from api.bench.agents.report import AgentsReport
from api.bench.command import run
from api.cli.arguments import add_bench_arguments
from api.cli.errors import Misused
from runtime.config.settings import Settings
from tests.running_server import running

FEW = ("--sessions", "2", "--turns", "3", "--scale", "0.003", "--pause-scale", "0")


def is_second_turn(messages: list[dict[str, str]]) -> bool:
    return len(messages) == 4 and messages[3]["content"].startswith("Tool result:")


class Mute(BaseHTTPRequestHandler):
    """Fails second turns, tells nothing of its cache, and keeps what it was asked."""

    asked: list[list[dict[str, str]]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body["messages"])
        self.send_response(500 if is_second_turn(body["messages"]) else 200)
        self.end_headers()
        event = {"choices": [{"delta": {"content": "I do not know."}}]}
        usage = {"prompt_tokens": 9, "completion_tokens": 2}
        for one in (event, {"choices": [], "usage": usage}):
            self.wfile.write(b"data: " + json.dumps(one).encode() + b"\n\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


@pytest.fixture(scope="module")
def mute() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Mute) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def replayed(out: Path, *words: str) -> tuple[int, str]:
    """The exit code of `hearth bench agents`, and what it printed."""
    parser = argparse.ArgumentParser()
    add_bench_arguments(parser)
    arguments = parser.parse_args(["agents", *words, *FEW, "--out", str(out)])
    arguments.as_json = False
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = run(Settings(home=out), arguments)
    return code, printed.getvalue()


class Ended(NamedTuple):
    """What a replay printed, wrote, and left as its exit code."""

    report: AgentsReport
    out: Path
    printed: str
    code: int

    def run_of(self, number: int) -> ServerRun:
        return self.report.runs[number]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, mute: str) -> Ended:
    out = tmp_path_factory.mktemp("out")
    with running(tmp_path_factory.mktemp("home")) as server:
        code, printed = replayed(out, server.url, mute, "--model", "hearth-tiny")
    report = msgspec.json.decode((out / "agents.json").read_bytes(), type=AgentsReport)
    return Ended(report, out, printed, code)


def test_every_turn_is_asked_and_what_was_said_before_is_reused(ended: Ended) -> None:
    ours = ended.run_of(0)
    assert ended.report.is_whole
    assert len(ours.turns) == ended.report.traffic.num_turns
    assert not [one.failure for one in ours.turns if one.failure]
    assert {one.agent for one in ours.turns if one.is_sub_agent} == {"1.1", "1.2"}
    for agent in {one.agent for one in ours.turns}:
        first, *later = [one for one in ours.turns if one.agent == agent]
        before = first
        for one in later:
            assert one.cached_tokens is not None
            assert one.cached_tokens >= before.prompt_tokens - 32
            before = one


def test_a_sub_agent_begins_with_what_its_parent_was_told_first(ended: Ended) -> None:
    begun = [one for one in ended.run_of(0).turns if one.is_sub_agent and one.turn == 0]
    assert all((one.cached_tokens or 0) > 0 for one in begun)


def test_what_a_server_does_not_tell_is_not_made_up(ended: Ended) -> None:
    theirs = ended.run_of(1)
    rows = {row.title: row.value for row in ended.report.rows if row.peer == theirs.peer}
    assert rows["prefill computed"] is None
    assert "not told" in ended.printed
    assert not any(one.is_right for one in theirs.turns)
    assert {one.cached_tokens for one in theirs.turns} == {None}


def test_failures_are_counted_and_the_agent_goes_on(ended: Ended) -> None:
    theirs = ended.run_of(1)
    assert len(theirs.turns) == ended.report.traffic.num_turns
    assert {one.turn for one in theirs.turns if "500" in (one.failure or "")} == {1}
    assert ended.code == 1


def test_agents_share_a_beginning_and_get_back_what_the_server_said(ended: Ended) -> None:
    asked = [one for one in Mute.asked if len(one) > 1 and one[0]["role"] == "system"]
    assert len(asked) >= len(ended.run_of(1).turns)
    spoken = {one["content"] for messages in asked for one in messages[2::2]}
    assert spoken == {"I do not know.", "(no answer)"}
    assert len({messages[0]["content"] for messages in asked if len(messages) == 2}) == 1


def test_the_page_and_the_document_have_every_figure(ended: Ended) -> None:
    page = (ended.out / "agents.html").read_text()
    assert "/*DATA*/" not in page
    assert "http" not in page.partition("<script id")[0]
    document = (ended.out / "agents.md").read_text()
    for row in ended.report.rows:
        assert f"**{row.title}**" in document
        assert row.title in page
    assert sorted(one.name for one in ended.out.iterdir()) == [
        "agents.html",
        "agents.json",
        "agents.md",
    ]


def test_when_the_time_is_up_the_report_says_so(tmp_path: Path, mute: str) -> None:
    with pytest.raises(Exception, match="the time was up before its first turn"):
        replayed(tmp_path, mute, "--model", "hearth-tiny", "--minutes", "0.000001")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("agents", "--tokens", "4k"), "--tokens is a flag of `hearth bench` without `agents`"),
        (("--pause-scale", "1"), "--pause-scale is a flag of `hearth bench` with `agents`"),
    ],
)
def test_flags_of_the_other_kind_are_refused(words: tuple[str, ...], message: str) -> None:
    parser = argparse.ArgumentParser()
    add_bench_arguments(parser)
    with pytest.raises(Misused, match=message):
        run(Settings(home=Path()), parser.parse_args(words))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_server_is_restarted_and_swapped_in_the_middle(tmp_path: Path) -> None:
    code, _ = replayed(tmp_path, "hearth", "--restart-at", "0.4", "--swap-at", "0.7")
    report = msgspec.json.decode((tmp_path / "agents.json").read_bytes(), type=AgentsReport)
    (ours,) = report.runs
    assert code == 0
    assert ours.happened == ["restart", "swap"]
    assert len(ours.boots_s) == 2
    assert {one.after for one in ours.turns} == {None, "restart", "swap"}
    assert all((one.cached_tokens or 0) > 0 for one in ours.turns if one.after)
    assert (ours.peak_resident_bytes or 0) > 0
    assert (ours.cpu_s or 0) > 0
