"""The benchmark's page in a real browser: from a file, without a network, on a phone and a desk."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import pytest
from playwright.sync_api import ViewportSize, expect, sync_playwright

from api.bench.report import Report, page
from tests.browser.chromium import CHROMIUM, needs_chromium
from tests.running_server import ROOT

AXE = Path(__file__).parent / "axe" / "axe.min.js"
LOOKS: list[tuple[int, Literal["dark", "light"]]] = [(390, "dark"), (1200, "light")]

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def report() -> Report:
    """The one in the documentation, with an answer that was wrong."""
    content = (ROOT / "docs" / "bench" / "report.json").read_bytes()
    report = msgspec.json.decode(content, type=Report)
    wrong = report.rounds[0].samples[0]
    wrong.is_right, wrong.said = False, "</script><b>elsewhere</b>"
    return report


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_report_can_be_read(
    report: Report, tmp_path: Path, width: int, scheme: Literal["dark", "light"]
) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(report))
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
        expect(view.locator("#figures tbody tr")).to_have_count(len({r.title for r in report.rows}))
        expect(view.locator("canvas")).to_have_count(2)
        expect(view.locator("#wrong")).to_contain_text("</script><b>elsewhere</b>")
        assert view.evaluate("document.documentElement.scrollWidth") == width
        view.add_script_tag(path=str(AXE))
        found = view.evaluate("axe.run()")["violations"]
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
        browser.close()
    assert complaints == []
