"""The dashboard in a real browser, over a real server: what people see and do there."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from tests.browser.chromium import CHROMIUM, needs_chromium
from tests.model_folders import make_model
from tests.running_server import CHAT, RunningServer, running

AXE = Path(__file__).parent / "axe" / "axe.min.js"
PATIENCE_MS = 60_000
WIDE = ViewportSize(width=1440, height=900)
PHONE = ViewportSize(width=390, height=844)
SYSTEM = {"role": "system", "content": "kettle " * 300}

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    home = tmp_path_factory.mktemp("seen")
    make_model(home / "models" / "another")
    with running(home, config='models_dir = "models"\ndefault_model = "hearth-tiny"') as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--no-proxy-server"]
        )
        yield browser
        browser.close()


@pytest.fixture
def complaints() -> list[str]:
    """What the browser's console says of errors; there must be nothing at the end."""
    return []


@pytest.fixture
def page(browser: Browser, server: RunningServer, complaints: list[str]) -> Iterator[Page]:
    with browser.new_context(viewport=WIDE, color_scheme="light") as context:
        page = opened(context.new_page(), server, complaints)
        yield page
    assert complaints == []


def opened(page: Page, server: RunningServer, complaints: list[str]) -> Page:
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", lambda one: complaints.append(one.text) if one.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(server.url)
    expect(page.locator("#connection")).to_have_text("Live", timeout=PATIENCE_MS)
    expect(page.locator("#models tr").first).to_contain_text("hearth-tiny", timeout=PATIENCE_MS)
    return page


def say(server: RunningServer, session: str) -> None:
    """It is listed afterwards, so that the next one that comes to be listed is another's."""
    messages = [SYSTEM, {"role": "user", "content": session}]
    body = {"model": "hearth-tiny", "messages": messages, "max_tokens": 4, "session_id": session}
    assert server.post(CHAT, body).status_code == 200
    query = {"conversation": session}
    while server.request("GET", "/admin/cache/chain", params=query).status_code != 200:
        pass


def named(server: RunningServer) -> list[Any]:
    """A slot is there a moment before the conversation that it belongs to."""
    found = server.get("/admin/dashboard/conversations").json()["conversations"]
    return [one for one in found if one["is_named"]]


def new_conversation(page: Page, server: RunningServer) -> tuple[str, Any]:
    """The one that was just made: its id and its line."""
    before = {one["id"] for one in named(server)}
    say(server, "handled")
    while not (new := [one["id"] for one in named(server) if one["id"] not in before]):
        pass
    (name,) = new
    page.get_by_label("Search by id or model").fill(name)
    line = page.locator(f'#kept tr[data-id="{name}"]')
    expect(line).to_have_count(1, timeout=PATIENCE_MS)
    return name, line


def test_the_page_shows_models_memory_tiers_and_speed(page: Page, server: RunningServer):
    say(server, "shown")
    expect(page.locator("#models tr").first).to_contain_text("ready")
    expect(page.locator("#meters label")).to_contain_text(["Memory", "Hot", "Warm", "Cold"])
    expect(page.locator("#glance")).to_contain_text("Hit rate today")
    expect(page.locator("#ttft-now")).to_contain_text("Latest", timeout=PATIENCE_MS)
    expect(page.locator("#ttft canvas")).to_have_count(1)
    expect(page.locator("#rate canvas")).to_have_count(1)
    expect(page.locator("#crashes")).to_contain_text("No worker was lost.")


def test_a_request_appears_while_it_runs_and_leaves_when_it_ends(page: Page, server: RunningServer):
    expect(page.locator("#requests")).to_contain_text("Nothing is being answered.")
    body = {
        "model": "hearth-tiny",
        "messages": [{"role": "user", "content": "go on"}],
        "max_tokens": 20_000,
        "ignore_eos": True,
        "stream": True,
    }
    with server.stream("POST", CHAT, json=body):
        line = page.locator("#requests tr").first
        expect(line).to_contain_text("answering", timeout=PATIENCE_MS)
        expect(line).to_contain_text("hearth-tiny", timeout=PATIENCE_MS)
    expect(page.locator("#requests")).to_contain_text(
        "Nothing is being answered.", timeout=PATIENCE_MS
    )


def test_a_conversation_is_pinned_prewarmed_and_deleted(page: Page, server: RunningServer):
    name, line = new_conversation(page, server)
    line.get_by_role("button", name="Pin", exact=True).click()
    expect(line).to_contain_text("pinned", timeout=PATIENCE_MS)
    assert [one["is_pinned"] for one in kept(server, name)] == [True]
    line.get_by_role("button", name="Prewarm").click()
    expect(page.locator("#kept-note")).to_contain_text("on its way", timeout=PATIENCE_MS)
    line.get_by_role("button", name="Delete").click()
    assert len(kept(server, name)) == 1
    line.get_by_role("button", name="Really delete?").click()
    expect(line).to_have_count(0, timeout=PATIENCE_MS)
    assert kept(server, name) == []


def test_a_model_is_pinned_unloaded_and_loaded_after_a_question(page: Page, server: RunningServer):
    line = page.locator('#models tr[data-id="hearth-tiny"]')
    note = page.locator("#models-note")
    line.get_by_role("button", name="Pin", exact=True).click()
    expect(note).to_contain_text("pinned", timeout=PATIENCE_MS)
    line.get_by_role("button", name="Unpin").click()
    expect(line.get_by_role("button", name="Pin", exact=True)).to_be_visible(timeout=PATIENCE_MS)
    line.get_by_role("button", name="Prewarm").click()
    expect(note).to_contain_text("memory", timeout=PATIENCE_MS)
    unload = line.get_by_role("button", name="Unload")
    unload.click()
    assert server.get("/running").json()["models"], "it is asked first"
    line.get_by_role("button", name="Pin", exact=True).focus()
    expect(line.get_by_role("button", name="Unload?")).to_have_count(0)
    unload.click()
    line.get_by_role("button", name="Unload?").click()
    expect(line).to_contain_text("cold", timeout=PATIENCE_MS)
    line.get_by_role("button", name="Load").click()
    line.get_by_role("button", name="Load?").click()
    expect(line).to_contain_text("ready", timeout=PATIENCE_MS)


