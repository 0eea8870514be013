"""Who is let in, over HTTP: keys, host names, pages of other sites, clients that never finish."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from runtime.keys import digest_of, read_admin_token
from tests.running_server import CHAT, COMPLETIONS, RunningServer, hearth, running, started
from tests.waiting import PATIENCE_S, until

KEY, ADMIN = "alice-key", "the-admin-key"
CONFIG = f"""
admin_key = "{digest_of(ADMIN)}"
preload = []
allowed_hosts = ["studio.local"]
allowed_origins = ["http://localhost:3000"]
[limits.generate]
body_bytes = 4_000_000
depth = 24
prompt_tokens = 2000
output_tokens = 3
[limits.embed]
body_bytes = 20_000
depth = 4
prompt_tokens = 60
[limits.prewarm]
depth = 4
[limits.admin]
body_bytes = 500
[api_keys]
alice = "{digest_of(KEY)}"
"""
BODY = {"model": "hearth-tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running(tmp_path_factory.mktemp("home"), config=CONFIG) as server:
        asyncio.run(until(lambda: is_administered(server), "the store is open"))
        yield server


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    """One that waits a second for the rest of a request and not at all for its history: others may
    be late on a busy machine.
    """
    config = f"send_timeout_s = 1\n{CONFIG}[limits.history]\ntime_s = 1e-6\n"
    with running(tmp_path_factory.mktemp("impatient"), config=config) as server:
        yield server


def is_administered(server: RunningServer) -> bool:
    return ask(server, "/admin/cache", **{"x-api-key": ADMIN}).status_code == 200


def ask(server: RunningServer, path: str, **headers: str) -> httpx.Response:
    return server.request("GET", path, headers=headers)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_command_of_the_ready_line_takes_the_key_from_the_shell(server: RunningServer):
    command = server.ready_line[server.ready_line.index("curl ") :]
    for key, expected in ((KEY, b'"finish_reason"'), ("", b'"missing_api_key"')):
        env = os.environ | {"HEARTH_API_KEY": key}
        done = subprocess.run(["bash", "-c", command], capture_output=True, env=env, check=True)
        assert expected in done.stdout


def test_without_a_key_nothing_but_liveness_is_told(server: RunningServer):
    assert ask(server, "/health/live").status_code == 200
    for path in ("/v1/models", "/metrics", "/schema", "/admin/cache", "/nowhere"):
        answer = ask(server, path)
        assert answer.status_code == 401, path
        assert answer.json()["error"]["code"] == "missing_api_key"
        kinds = answer.headers.get_list("www-authenticate")
        assert kinds == ['Bearer realm="Hearth"', 'Basic realm="Hearth"'], "a line for each"


def test_a_refusal_is_in_the_words_of_the_protocol(server: RunningServer):
    answer = server.request("POST", "/v1/messages", json={})
    assert answer.status_code == 401
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("path", ["/v1/models", CHAT, "/v1/messages", "/api/tags", "/v1/agents"])
def test_a_wrong_key_is_told_apart_from_none_in_the_words_of_each_protocol(
    server: RunningServer, path: str
):
    method = "POST" if path in (CHAT, "/v1/messages") else "GET"
    said: set[str] = set()
    for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
        answer = server.request(method, path, headers=headers)
        error = answer.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        expected = "invalid_api_key" if headers else "missing_api_key"
        assert answer.status_code == 401
        assert ("not known" in message) == bool(headers)
        assert isinstance(error, str) or code_in(answer) == expected
        assert "wrong" not in answer.text
        said.add(message)
    assert len(said) == 2, "how a wrong key was sent makes no difference"


def test_a_key_opens_the_protocols_but_not_the_administration(server: RunningServer):
    assert ask(server, "/v1/models", authorization=f"Bearer {KEY}").status_code == 200
    assert ask(server, "/v1/models", **{"x-api-key": KEY}).status_code == 200
    refused = ask(server, "/admin/cache", **{"x-api-key": KEY})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_needed")
    assert ask(server, "/admin/cache", **{"x-api-key": ADMIN}).status_code == 200


@pytest.mark.parametrize("slashes", ["//", "///", "/%2F", "/%2f/"])
def test_no_spelling_of_a_path_leads_around_the_admin_key(server: RunningServer, slashes: str):
    for path in ("admin/cache", "admin//dashboard", "admin/crashes"):
        answer = raw(server, f"GET {slashes}{path}")
        assert b" 403 " in answer.split(b"\r\n", 1)[0], answer
        assert b"admin_key_needed" in answer


def raw(server: RunningServer, line: str, headers: str = f"x-api-key: {KEY}\r\n") -> bytes:
    """What comes of a request line that a client's library would have tidied up."""
    head = f"{line} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head.encode())
        return read_all(connection)


