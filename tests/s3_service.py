"""A small S3 service in this process, which can break in ways that a real one only does at times.

What clients of one bucket need: objects, listings, uploads in parts, and the errors that AWS
documents. Who comes with another access key than `KEY` is refused.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEY = "a-key-id"
BUCKET = "hearth"


class Service:
    """Its objects by name, and what is wrong with it."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.is_there = False
        self.left_bytes = 1 << 60
        """So much of its objects it sends before it breaks off, and answers nobody any more."""
        self.asked: list[str] = []
        """The names of the objects that were asked for; a listing has none."""
        self._speaks = threading.Event()
        self._speaks.set()

    @contextmanager
    def silent(self) -> Generator[None]:
        """Let everybody in and say nothing; afterwards it hangs up on those that still wait."""
        self._speaks.clear()
        try:
            yield
        finally:
            self._speaks.set()

    def speaks(self) -> bool:
        """Whether it answers; where it does not this takes as long as its silence."""
        return self._speaks.is_set() or not self._speaks.wait()

    @contextmanager
    def running(self, port: int = 0) -> Generator[str]:
        """Answer at this address; afterwards nobody, however old the connection."""
        self.is_there = True
        server = ThreadingHTTPServer(("127.0.0.1", port), type("H", (_Handler,), {"service": self}))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            self.is_there = False
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    service: ClassVar[Service]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        body = "" if self.command == "HEAD" else f"<Error><Code>{code}</Code></Error>"
        self._answer(status, body.encode())

    def _dispatch(self) -> None:
        url = urlsplit(self.path)
        _, bucket, *rest = unquote(url.path).split("/", 2)
        name, query = "".join(rest), parse_qs(url.query, keep_blank_values=True)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.service.asked.append(name)
        speaks = self.service.speaks()
        if not speaks or not self.service.is_there or not self.service.left_bytes:
            self.close_connection = True
        elif f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
            self._refuse(403, "InvalidAccessKeyId")
        elif bucket != BUCKET:
            self._refuse(404, "NoSuchBucket")
        elif self.command == "PUT":
            self._put(name, query, body)
        elif self.command == "POST":
            self._post(name, query, body)
        elif name:
            self._get(name)
        else:
            self._list(query["prefix"][0])

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _dispatch  # noqa: N815

    def _put(self, name: str, query: dict[str, list[str]], body: bytes) -> None:
        if self.headers.get("If-None-Match") == "*" and name in self.service.objects:
            self._refuse(412, "PreconditionFailed")
            return
        if "uploadId" in query:
            self.service.parts[name][int(query["partNumber"][0])] = body
        else:
            self.service.objects[name] = body
        self._answer(200, ETag='"e"')

    def _post(self, name: str, query: dict[str, list[str]], body: bytes) -> None:
        if "delete" in query:
            keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for key in keys:
                self.service.objects.pop(key, None)
            done = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            self._xml("DeleteResult", done)
        elif "uploads" in query:
            self.service.parts[name] = {}
            inner = f"<Bucket>{BUCKET}</Bucket><Key>{escape(name)}</Key><UploadId>1</UploadId>"
            self._xml("InitiateMultipartUploadResult", inner)
        else:
            parts = self.service.parts.pop(name)
            self.service.objects[name] = b"".join(parts[number] for number in sorted(parts))
            self._xml("CompleteMultipartUploadResult", "<ETag>e</ETag>")

    def _get(self, name: str) -> None:
        data = self.service.objects.get(name)
        if data is None:
            self._refuse(404, "NoSuchKey")
            return
        facts = {"ETag": '"e"', "Last_Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}
        start = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        if start:
            facts["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        facts["Content_Length"] = str(len(data) - start)
        sent = b"" if self.command == "HEAD" else data[start:][: self.service.left_bytes]
        self.service.left_bytes -= len(sent)
        self._answer(206 if start else 200, sent, **facts)
        self.close_connection = len(sent) < len(data) - start

    def _list(self, prefix: str) -> None:
        stamp = "<LastModified>2026-10-21T07:28:00.000Z</LastModified><ETag>e</ETag>"
        found = "".join(
            f"<Contents><Key>{escape(name)}</Key>{stamp}<Size>{len(data)}</Size></Contents>"
            for name, data in sorted(self.service.objects.items())
            if name.startswith(prefix)
        )
        self._xml("ListBucketResult", f"<IsTruncated>false</IsTruncated>{found}")

    def _xml(self, root: str, inner: str) -> None:
        self._answer(200, f"<{root}>{inner}</{root}>".encode(), Content_Type="application/xml")
