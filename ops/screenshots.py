"""Pictures of the dashboard for `docs/`: `python -m ops.screenshots`, with Chromium installed.

A server of its own with the model that comes with Hearth, some conversations, four pictures.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import httpx
from playwright.sync_api import Browser, ViewportSize, expect, sync_playwright

CHROMIUM = "/usr/bin/chromium"
ROOT = Path(__file__).parent.parent
MAX_BYTES = 200_000
PORT = 8499
URL = f"http://127.0.0.1:{PORT}"
SIZES = {1440: ViewportSize(width=1440, height=1100), 390: ViewportSize(width=390, height=844)}
SCHEMES: tuple[Literal["dark", "light"], ...] = ("dark", "light")
_START_S = 60.0


@contextmanager
def serving(home: Path) -> Generator[httpx.Client]:
    """A server that is ready. Raises TimeoutError when it does not become so."""
    command = [sys.executable, "-m", "api", "serve", "--home", str(home), "--port", str(PORT)]
    with (
        subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process,
        httpx.Client(base_url=URL, timeout=60, trust_env=False) as client,
    ):
        try:
            _wait(client)
            yield client
        finally:
            process.terminate()


def _wait(client: httpx.Client) -> None:
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s:
        try:
            if client.get("/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise TimeoutError("the server did not become ready")


def talk(client: httpx.Client) -> None:
    """A few conversations that share a system prompt, so that there is something to see."""
    system = {"role": "system", "content": "You keep the fire of a small house. " * 40}
    for session in ("kitchen", "garden", "study", "attic"):
        messages = [system, {"role": "user", "content": f"What is to be done in the {session}?"}]
        for _ in range(3):
            body = {"model": "hearth-tiny", "messages": messages, "session_id": session}
            answer = client.post("/v1/chat/completions", json={**body, "max_tokens": 40})
            message = answer.raise_for_status().json()["choices"][0]["message"]
            messages += [message, {"role": "user", "content": "And after that?"}]
        time.sleep(3.0)


def take(browser: Browser, folder: Path) -> None:
    """One picture for each width and scheme."""
    for width, size in SIZES.items():
        for scheme in SCHEMES:
            with browser.new_context(viewport=size, color_scheme=scheme) as context:
                page = context.new_page()
                page.goto(URL)
                expect(page.locator("#ttft-now")).to_contain_text("Latest", timeout=20_000)
                page.locator("#tree svg").wait_for()
                path = folder / f"dashboard-{width}-{scheme}.png"
                page.screenshot(path=path, full_page=width > 1000)
                if path.stat().st_size > MAX_BYTES:
                    raise ValueError(f"{path} is larger than {MAX_BYTES} bytes")
                print(path, path.stat().st_size)


def main() -> None:
    """Write the pictures into `docs/`."""
    with tempfile.TemporaryDirectory() as home, serving(Path(home)) as client:
        talk(client)
        with sync_playwright() as playwright:
            arguments = ["--no-sandbox", "--no-proxy-server"]
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
            take(browser, ROOT / "docs")
            browser.close()


if __name__ == "__main__":
    main()