def test_the_dashboard_works_from_afar_with_the_admin_key_alone(server: RunningServer):
    afar = {"host": "studio.local"}
    figures = ("/admin/dashboard", "/admin/dashboard/conversations", "/admin/crashes", "/metrics")
    for path in figures:
        assert ask(server, path, **afar).status_code == 401
        assert ask(server, path, **{"x-api-key": ADMIN, **afar}).status_code == 200, path
    for path in figures[:3]:
        assert ask(server, path, **{"x-api-key": KEY, **afar}).status_code == 403, path
    basic = "Basic " + base64.b64encode(f"me:{ADMIN}".encode()).decode()
    page = ask(server, "/", accept="text/html", authorization=basic, **afar)
    assert page.status_code == 200
    headers = {"x-api-key": ADMIN, **afar}
    wanted = {"file": "/tmp/a.safetensors", "model": "hearth-tiny"}
    refused = server.request("POST", "/admin/cache/import", json=wanted, headers=headers)
    assert refused.status_code == 403, "whoever imports files has them on this machine"


def test_people_are_asked_for_their_key_and_programs_are_told(server: RunningServer):
    people = {"accept": "text/html,*/*;q=0.8", "sec-fetch-mode": "navigate"}
    answer = ask(server, "/admin/cache/chain?conversation=a%20b", **people)
    assert answer.status_code == 303
    wanted = "/sign-in?next=%2Fadmin%2Fcache%2Fchain%3Fconversation%3Da%2520b"
    assert answer.headers["location"] == wanted
    assert ask(server, "/", **people, **{"x-api-key": "wrong"}).status_code == 401
    assert server.request("POST", "/", headers=people).status_code == 401
    script = ask(server, "/admin/dashboard", **{"sec-fetch-mode": "cors"})
    assert script.headers.get_list("www-authenticate") == ['Bearer realm="Hearth"']


def test_every_file_of_the_dashboard_needs_the_admin_key(server: RunningServer):
    """The form to sign in has its own ones, and those are all that there is without a key."""
    html = {"accept": "text/html"}
    for path in ("/dashboard/app.js", "/dashboard/style.css", "/dashboard/none.js"):
        assert ask(server, path).status_code == 401
        assert ask(server, path, **{"x-api-key": KEY}).status_code == 403
        assert ask(server, path, **{"x-api-key": ADMIN}).status_code != 403
    assert ask(server, "/", **html, **{"x-api-key": KEY}).status_code == 403
    assert ask(server, "/", **html, **{"x-api-key": ADMIN}).status_code == 200
    assert ask(server, "/", **{"x-api-key": KEY}).json() == {"status": "live"}
    for path in ("", "/style.css", "/theme.js", "/icon.svg"):
        assert ask(server, f"/sign-in{path}").status_code == 200
    assert ask(server, "/sign-in/app.js").status_code == 401


def test_signing_in_takes_a_form_of_our_own_page(server: RunningServer):
    form, own = {"key": ADMIN, "next": "//evil.example/"}, {"origin": server.url}
    for headers in ({}, {"sec-fetch-site": "cross-site"}, {"origin": "http://localhost:3000"}):
        assert server.request("POST", "/sign-in", data=form, headers=headers).status_code == 403
    assert server.request("POST", "/sign-in", json=form, headers=own).status_code == 415
    many = {str(number): "x" for number in range(100)}
    assert server.request("POST", "/sign-in", data=many, headers=own).status_code == 400
    large = {"key": "x" * 100_000}
    assert server.request("POST", "/sign-in", data=large, headers=own).status_code == 413
    answer = server.request("POST", "/sign-in", data=form, headers=own)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert ADMIN not in cookie
    session = cookie.partition(";")[0]
    assert ask(server, "/admin/cache", cookie=session).status_code == 200
    act = server.request("POST", "/admin/cache/gc", headers=own | {"cookie": session})
    assert (act.status_code, code_in(act)) == (403, "page_token_needed")
    again = server.request("POST", "/sign-in", data=form, headers=own | {"cookie": session})
    assert again.status_code == 303
    assert ask(server, "/admin/cache", cookie=session).status_code == 401, "there is a newer one"
    assert session.partition("=")[2] not in server.stderr


