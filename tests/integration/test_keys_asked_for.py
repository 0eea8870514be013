"""Which key is asked for, as the tables in docs/security.md say: each cell, at each route."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from typing import NamedTuple, cast

import httpx
import psutil
import pytest
from litestar.handlers import HTTPRouteHandler

from api.app import ROUTES
from api.observe.redact import PAGE_TOKEN
from runtime.keys import digest_of, read_admin_token
from tests.running_server import ROOT, RunningServer, running

PAGE = ROOT / "docs" / "security.md"
TENANT, ADMIN, UNKNOWN = "alice-key", "the-admin-key", "no-key-of-this-server"
NAME = "studio.local"
ADMIN_KEY = f'admin_key = "{digest_of(ADMIN)}"\n'
ALICE = f'[api_keys]\nalice = "{digest_of(TENANT)}"\n'
BOB = f'bob = "{digest_of("bob-key")}"\n'
REMOTE = 'host = "0.0.0.0"\nallow_remote = true\n'
KEYS = {
    "none": [""],
    "`admin_key`": [ADMIN_KEY],
    "one in `[api_keys]`": [ALICE, REMOTE + ADMIN_KEY + ALICE],
    "several in `[api_keys]`": [ADMIN_KEY + ALICE + BOB, REMOTE + ALICE + BOB],
}
"""Settings of which each row is true, by its first cell; test_guard.py judges all the others."""

HERE_ONLY = "/admin/cache/import"
SCHEMA = [("GET", "/schema"), ("GET", "/schema/openapi.json")]
NEEDS_MORE = frozenset({"admin_key_needed", "not_local", "page_token_needed"})
Headers = dict[str, str]


class Asked(NamedTuple):
    """A server, and what its settings say that matters to who asks it."""

    server: RunningServer
    has_admin_key: bool
    address: str

    def send(self, method: str, path: str, headers: Headers) -> httpx.Response:
        """The head of the answer, and its body where it is an error: some streams have no end."""
        url = f"http://{self.address}:{self.server.port}{path}"
        with self.server.stream(method, url, headers=headers) as answer:
            if answer.status_code >= 400:
                answer.read()
            return answer


def table_after(header: str) -> list[list[str]]:
    """The cells of the table whose first line is that one."""
    lines = PAGE.read_text().split(header + "\n", 1)[1].splitlines()[1:]
    rows = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


AREAS = {area: re.findall(r"`(/[^`]*)`", told) for area, told in table_after("| area | paths |")}
COLUMNS = ["open", "API", "sums", "dashboard", "admin"]
HEADER = f"| keys that are set | asked with | {' | '.join(COLUMNS)} |"
CELLS = [
    (keys, asked_with, area, cell)
    for keys, asked_with, *cells in table_after(HEADER)
    for area, cell in zip(COLUMNS, cells, strict=True)
]


def routes() -> list[tuple[str, str, str]]:
    """The kind, the method and the path of everything that the server answers."""
    found = [
        (kind, method, path)
        for kind, handlers in ROUTES.items()
        for handler in cast("Sequence[HTTPRouteHandler]", handlers)
        for method in sorted(handler.http_methods)
        for path in sorted(handler.paths)
    ]
    return found + [("read", *one) for one in SCHEMA]


def areas_of(path: str) -> set[str]:
    """The areas that list a path; of `/` who asks decides."""
    return {
        area
        for area, listed in AREAS.items()
        for one in listed
        if path == one or (one.endswith("…") and path.startswith(one[:-1]))
    }


def filled_in(path: str) -> str:
    """The path with something in place of its parameters."""
    path = path.replace("{target:path}", "none/unload").replace("{name:str}", "style.css")
    return re.sub(r"\{[^}]*\}", "none", path)


def routes_of(area: str) -> list[tuple[str, str]]:
    """Methods and paths, signing out last."""
    found = [
        (method, filled_in(path))
        for _, method, path in routes()
        if area in areas_of(path) and not (path == "/" and area == "dashboard" and method != "GET")
    ]
    return sorted(found, key=lambda one: one[1] == "/sign-out")


def own_address() -> str:
    """One of this machine's that is not loopback, if it has one."""
    found = [
        one.address
        for some in psutil.net_if_addrs().values()
        for one in some
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]
    return found[0] if found else "127.0.0.1"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Generator[Callable[[str], list[Asked]]]:
    """Those of the settings that a row is about."""
    with ExitStack() as stack:
        known: dict[str, Asked] = {}

        def start(config: str) -> Asked:
            home = tmp_path_factory.mktemp("home")
            common = f'preload = []\nprewarm = false\nallowed_hosts = ["{NAME}"]\n'
            server = stack.enter_context(running(home, config=common + config))
            address = own_address() if REMOTE in config else "127.0.0.1"
            return Asked(server, ADMIN_KEY in config, address)

        def of(keys: str) -> list[Asked]:
            for one in KEYS[keys]:
                if one not in known:
                    known[one] = start(one)
            return [known[one] for one in KEYS[keys]]

        yield of