def test_a_conversation_is_pinned_before_anything_of_it_is_on_disk(
    page: Page, server: RunningServer
):
    page.get_by_role("button", name="New conversation").click()
    page.get_by_role("button", name="Pin this conversation").click()
    expect(page.locator("#chat-note")).to_contain_text("as soon as", timeout=PATIENCE_MS)
    before = {one["id"] for one in named(server)}
    page.get_by_label("Message").fill("kettle " * 300)
    page.get_by_role("button", name="Send").click()
    while not (new := [one for one in named(server) if one["id"] not in before]):
        pass
    assert [one["is_pinned"] for one in new] == [True]


def kept(server: RunningServer, name: str) -> list[Any]:
    answer = server.request("GET", "/admin/dashboard/conversations", params={"search": name})
    return answer.json()["conversations"]


def test_the_chat_box_answers_and_says_what_it_reused(page: Page):
    notes = page.locator("#chat-log article:nth-child(even) .note")
    for number in range(2):
        page.get_by_label("Message").fill("What can you tell me of kettles?")
        page.get_by_role("button", name="Send").click()
        expect(notes.nth(number)).to_contain_text("prompt tokens", timeout=PATIENCE_MS)
    for said in page.locator("#chat-log article:nth-child(even) > p:not(.note)").all():
        expect(said).not_to_be_empty()
    reused = re.match(r"Reused ([\d,]+) of", notes.last.inner_text())
    assert reused is not None
    assert int(reused[1].replace(",", "")) > 0


def test_what_is_loaded_is_asked_until_another_model_is_chosen(page: Page, server: RunningServer):
    for label in ("Model", "Model of the tree"):
        choice = page.get_by_label(label, exact=True)
        expect(choice.locator("option")).to_have_text(["another", "hearth-tiny"])
        expect(choice).to_have_value("hearth-tiny")


def test_what_people_write_is_shown_and_never_run(page: Page):
    evil = "<img src=x onerror=\"document.title='taken'\"><b>bold</b>"
    page.get_by_label("Message").fill(evil)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#chat-log article").first).to_contain_text(evil)
    assert page.locator("#chat-log img, #chat-log b").count() == 0
    assert page.title() == "Hearth"


def test_a_shared_prefix_is_one_trunk_in_the_tree(page: Page, server: RunningServer):
    for session in ("branch one", "branch two"):
        say(server, session)
    trunk = page.locator("#tree g:not([data-children='0']):not([data-children='1'])").first
    expect(trunk).to_be_attached(timeout=PATIENCE_MS)
    rows = int(trunk.get_attribute("data-rows") or 0)
    assert rows >= int(trunk.get_attribute("data-children") or 0) >= 2


@pytest.mark.parametrize("size", [PHONE, WIDE], ids=["phone", "desktop"])
def test_nothing_makes_the_page_scroll_sideways(page: Page, size: Any):
    page.set_viewport_size(size)
    # Charts take their new width a frame later.
    page.wait_for_function("document.documentElement.scrollWidth <= innerWidth")


def test_on_a_phone_everything_about_a_conversation_is_in_sight(page: Page, server: RunningServer):
    page.set_viewport_size(PHONE)
    say(server, "small")
    line = page.locator("#kept tr[data-id]").first
    expect(line.get_by_text("hearth-tiny")).to_be_visible(timeout=PATIENCE_MS)
    expect(line.locator("td").nth(2)).to_have_attribute("data-label", "Tokens")
    page.wait_for_function(
        "[...document.querySelectorAll('table')].every("
        "one => one.scrollWidth <= one.parentElement.clientWidth)"
    )


def test_every_control_is_reached_by_keyboard_and_the_theme_is_switched(page: Page):
    page.locator("#kept tr").first.wait_for()
    reached: set[str] = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    wanted = {"theme", "chat-model", "chat-text", "chat-send", "chat-new", "chat-keep"}
    wanted |= {"search", "tree-model"}
    assert wanted <= reached
    page.locator("#theme").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("size", [PHONE, WIDE], ids=["phone", "desktop"])
def test_axe_finds_nothing_serious(
    browser: Browser, server: RunningServer, complaints: list[str], scheme: Any, size: Any
):
    say(server, "looked at")
    with browser.new_context(viewport=size, color_scheme=scheme) as context:
        page = opened(context.new_page(), server, complaints)
        page.locator("#kept tr[data-id]").first.wait_for()
        page.locator("#tree svg").wait_for()
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        page.evaluate(AXE.read_text())
        found = page.evaluate("axe.run()")
        assert len(found["passes"]) > 10
        serious = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
        assert [(one["id"], [n["html"] for n in one["nodes"]]) for one in serious] == []
    assert complaints == []


def test_a_lost_worker_is_told_of_with_what_is_known(page: Page, server: RunningServer):
    os.kill(server.worker_pid(), signal.SIGKILL)
    while not server.get("/admin/crashes").json()["crashes"]:
        pass
    page.reload()
    fold = page.locator("#crashes details").first
    expect(fold).to_contain_text("SIGKILL", timeout=PATIENCE_MS)
    fold.locator("summary").click()
    expect(fold.locator("pre")).to_contain_text("up for", timeout=PATIENCE_MS)
