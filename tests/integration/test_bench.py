"""`hearth bench`: one small round of Hearth with itself, and a server that answers wrongly."""

from __future__ import annotations

import argparse
import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import msgspec
import psutil
import pytest

from api.bench.command import measure, run
from api.bench.figures import said
from api.bench.peers import lay_out
from api.bench.recipes import RecipeError
from api.bench.report import Report, markdown
from api.cli.arguments import add_bench_arguments
from api.cli.errors import Misused
from ops.bench.peers import BEGIN, END, with_table
from runtime.config.settings import Settings
from runtime.embedded import HEARTH_TINY
from tests.running_server import running
from tests.waiting import PATIENCE_S, until

OVER_HTTP = {"cold", "retry", "follow-up", "sibling", "mid-edit", "1 stream", "2 streams"}


def arguments_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_bench_arguments(parser)
    few = ("--tokens", "600", "--streams", "2", "--rounds", "1")
    return parser.parse_args([*few, *words])


class Stubborn(BaseHTTPRequestHandler):
    """Whatever it is asked, it says the same."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        for text in ("I do", " not know."):
            event = {"choices": [{"delta": {"content": text}}]}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        usage = {"prompt_tokens": 9, "completion_tokens": 2}
        self.wfile.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


@pytest.fixture(scope="module")
def stubborn() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Stubborn) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Ended(NamedTuple):
    """What `hearth bench` printed, wrote, and left as its exit code."""

    report: Report
    page: str
    printed: str
    code: int


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, stubborn: str) -> Ended:
    """A Hearth that runs already, and a server that is always wrong."""
    out, printed = tmp_path_factory.mktemp("out"), io.StringIO()
    with running(tmp_path_factory.mktemp("home")) as server, redirect_stdout(printed):
        words = (server.url, stubborn, "--model", "hearth-tiny", "--baseline", stubborn)
        arguments = arguments_of(*words, "--out", str(out))
        arguments.as_json = False
        code = run(Settings(home=out), arguments)
    report = msgspec.json.decode((out / "report.json").read_bytes(), type=Report)
    return Ended(report, (out / "report.html").read_text(), printed.getvalue(), code)


@pytest.fixture
def report(ended: Ended) -> Report:
    return ended.report


def rows_of(report: Report, number: int) -> dict[str, str]:
    peer = report.peers[number].name
    return {row.title: said(row) for row in report.rows if row.peer == peer}


def test_right_answers_are_timed(report: Report) -> None:
    rows = rows_of(report, 0)
    assert rows.keys() >= OVER_HTTP
    assert not [text for text in rows.values() if "WRONG" in text or "failed" in text]
    retry = next(one for one in report.rounds[0].samples if one.scenario == "retry")
    assert retry.cached_tokens >= retry.prompt_tokens - 32


def test_wrong_answers_are_said_to_be_wrong_and_not_timed(ended: Ended) -> None:
    report = ended.report
    rows = rows_of(report, 1)
    assert rows.keys() >= OVER_HTTP
    assert set(rows.values()) == {"1 WRONG"}
    assert "1 WRONG" in ended.printed
    assert ended.code == 1
    assert all(row.times_better is None for row in report.rows)


def test_answers_of_random_weights_are_timed_and_not_judged(stubborn: str) -> None:
    report = measure(arguments_of(stubborn, "--random-weights"), "a test")
    rows = rows_of(report, 0)
    assert rows.keys() >= OVER_HTTP
    assert not [text for text in rows.values() if "WRONG" in text]
    assert not report.texts_judged
    assert "random weights: texts were not judged" in markdown(report)
    arguments = arguments_of("agents", stubborn, "--random-weights")
    arguments.tokens = arguments.streams = None
    with pytest.raises(Misused, match="--random-weights is a flag"):
        measure(arguments, "a test")


def test_the_second_model_is_one_that_has_to_be_swapped_to(tmp_path: Path) -> None:
    """It is no link to the first: a server that looks where its files are would swap nothing."""
    models = lay_out(tmp_path, str(HEARTH_TINY), None)
    first, second = (tmp_path / name for name in (models.first, models.second))
    assert first.resolve() == HEARTH_TINY.resolve()
    assert second.resolve() == second
    names = {file.name for file in HEARTH_TINY.iterdir()}
    assert {file.name for file in second.iterdir()} == names
    assert all((second / name).read_bytes() == (first / name).read_bytes() for name in names)
    assert lay_out(tmp_path / "hub", "some/model", None)[1:] == ("some/model", "some/model")


def test_what_needs_a_restart_is_not_asked_of_a_server_that_runs_already(report: Report) -> None:
    assert not {"restart", "kill -9", "swap", "back"} & rows_of(report, 0).keys()


def test_the_page_loads_nothing(ended: Ended) -> None:
    assert "/*DATA*/" not in ended.page
    assert "http" not in ended.page.partition("<script id")[0]
    assert all(f'"{one.name}"' in ended.page for one in ended.report.peers)


def test_the_table_takes_the_place_of_the_one_before(report: Report) -> None:
    text = with_table(f"before\n{BEGIN}\nOLD TABLE\n{END}\nafter", markdown(report))
    assert "OLD TABLE" not in text
    assert text.startswith("before\n")
    assert "**cold**" in text
    with pytest.raises(ValueError, match="no place"):
        with_table("no marks", "")


def test_no_round_begins_when_the_time_is_up(stubborn: str) -> None:
    report = measure(arguments_of(stubborn, "--minutes", "0.00001"), "a test")
    assert (report.rounds, report.rows, report.num_rounds) == ([], [], 0)


def test_what_is_known_is_written_after_every_server(tmp_path: Path, stubborn: str) -> None:
    (tmp_path / "absent.toml").write_text(INSTALLED.replace("COMMAND", '["true"]'))
    words = (stubborn, str(tmp_path / "absent.toml"), "--out", str(tmp_path / "out"))
    measure(arguments_of(*words), "a test")
    report = msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes(), type=Report)
    assert [one.peer for one in report.rounds] == [stubborn, "mine"]
    assert "cannot be started" in (report.rounds[1].samples[0].failure or "")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_servers_are_started_swapped_killed_and_restarted() -> None:
    """The recipes that need nothing but Hearth's own environment."""
    report = measure(arguments_of(), "a test")
    for number in range(2):
        rows = rows_of(report, number)
        assert rows.keys() >= {"swap", "back", "kill -9", "restart", "beside: gap"}
        assert not [text for text in rows.values() if "WRONG" in text or "failed" in text]
    killed = [one for one in report.rounds[0].samples if one.scenario == "kill"]
    assert killed[0].cached_tokens > killed[0].prompt_tokens / 2