def ways(asked_with: str, asked: Asked) -> list[Headers]:
    """Headers of everybody that the second cell of a row speaks of."""
    token = read_admin_token(asked.server.home)
    assert token is not None
    named = {"host": NAME} if "`allowed_hosts`" in asked_with else {}
    found: list[Headers] = []
    if "no key" in asked_with:
        found.append(named)
    if "unknown key" in asked_with:
        found += [{"x-api-key": UNKNOWN}, {"authorization": f"Bearer {UNKNOWN}"}]
    if "tenant's key" in asked_with:
        found.append({"authorization": f"Bearer {TENANT}"})
    if "the admin key" in asked_with and asked.has_admin_key:
        found.append({"x-api-key": ADMIN})
    if "`admin.token`" in asked_with:
        found.append({"x-api-key": token})
    if "a cookie" in asked_with:
        found.append(signed_in(asked, token))
    return found


def signed_in(asked: Asked, key: str) -> Headers:
    """What the dashboard in a browser sends after its user signed in."""
    own = {"origin": f"http://{asked.address}:{asked.server.port}"}
    form = httpx.post(f"{own['origin']}/sign-in", data={"key": key}, headers=own, trust_env=False)
    cookie = {"cookie": form.headers["set-cookie"].partition(";")[0]}
    page = httpx.get(own["origin"], headers={"accept": "text/html"} | cookie, trust_env=False)
    found = re.search(r'name="page-token" content="([^"]+)"', page.text)
    assert found is not None, page.text[:500]
    return own | cookie | {PAGE_TOKEN: found.group(1)}


def told(answer: httpx.Response) -> str:
    """The answer as a cell has it."""
    if answer.status_code == 401:
        return "401"
    if answer.status_code == 403 and (answer.content == b"" or code_in(answer) in NEEDS_MORE):
        return "403"
    is_sent = answer.headers.get("location", "").startswith("/sign-in?")
    return "sign-in" if answer.status_code == 303 and is_sent else "yes"


def code_in(answer: httpx.Response) -> str:
    """Why an answer is none; Ollama's clients get the message alone."""
    error = answer.json()["error"]
    return error if isinstance(error, str) else error["code"]


def test_the_table_has_a_row_for_all_settings_and_an_area_for_every_route():
    assert {keys for keys, *_ in CELLS} == KEYS.keys()
    assert len(CELLS) == len({cell[:3] for cell in CELLS})
    assert set(COLUMNS) == AREAS.keys()
    for kind, method, path in routes():
        expected = {"API", "dashboard"} if path == "/" else None
        found = areas_of(path)
        assert found == expected or len(found) == 1, f"{method} {path} is in {found or 'no area'}"
        assert (kind == "admin") <= (found <= {"admin", "sums"}), path


def test_the_documented_routes_are_all_that_a_server_has(servers: Callable[[str], list[Asked]]):
    (asked,) = servers("none")
    documented = asked.server.get("/schema/openapi.json").json()["paths"]
    known = {re.sub(r":\w+\}", "}", path) for _, _, path in routes()}
    assert documented.keys() <= known


@pytest.mark.parametrize(
    ("keys", "asked_with", "area", "cell"),
    CELLS,
    ids=["-".join(re.findall(r"\w+", " ".join(cell))) for cell in CELLS],
)
def test_a_cell_is_what_a_server_does(
    keys: str, asked_with: str, area: str, cell: str, servers: Callable[[str], list[Asked]]
):
    browser = {"accept": "text/html"} if area == "dashboard" else {}
    for asked in servers(keys):
        for headers in ways(asked_with, asked):
            for method, path in routes_of(area):
                answer = asked.send(method, path, headers | browser)
                is_afar = path == HERE_ONLY and cell == "yes" and asked.address != "127.0.0.1"
                expected = "403" if is_afar else cell
                assert told(answer) == expected, f"{method} {path} {headers}: {answer.status_code}"


def test_who_may_not_see_sums_is_told_none_beside_what_it_may_ask(
    servers: Callable[[str], list[Asked]],
):
    for keys, asked_with, area, cell in CELLS:
        may_ask = (keys, asked_with, "API", "yes") in CELLS
        if area != "sums" or not may_ask:
            continue
        for asked in servers(keys):
            for headers in ways(asked_with, asked):
                url = f"http://{asked.address}:{asked.server.port}"
                state = httpx.get(f"{url}/health/ready", headers=headers, trust_env=False).json()
                assert ("pools" in state) == (cell == "yes"), (keys, asked_with)
