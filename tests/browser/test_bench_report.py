"""The benchmark's page in a real browser: from a file, without a network, on a phone and a desk."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import pytest
from playwright.sync_api import ViewportSize, sync_playwright

from api.bench.agents.figures import agents_rows
from api.bench.agents.replay import ServerRun, TurnRecord
from api.bench.agents.report import AgentsReport, NotRun, agents_page
from api.bench.agents.traffic import Shape, facts, traffic
from api.bench.machine import environment
from api.bench.report import PeerNote, Report, page
from tests.browser.chromium import CHROMIUM, needs_chromium
from tests.running_server import ROOT

AXE = Path(__file__).parent / "axe" / "axe.min.js"
LOOKS: list[tuple[int, Literal["dark", "light"]]] = [(390, "dark"), (1200, "light")]

pytestmark = needs_chromium


class Looks(NamedTuple):
    """A page as a browser shows it."""

    num_rows: int
    num_plots: int
    wrong: str
    width: int
    hard_to_use: list[str]
    complaints: list[str]


@pytest.fixture(scope="module")
def report() -> Report:
    """The one in the documentation, with an answer that was wrong."""
    content = (ROOT / "docs" / "bench" / "report.json").read_bytes()
    report = msgspec.json.decode(content, type=Report)
    wrong = report.rounds[0].samples[0]
    wrong.is_right, wrong.said = False, "</script><b>elsewhere</b>"
    return report


@pytest.fixture(scope="module")
def agents_report() -> AgentsReport:
    """Two servers, one of which does not tell what it reused; a failed turn; a server not run."""
    shape = Shape(seed=1, num_sessions=2, median_turns=6, scale=0.01, pause_scale=0.0)
    sessions = traffic(shape)
    runs = [ServerRun("teller", 0, wall_s=9.0), ServerRun("mute", 0, wall_s=12.0)]
    for run, cached in zip(runs, (80, None), strict=True):
        run.turns = [
            TurnRecord(one.name, turn, float(turn), 40.0 + turn, turn + 0.5, 100, cached, 5)
            for session in sessions
            for one in session.family()
            for turn in range(len(one.turns))
        ]
    runs[0].turns[0].failure = "</script><b>elsewhere</b>"
    return AgentsReport(
        command="hearth bench agents",
        made_at="2026-11-24T12:00:00+00:00",
        environment=environment(),
        model="hearth-tiny",
        second="a copy of it",
        seed=1,
        scale=shape.scale,
        pause_scale=shape.pause_scale,
        num_at_once=2,
        num_rounds=1,
        restart_at=None,
        swap_at=None,
        characters_per_token=4.0,
        traffic=facts(shape, sessions),
        seconds=21.0,
        is_whole=True,
        baseline="mute",
        peers=[PeerNote(name, "a server", "here", []) for name in ("teller", "mute", "absent")],
        not_run=[NotRun("absent", "no such file")],
        rows=agents_rows(runs, "mute"),
        runs=runs,
    )


def look_at(text: str, file: Path, width: int, scheme: Literal["dark", "light"]) -> Looks:
    """What a reader of the page gets to see, and what the browser complains of."""
    file.write_text(text)
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--no-proxy-server"]
        )
        view = browser.new_page(viewport=ViewportSize(width=width, height=900), color_scheme=scheme)
        view.on("console", lambda one: complaints.append(one.text))
        view.on("pageerror", lambda error: complaints.append(str(error)))
        view.route("http*://**", lambda route: complaints.append(route.request.url))
        view.goto(file.as_uri())
        view.add_script_tag(path=str(AXE))
        found = view.evaluate("axe.run()")["violations"]
        seen = Looks(
            num_rows=view.locator("#figures tbody tr").count(),
            num_plots=view.locator("canvas").count(),
            wrong=view.locator("#wrong").inner_text(),
            width=view.evaluate("document.documentElement.scrollWidth"),
            hard_to_use=[one["id"] for one in found if one["impact"] in ("serious", "critical")],
            complaints=complaints,
        )
        browser.close()
    return seen


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_report_can_be_read(
    report: Report, tmp_path: Path, width: int, scheme: Literal["dark", "light"]
) -> None:
    seen = look_at(page(report), tmp_path / "report.html", width, scheme)
    assert seen.num_rows == len({row.title for row in report.rows})
    assert seen.num_plots == 2
    assert "</script><b>elsewhere</b>" in seen.wrong
    assert (seen.width, seen.hard_to_use, seen.complaints) == (width, [], [])


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_report_of_agents_can_be_read(
    agents_report: AgentsReport, tmp_path: Path, width: int, scheme: Literal["dark", "light"]
) -> None:
    seen = look_at(agents_page(agents_report), tmp_path / "agents.html", width, scheme)
    assert seen.num_rows == len({row.title for row in agents_report.rows})
    assert seen.num_plots == 3
    assert "</script><b>elsewhere</b>" in seen.wrong
    assert "absent was not run: no such file" in seen.wrong
    assert (seen.width, seen.hard_to_use, seen.complaints) == (width, [], [])