@pytest.mark.parametrize("kind", [["agents", "hearth"], ["hearth"]])
async def test_a_run_that_is_asked_to_end_takes_its_server_with_it(kind: list[str]) -> None:
    command = [sys.executable, "-m", "api", "bench", *kind, "--model", "hearth-tiny"]
    with subprocess.Popen(  # noqa: ASYNC220
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as measuring:
        this = psutil.Process(measuring.pid)
        await until(lambda: len(this.children(recursive=True)) > 1, "a server with a worker")
        started = this.children(recursive=True)
        measuring.terminate()
        assert measuring.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert psutil.wait_procs(started, timeout=10)[1] == []


def test_a_server_without_a_recipe_is_named() -> None:
    with pytest.raises(Exception, match="no recipe nobody"):
        measure(arguments_of("nobody"), "a test")


INSTALLED = """
name = "mine"
title = "one that has to be installed first"
tried = "in a test"
start = ["{venv}/bin/serve"]
url = "http://127.0.0.1:{port}/v1"
install = [["{python}", "-m", "venv", "--without-pip", "{venv}"], COMMAND]
"""


def test_what_is_installed_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    recipe, venv = tmp_path / "mine.toml", tmp_path / "venvs" / "mine"
    words = (str(recipe), "--venvs", str(tmp_path / "venvs"))
    recipe.write_text(INSTALLED.replace("COMMAND", '["false"]'))
    with pytest.raises(RecipeError, match="--install installs it"):
        measure(arguments_of(*words), "a test")
    for command in ('["false"]', '["no-such-program"]'):
        recipe.write_text(INSTALLED.replace("COMMAND", command))
        with pytest.raises(RecipeError, match="mine cannot be installed"):
            measure(arguments_of(*words, "--install"), "a test")
        assert not venv.exists()
    recipe.write_text(INSTALLED.replace("COMMAND", '["true"]'))
    with pytest.raises(RecipeError, match="cannot be started"):
        measure(arguments_of(*words, "--install"), "a test")
    assert (venv / "bin" / "python").exists()