def test_guessing_closes_the_door_to_unknown_keys(impatient: RunningServer):
    """Nobody else comes to that server with a key that it does not know."""
    keyed = {"x-api-key": KEY}
    assert ask(impatient, "/v1/models", **keyed).status_code == 200
    codes = [ask(impatient, "/v1/models", **{"x-api-key": f"{n}"}).status_code for n in range(60)]
    assert codes[:20] == [401] * 20
    assert codes[-1] == 429
    own = {"origin": impatient.url}
    answer = impatient.request("POST", "/sign-in", data={"key": ADMIN}, headers=own)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert ask(impatient, "/v1/models", **keyed).status_code == 200, "it was right before"


def test_the_operators_own_programs_find_a_key_that_only_they_can_read(server: RunningServer):
    token = read_admin_token(server.home)
    assert token is not None
    assert ask(server, "/admin/cache", **{"x-api-key": token}).status_code == 200
    mode = (server.home / "admin.token").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


def test_the_operators_own_programs_say_whose_home_to_name(server: RunningServer, tmp_path: Path):
    place = {"HEARTH_PORT": str(server.port)}
    assert hearth("cache", "stats", HEARTH_HOME=str(server.home), **place).returncode == 0
    done = hearth("cache", "stats", HEARTH_HOME=str(tmp_path), **place)
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr
    assert "--home" in done.stderr


def test_keys_are_neither_in_the_log_nor_in_the_answers(server: RunningServer):
    for secret in (KEY, ADMIN, "wrong-key-canary"):
        ask(server, f"/nowhere/{secret[:2]}", authorization=f"Bearer {secret}")
    assert not [s for s in (KEY, ADMIN, "wrong-key-canary") if s in server.stderr]


def test_other_names_and_other_sites_are_refused_even_with_a_key(server: RunningServer):
    keyed = {"x-api-key": KEY}
    assert ask(server, "/v1/models", host="evil.example", **keyed).status_code == 403
    assert ask(server, "/v1/models", origin="https://evil.example", **keyed).status_code == 403
    answer = ask(server, "/v1/models", origin=server.url, **keyed)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


def test_a_browser_that_asks_first_gets_no_leave(server: RunningServer):
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "x"}
    for path in (CHAT, "/v1/messages", "/admin/cache", "/"):
        headers = {"x-api-key": ADMIN, "origin": "https://evil.example", **asking}
        answer = server.request("OPTIONS", path, headers=headers)
        assert answer.status_code == 403, path
        own = server.request("OPTIONS", path, headers=headers | {"origin": server.url})
        for one in (answer, own):
            assert not [name for name in one.headers if name.startswith("access-control")], path


def test_a_page_of_a_listed_origin_gets_leave_to_ask_and_to_read(server: RunningServer):
    page = {"origin": "http://localhost:3000"}
    wish = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    for path in (CHAT, "/v1/messages", "/v1/responses", "/api/chat"):
        leave = server.request("OPTIONS", path, headers=page | wish)  # browsers send no key here
        assert leave.status_code == 204
        assert leave.headers["access-control-allow-origin"] == page["origin"]
        assert leave.headers["access-control-allow-headers"] == "x-api-key"
        assert "POST" in leave.headers["access-control-allow-methods"]
        unkeyed = server.request("POST", path, json=BODY, headers=page)
        assert unkeyed.status_code == 401
        assert unkeyed.headers["access-control-allow-origin"] == page["origin"]
    stream = BODY | {"stream": True}
    answer = server.request("POST", CHAT, json=stream, headers=page | {"x-api-key": KEY})
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.headers["access-control-allow-origin"] == page["origin"]
    assert answer.headers["vary"] == "origin"
    for path in ("/admin/cache", "/admin"):
        refused = server.request("OPTIONS", path, headers=page | wish)
        assert not [name for name in refused.headers if name.startswith("access-control")]
    lost = server.request("OPTIONS", CHAT, headers=page | wish | {"host": "evil.example"})
    assert lost.status_code == 403


def test_one_request_is_not_two(server: RunningServer):
    """Lengths that contradict each other are how one client's request is read as another's."""
    body = "0\r\n\r\nGET /admin/cache HTTP/1.1\r\nhost: localhost\r\n\r\n"
    keyed = f"x-api-key: {KEY}\r\ncontent-type: application/json\r\n"
    lengths = f"content-length: {len(body)}\r\ntransfer-encoding: chunked\r\n"
    answer = raw(server, f"POST {CHAT}", f"{keyed}{lengths}\r\n{body}".removesuffix("\r\n"))
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert b" 200 " not in answer.split(b"\r\n", 1)[0]


