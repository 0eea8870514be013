"""The dashboard behind keys, in a real browser: signing in, out, and what ends a session."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from runtime.keys import digest_of, read_admin_token
from tests.browser.chromium import CHROMIUM, needs_chromium
from tests.running_server import RunningServer, running

AXE = Path(__file__).parent / "axe" / "axe.min.js"
PATIENCE_MS = 15_000
ALICE, ADMIN, NEXT = "alice-key", "the-admin-key", "the-next-admin-key"

pytestmark = needs_chromium


def config(admin: str) -> str:
    keys = f'[api_keys]\nalice = "{digest_of(ALICE)}"\n'
    return f'preload = []\nprewarm = false\nadmin_key = "{digest_of(admin)}"\n{keys}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(tmp_path_factory.mktemp("keyed"), config=config(ADMIN)) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--no-proxy-server"]
        )
        yield browser
        browser.close()


@contextmanager
def visiting(browser: Browser, *, has_scripts: bool = True) -> Generator[Page]:
    with browser.new_context(java_script_enabled=has_scripts) as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        yield page


def give(page: Page, key: str) -> None:
    page.get_by_label("Admin key").fill(key)
    page.get_by_role("button", name="Sign in").click()


def signed_in(page: Page, server: RunningServer, key: str = ADMIN) -> Page:
    page.goto(server.url)
    give(page, key)
    expect(page.locator("#connection")).to_have_text("Live", timeout=PATIENCE_MS)
    return page


def cookie_of(context: BrowserContext) -> str:
    (cookie,) = context.cookies()
    return f"{cookie['name']}={cookie['value']}"  # pyright: ignore[reportTypedDictNotRequiredAccess]


def test_the_dashboard_opens_with_the_admin_key_and_works(browser: Browser, server: RunningServer):
    with visiting(browser) as page:
        page.goto(f"{server.url}/")
        assert page.url.startswith(f"{server.url}/sign-in?")
        assert page.evaluate("document.activeElement.id") == "key"
        give(page, ADMIN)
        expect(page.locator("#connection")).to_have_text("Live", timeout=PATIENCE_MS)
        assert page.url == f"{server.url}/"
        line = page.locator('#models tr[data-id="hearth-tiny"]')
        line.get_by_role("button", name="Load").click()
        line.get_by_role("button", name="Load?").click()
        expect(line).to_contain_text("ready", timeout=60_000)
        page.get_by_label("Message").fill("Hello!")
        page.get_by_role("button", name="Send").click()
        note = page.locator("#chat-log article:nth-child(even) .note")
        expect(note).to_contain_text("prompt tokens", timeout=PATIENCE_MS)


def test_the_cookie_is_for_the_browser_alone_and_is_not_the_key(
    browser: Browser, server: RunningServer
):
    token = read_admin_token(server.home)
    assert token is not None
    with visiting(browser) as page:
        signed_in(page, server, token)  # which the server left for programs on this machine
        (cookie,) = page.context.cookies()
        assert cookie.get("httpOnly") is True
        assert cookie.get("sameSite") == "Strict"
        assert cookie.get("expires", 0) > 0
        assert token not in str(cookie)
        assert page.evaluate("document.cookie") == ""


def test_a_key_that_is_not_the_operators_opens_nothing(browser: Browser, server: RunningServer):
    with visiting(browser) as page:
        page.goto(f"{server.url}/metrics")
        for key, why in (
            ("guess", "not known"),
            (ALICE, "tenant"),
            (digest_of(ADMIN), "not known"),
        ):
            give(page, key)
            expect(page.get_by_role("alert")).to_contain_text(why)
            assert page.context.cookies() == []
            assert page.get_by_label("Admin key").input_value() == ""
        give(page, ADMIN)
        expect(page.locator("body")).to_contain_text("hearth_requests_total")
        assert page.url == f"{server.url}/metrics"


def test_signing_out_ends_the_session_for_whoever_has_its_cookie(
    browser: Browser, server: RunningServer
):
    with visiting(browser) as page:
        signed_in(page, server)
        copied = cookie_of(page.context)
        assert figures(server, copied) == 200
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Admin key")).to_be_visible()
        assert page.context.cookies() == []
        assert figures(server, copied) == 401
        page.goto(server.url)
        expect(page.get_by_label("Admin key")).to_be_visible()


def figures(server: RunningServer, cookie: str) -> int:
    return server.request("GET", "/admin/dashboard", headers={"cookie": cookie}).status_code


def test_a_withdrawn_key_ends_what_was_opened_with_it(browser: Browser, tmp_path: Path):
    with visiting(browser) as page:
        with running(tmp_path, config=config(ADMIN)) as server:
            signed_in(page, server)
            cookie, port = cookie_of(page.context), server.port
        with running(tmp_path, config=config(NEXT), HEARTH_PORT=str(port)) as server:
            page.goto(f"http://127.0.0.1:{port}/")
            give(page, ADMIN)
            expect(page.get_by_role("alert")).to_contain_text("not known")
            asked = page.request.get(f"http://127.0.0.1:{port}/admin/dashboard")
            assert asked.status == 401
            asked = page.request.get(
                f"http://127.0.0.1:{port}/admin/dashboard", headers={"cookie": cookie}
            )
            assert asked.status == 401
            give(page, NEXT)
            expect(page.locator("#connection")).to_have_text("Live", timeout=PATIENCE_MS)


def test_a_page_that_is_open_says_that_its_session_is_over(browser: Browser, server: RunningServer):
    with visiting(browser) as page:
        signed_in(page, server)
        token = page.locator('meta[name="page-token"]').get_attribute("content") or ""
        headers = {"cookie": cookie_of(page.context), "x-hearth-page-token": token}
        headers["origin"] = server.url
        assert server.request("POST", "/sign-out", headers=headers).status_code == 204
        expect(page.locator("#connection")).to_contain_text("sign in", timeout=PATIENCE_MS)


@contextmanager
def served(folder: Path, page: str) -> Generator[str]:
    """The address of another server on this machine, which has this page."""
    (folder / "index.html").write_text(f"<!doctype html><title>Elsewhere</title>{page}")
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{other.server_port}/"
        other.shutdown()
        thread.join()


def test_a_page_of_another_server_on_this_machine_cannot_act(
    browser: Browser, server: RunningServer, tmp_path: Path
):
    """To a browser it is the same site, so that the cookie is sent."""
    url = f"{server.url}/admin/models/hearth-tiny/restart"
    form = f'<form method="post" action="{url}"><button>Win a prize</button></form>'
    with visiting(browser) as page, served(tmp_path, form) as other:
        signed_in(page, server)
        page.goto(other)
        with page.expect_navigation(url=url) as arrival:
            page.get_by_role("button").click()
        answer = arrival.value
        assert "hearth_session_" in answer.request.all_headers().get("cookie", "")
        assert answer.status == 403


def test_it_works_without_scripts_and_axe_finds_nothing_serious(
    browser: Browser, server: RunningServer
):
    with visiting(browser, has_scripts=False) as page:
        page.goto(server.url)
        give(page, "guess")
        expect(page.get_by_role("alert")).to_contain_text("not known")
        give(page, ADMIN)
        expect(page.get_by_role("heading", name="Models", exact=True)).to_be_visible()
    for scheme in ("dark", "light"):
        with browser.new_context(color_scheme=scheme) as context:
            page = context.new_page()
            page.goto(server.url)
            give(page, "guess")
            expect(page.get_by_role("alert")).to_contain_text("not known")
            assert page.evaluate("document.documentElement.dataset.theme") == scheme
            page.evaluate(AXE.read_text())
            found = page.evaluate("axe.run()")
            assert len(found["passes"]) > 10
            bad = [one["id"] for one in found["violations"]]
            assert bad == []
