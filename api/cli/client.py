"""Speaking to the server that runs on these settings, with the key that it left for us."""

from __future__ import annotations

import http.client
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from api.cli.errors import NoServer
from runtime.config.running import read_url
from runtime.config.settings import Settings
from runtime.errors import HearthError
from runtime.keys import read_admin_token
from runtime.progress import Progress, Watch

T = TypeVar("T")

CONNECT_S = 5.0
_PATIENCE_S = 30.0
_TIMEOUT_S = 3600.0
_ANY = frozenset({"0.0.0.0", "::", ""})  # noqa: S104


class _ErrorBody(msgspec.Struct):
    message: str


class _ErrorEnvelope(msgspec.Struct):
    error: _ErrorBody


class ServerLink:
    """One server, as its operator on the same machine sees it."""

    def __init__(self, settings: Settings, patience_s: float = _PATIENCE_S) -> None:
        host = "127.0.0.1" if settings.host in _ANY else settings.host
        self._address = (host, settings.port)
        self._home = settings.home
        self._patience_s = patience_s
        """How long it may take to say what it knows; what it does may take long."""

    @property
    def url(self) -> str:
        """Where the server is."""
        host, port = self._address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def get(self, path: str, kind: type[T], **query: str) -> T:
        """What is at a path. Raises NoServer or HearthError."""
        return self.ask("GET", path, kind, query=query)

    def peek(self, path: str, kind: type[T]) -> T:
        """What is at a path, whatever its status. Raises NoServer."""
        with self._answered("GET", path, b"", is_any_status=True) as answer:
            return self._decoded(answer.read(), kind)

    def post(self, path: str, kind: type[T], body: object = None) -> T:
        """What comes of sending that. Raises NoServer or HearthError."""
        return self.ask("POST", path, kind, body=msgspec.json.encode(body))

    def ask(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        query: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> T:
        """The decoded answer.

        Raises:
            NoServer: nothing answers, or what does is no Hearth of this version.
            HearthError: the server refuses; the message is its own.
        """
        target = path + (f"?{urlencode(query)}" if query else "")
        with self._answered(method, target, body) as answer:
            return self._decoded(answer.read(), kind)

    def watched(self, path: str, kind: type[T], watch: Watch, body: bytes = b"") -> T:
        """What comes of long work, of which `watch` is told how far it is. Raises as `ask`."""
        name = b""
        with self._answered("POST", path, body, accept="text/event-stream") as answer:
            for line in iter(answer.readline, b""):
                if line.startswith(b"event: "):
                    name = line[7:].strip()
                elif line.startswith(b"data: "):
                    data = line[6:]
                    if name == b"done":
                        return self._decoded(data, kind)
                    if name == b"error":
                        raise self._refused(data, 0)
                    watch(self._decoded(data, Progress))
        raise self._absent("it left before it was done")

    @contextmanager
    def stream(self, method: str, path: str, body: object = None) -> Generator[Any]:
        """The lines of a long answer, as bytes, while they arrive. Raises as `ask`."""
        data = b"" if body is None else msgspec.json.encode(body)
        with self._answered(method, path, data) as answer:
            yield answer

    @contextmanager
    def _answered(
        self,
        method: str,
        target: str,
        body: bytes,
        *,
        is_any_status: bool = False,
        accept: str | None = None,
    ) -> Generator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(*self._address, timeout=CONNECT_S)
        try:
            try:
                connection.connect()
                connection.sock.settimeout(self._patience_s if method == "GET" else _TIMEOUT_S)
                headers = self._headers(bool(body)) | ({"accept": accept} if accept else {})
                connection.request(method, target, body or None, headers)
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise self._absent(getattr(error, "strerror", None) or str(error)) from error
            # Until it is closed as well, an answer that is not read to its end holds the socket.
            with answer:
                if answer.status >= 400 and not is_any_status:
                    raise self._refused(answer.read(), answer.status)
                yield answer
        finally:
            connection.close()

    def _decoded(self, content: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as error:
            raise self._absent("what answers is no Hearth of this version") from error

    def _headers(self, has_body: bool) -> dict[str, str]:
        headers = {"content-type": "application/json"} if has_body else {}
        token = read_admin_token(self._home)
        return headers | ({"x-api-key": token} if token else {})

    def _refused(self, content: bytes, status: int) -> HearthError:
        if status == 401:
            return HearthError(
                f"The server at {self.url} wants a key, and in {self._home} there is none of its. "
                f"Name the home it was started with: --home or HEARTH_HOME.{self._elsewhere}"
            )
        try:
            return HearthError(msgspec.json.decode(content, type=_ErrorEnvelope).error.message)
        except msgspec.MsgspecError:
            return self._absent(f"what answers says {status}")

    def _absent(self, why: str) -> NoServer:
        return NoServer(
            f"No server answers at {self.url} ({why}). Start one with `hearth serve`, or say which "
            f"it is: its home with --home, or its address with --host and --port.{self._elsewhere}"
        )

    @property
    def _elsewhere(self) -> str:
        """Where the server of the home is, if that is not where it was looked for."""
        url = read_url(self._home)
        if url in (None, self.url):
            return ""
        return f" That of {self._home} is at {url}: leave --host and --port out."
