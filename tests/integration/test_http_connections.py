"""Streams on a connection that is kept: each ends where it ends, and the next request is heard."""

from __future__ import annotations

import http.client
import json
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