@pytest.mark.parametrize(
    ("line", "headers", "status", "code"),
    [
        ("GET /v1/models", "x: " + "a" * 20_000 + "\r\n", 431, "request_head_too_large"),
        ("GET /v1/models", "x: 1\r\n" * 200, 431, "request_head_too_large"),
        ("GET /v1/models", "host: evil.example\r\n", 400, "malformed_request"),
        ("GET http://evil.example/v1/models", "", 400, "malformed_request"),
        ("GET /v1/models", "x: 1\r\n y: 2\r\n", 400, "malformed_request"),
        ("CONNECT evil.example:443", "", 501, "not_implemented"),
        ("GET http://localhost/health/live", "", 200, "live"),
    ],
)
def test_a_head_is_bounded_and_has_one_reading_before_any_key_is_asked_for(
    server: RunningServer, line: str, headers: str, status: int, code: str
):
    answer = raw(server, line, headers)
    assert f" {status} ".encode() in answer.split(b"\r\n", 1)[0]
    assert b"connection: close" in answer
    assert code.encode() in answer


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/nowhere"])
def test_who_is_refused_cannot_go_on_sending(server: RunningServer, path: str):
    """Nothing of it is kept, and the connection ends with the answer, which can be read."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head.encode())
        answer = read_all(connection)
        assert b" 401 " in answer.split(b"\r\n", 1)[0]
        assert b"connection: close" in answer
        with pytest.raises(OSError, match=r"reset|pipe|abort"):
            connection.sendall(b" " * 100_000_000)


def routes_with_a_body(server: RunningServer) -> list[str]:
    """Every POST of the schema whose path names nothing, as OpenAPI knows them, and prewarm."""
    schema = ask(server, "/schema", **{"x-api-key": KEY}).json()
    found = [path for path, one in schema["paths"].items() if "requestBody" in one.get("post", {})]
    return [path for path in found if "{" not in path and "/admin/" not in path] + ["/v1/prewarm"]


def test_a_form_of_a_web_page_cannot_post_anywhere(server: RunningServer):
    routes = routes_with_a_body(server)
    assert len(routes) > 8
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {"x-api-key": KEY, "content-type": kind}
        for path in routes:
            answer = server.request("POST", path, content=json.dumps(BODY), headers=headers)
            assert answer.status_code == 415, path


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"tools": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"system": "\xff"}',
        b"[" * 100_000,
        b'{"messages": {"a": 1}, "model": "hearth-tiny"}',
        b'{"messages": [1], "model": "hearth-tiny"}',
        b'{"input": {"a": 1}, "system": 5, "prompt": {}, "model": {}}',
        b"[]",
        b"null",
    ],
    ids=lambda body: body[:12].decode(errors="replace"),
)
def test_no_body_is_our_own_fault(server: RunningServer, body: bytes):
    headers = {"x-api-key": KEY, "content-type": "application/json"}
    for path in routes_with_a_body(server):
        answer = server.request("POST", path, content=body, headers=headers)
        assert answer.status_code < 500, (path, answer.text)


def test_more_parts_than_any_conversation_has_are_refused_at_once(server: RunningServer):
    headers = {"x-api-key": KEY}
    tools = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(2000)]
    for fields in ({"messages": BODY["messages"] * 20_000}, {"tools": tools}):
        for path in (CHAT, "/v1/prewarm"):
            answer = server.request("POST", path, json=BODY | fields, headers=headers)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] in fields or error["code"] == "too_many_parts", error


PATHS_OF_PROMPTS = {
    CHAT: {"messages": [{"role": "user", "content": "w " * 4000}]},
    COMPLETIONS: {"prompt": "w " * 4000},
    "/v1/responses": {"input": "w " * 4000},
    "/v1/messages": {"messages": [{"role": "user", "content": "w " * 4000}], "max_tokens": 9},
    "/api/generate": {"prompt": "w " * 4000, "stream": False},
    "/tokenize": {"prompt": "w " * 100},
}


@pytest.mark.parametrize("path", PATHS_OF_PROMPTS)
def test_a_prompt_is_held_to_the_tokens_of_its_route(server: RunningServer, path: str):
    body = {"model": "hearth-tiny", **PATHS_OF_PROMPTS[path]}
    answer = server.request("POST", path, json=body, headers={"x-api-key": KEY})
    assert answer.status_code == 400
    said = answer.json()["error"]
    most = 60 if path == "/tokenize" else 2000
    match path:
        case "/v1/messages":
            assert said["details"]["error_code"] == "context_length_exceeded"
            assert said["message"].endswith(f"> {most} maximum")
        case "/api/generate":
            assert f"context length is {most + 1} tokens" in said
        case _:
            assert said["code"] == "context_length_exceeded"
            assert f"context length is {most + 1} tokens" in said["message"]


def test_a_prompt_that_may_be_cut_is_cut_to_what_its_route_takes(server: RunningServer):
    turns = [{"role": "user", "content": f"{n} " + "w " * 150} for n in range(24)]
    body = {"model": "hearth-tiny", "input": turns, "truncation": "auto", "max_output_tokens": 16}
    answer = server.request("POST", "/v1/responses", json=body, headers={"x-api-key": KEY})
    assert answer.status_code == 200, answer.text
    assert 500 < answer.json()["usage"]["input_tokens"] <= 2000


def test_an_answer_is_held_to_the_tokens_of_its_route(server: RunningServer):
    for wanted in ({}, {"max_tokens": 1000}):
        body = BODY | {"max_tokens": None, "ignore_eos": True} | wanted
        answer = server.request("POST", CHAT, json=body, headers={"x-api-key": KEY}).json()
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["finish_reason"] == "length"


def code_in(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    return error["details"]["error_code"] if "details" in error else error["code"]


def test_bodies_are_held_to_the_bytes_and_levels_of_their_route(server: RunningServer):
    deep = json.dumps({"model": "hearth-tiny", "metadata": [[[[[]]]]], "tools": [[[[[[{}]]]]]]})
    long = json.dumps({"model": "hearth-tiny", "input": "w" * 20_000})
    keyed = {"x-api-key": KEY, "content-type": "application/json"}
    admin = keyed | {"x-api-key": ADMIN}
    for path, body, headers, status, code in (
        ("/v1/embeddings", long, keyed, 413, "request_too_large"),
        ("/tokenize", long, keyed, 413, "request_too_large"),
        ("/admin/cache/import", long, admin, 413, "request_too_large"),
        ("/v1/messages", '{"a": ' + "[" * 24 + "]" * 24 + "}", keyed, 400, "invalid_json"),
        (CHAT, '{"a": ' + "[" * 24 + "]" * 24 + "}", keyed, 400, "invalid_json"),
        ("/v1/embeddings", deep, keyed, 400, "invalid_json"),
        ("/v1/prewarm", deep, keyed, 400, "invalid_json"),
    ):
        answer = server.request("POST", path, content=body, headers=headers)
        assert (answer.status_code, code_in(answer)) == (status, code), path
        assert "limits." in answer.json()["error"]["message"], path
    passes = server.request("POST", CHAT, content=json.dumps(BODY | {"x": [[[[]]]]}), headers=keyed)
    assert passes.status_code == 200, "what is too deep to be embedded may be answered"


def test_what_takes_longer_than_its_route_may_is_ended_in_the_words_of_the_protocol(
    impatient: RunningServer,
):
    keyed = {"x-api-key": KEY}
    for headers in ({}, {"anthropic-version": "2023-06-01"}):
        for path in ("/v1/agents", "/v1/responses/resp_none"):
            answer = ask(impatient, path, **keyed, **headers)
            assert (answer.status_code, code_in(answer)) == (504, "time_limit"), path
            kind = answer.json()["error"]["type"]
            assert kind == ("timeout_error" if headers else "server_error")
    assert ask(impatient, "/v1/models", **keyed).status_code == 200


def read_all(connection: socket.socket) -> bytes:
    pieces: list[bytes] = []
    while piece := connection.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def test_a_client_that_stops_in_its_body_is_told_so_and_cut_off(impatient: RunningServer):
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\n"
        "content-type: application/json\r\ncontent-length: 1000\r\nconnection: close\r\n\r\n{"
    )
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=30) as connection:
        connection.sendall(head.encode())
        answer = read_all(connection)
    assert b" 408 " in answer.split(b"\r\n", 1)[0]
    assert b"request_timeout" in answer


@pytest.mark.parametrize("head", ["", "GET /v1/models HTTP/1.1\r\nhost: lo"])
def test_a_client_that_stops_before_its_headers_end_is_cut_off(impatient: RunningServer, head: str):
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=30) as connection:
        connection.sendall(head.encode())
        assert read_all(connection) == b""


def test_a_client_that_sends_a_byte_now_and_then_is_cut_off_as_well(impatient: RunningServer):
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\n"
        "content-type: application/json\r\ncontent-length: 100000\r\nconnection: close\r\n\r\n{"
    )
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=0.2) as connection:
        connection.sendall(head.encode())
        answer = b""
        for _ in range(100):
            try:
                answer = connection.recv(65536)
                break
            except TimeoutError:
                connection.sendall(b" ")
    assert b" 408 " in answer.split(b"\r\n", 1)[0]


def test_a_server_for_other_machines_does_not_start_without_keys(tmp_path: Path):
    with started(tmp_path, config='host = "0.0.0.0"') as server:
        assert server.process.wait(PATIENCE_S) == 2
        assert "allow_remote" in server.stderr
