"""Connections: streams end where they end, and the next request is heard, however it is sent."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from typing import Any

import pytest

from tests.running_server import CHAT, COMPLETIONS, RunningServer

SHORT: dict[str, Any] = {"model": "tiny", "max_tokens": 2}
HELLO: dict[str, Any] = SHORT | {"messages": [{"role": "user", "content": "hi"}]}
RESPONSE: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 2}
STREAMS: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "chat": (CHAT, HELLO, b"data: [DONE]\n\n"),
    "completions": (COMPLETIONS, SHORT | {"prompt": "hi"}, b"data: [DONE]\n\n"),
    "messages": ("/v1/messages", HELLO, b'data: {"type":"message_stop"}\n\n'),
    "responses": ("/v1/responses", RESPONSE, b"}\n\n"),
    "background": ("/v1/responses", RESPONSE | {"background": True}, b"}\n\n"),
    "agent": ("/v1/agents/kept/generate", HELLO, b"data: [DONE]\n\n"),
    "ollama": ("/api/chat", HELLO | {"options": {"num_predict": 2}}, b"}\n"),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_ends_and_its_connection_serves_the_next(server: RunningServer, name: str) -> None:
    path, body, end = STREAMS[name]
    server.post("/v1/agents", {"id": "kept", "model": "tiny"})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"content-type": "application/json", "accept-encoding": "gzip, deflate, br"}
    try:
        for _ in range(2):
            connection.request("POST", path, json.dumps(body | {"stream": True}), headers)
            taken = connection.sock
            answer = connection.getresponse()
            told = answer.read()  # to the last chunk, not to the end of the connection
            assert (answer.status, answer.headers["transfer-encoding"]) == (200, "chunked"), told
            assert answer.headers["content-encoding"] is None
            assert told.endswith(end), told[-200:]
            assert connection.sock is taken is not None
    finally:
        connection.close()


@pytest.mark.parametrize("offer", ["Upgrade", "upgrade"])
def test_an_offer_of_http_2_costs_no_body(server: RunningServer, offer: str) -> None:
    """As Java's client and `curl --http2` make it with each request of a connection."""
    body = json.dumps(HELLO).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nConnection: {offer}, HTTP2-Settings\r\nHost: localhost\r\n"
        f"HTTP2-Settings: AAEAAEAAAAIAAAAA\r\n{offer}: h2c\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        for pieces in ((head + body,), (head, body)):
            for piece in pieces:
                connection.sendall(piece)
            answer = http.client.HTTPResponse(connection, method="POST")
            answer.begin()
            assert answer.status == 200, answer.read()
            assert json.loads(answer.read())["object"] == "chat.completion"


def old_fashioned(
    server: RunningServer, method: str, path: str, body: Any = None, more: str = ""
) -> tuple[dict[str, str], bytes]:
    """Ask in HTTP/1.0: the headers of the answer, and all that follows up to the end."""
    data = json.dumps(body).encode() if body is not None else b""
    head = f"{method} {path} HTTP/1.0\r\n{more}"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head.encode() + data)
        told = b""
        while piece := connection.recv(65_536):
            told += piece
    lines, _, rest = told.partition(b"\r\n\r\n")
    pairs = (line.partition(": ") for line in lines.decode().split("\r\n")[1:])
    headers = {name.lower(): value for name, _, value in pairs}
    assert "transfer-encoding" not in headers, told
    assert headers["connection"] == "close"
    return headers, rest


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_to_a_client_of_http_1_0_ends_with_its_connection(
    server: RunningServer, name: str
) -> None:
    path, body, end = STREAMS[name]
    server.post("/v1/agents", {"id": "kept", "model": "tiny"})
    more = "Connection: keep-alive\r\nExpect: 100-continue\r\n"  # it is not one of HTTP/1.0
    headers, told = old_fashioned(server, "POST", path, body | {"stream": True}, more)
    assert "content-length" not in headers
    assert told.startswith((b"data: ", b"event: ", b"{"))  # and not with a chunk's size
    assert told.endswith(end), told[-200:]


@pytest.mark.parametrize("path", ["/health/live", "/v1/models", "/metrics", "/", "/nowhere"])
def test_an_answer_to_a_client_of_http_1_0_is_as_long_as_it_says(
    server: RunningServer, path: str
) -> None:
    headers, told = old_fashioned(server, "GET", path)
    assert int(headers["content-length"]) == len(told) > 0
    headers, told = old_fashioned(server, "HEAD", path)
    assert told == b""
    headers, told = old_fashioned(server, "POST", CHAT, HELLO)
    assert int(headers["content-length"]) == len(told)
    assert json.loads(told)["object"] == "chat.completion"


def test_a_compressed_body_is_refused_for_what_it_is(server: RunningServer) -> None:
    body = gzip.compress(json.dumps(HELLO).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = server.request("POST", CHAT, content=body, headers=headers)
    assert answer.status_code == 415
    assert "content-encoding" in answer.json()["error"]["message"]
