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


def test_a_compressed_body_is_refused_for_what_it_is(server: RunningServer) -> None:
    body = gzip.compress(json.dumps(HELLO).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = server.request("POST", CHAT, content=body, headers=headers)
    assert answer.status_code == 415
    assert "content-encoding" in answer.json()["error"]["message"]
