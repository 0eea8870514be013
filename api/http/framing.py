"""Where HTTP/1.1 requests on a connection begin and end, and what of them a parser gets to see.

Pure, and in front of any parser: a head arrives there whole and within bounds or not at all, and
what two programs could read in two ways is refused. How bytes were split on their way changes
nothing. RFC 9112 says what is written here as rules.
"""

from __future__ import annotations

import re
from typing import Literal, NoReturn

from runtime.errors import RequestRejected

MAX_HEAD_BYTES = 65_536
MAX_LINE_BYTES = 16_384
MAX_FIELDS = 100
"""Of a head with its line ends; of the trailers of a chunked body they hold once more."""

METHODS = frozenset(
    (
        b"GET HEAD POST PUT PATCH DELETE OPTIONS TRACE COPY LOCK MKCOL MOVE PROPFIND PROPPATCH "
        b"SEARCH UNLOCK BIND REBIND UNBIND ACL REPORT MKACTIVITY CHECKOUT MERGE NOTIFY SUBSCRIBE "
        b"UNSUBSCRIBE PURGE MKCALENDAR LINK UNLINK"
    ).split()
)
"""What every parser knows, but CONNECT: routes know some of it and say so."""
_REQUEST = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)([/?].*)?", re.IGNORECASE)
_HOST = re.compile(rb"(?:[A-Za-z0-9._\-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_ONCE = frozenset({b"host", b"content-length", b"transfer-encoding"})
"""Who reads the first of two and who reads the second serve two different requests."""

Phase = Literal["between", "head", "body", "chunk_size", "chunk", "chunk_end", "trailers", "over"]


class Malformed(RequestRejected):
    """What arrived is no request that can be served; nothing behind it can be made sense of."""

    code = "malformed_request"
    status = 400


class HeadTooLarge(Malformed):
    """A head, or the trailers of a body, go beyond a bound."""

    code = "request_head_too_large"
    status = 431


class NotImplementedHere(Malformed):
    """It is HTTP, of a kind that nothing here speaks."""

    code = "not_implemented"
    status = 501


class Framing:
    """The state of one connection, request by request."""

    def __init__(self) -> None:
        self.fault: Malformed | None = None
        """Why nothing more of what arrives is read."""
        self._phase: Phase = "between"
        self._restart()

    @property
    def is_between(self) -> bool:
        """Nothing of a request has arrived, or the last one is complete."""
        return self._phase in ("between", "over")

    @property
    def is_in_head(self) -> bool:
        """A head has begun and is not complete."""
        return self._phase == "head"

    @property
    def num_head_bytes(self) -> int:
        """Of a head that is not complete, so far."""
        return self._num_head_bytes if self.is_in_head else 0

    def take(self, held: bytearray) -> bytes:
        """What a parser may be given of `held`, from which it is removed; at most one request.

        Empty while more must arrive, and after a `fault`, which comes with what was before it. A
        body's chunks lose their extensions and trailers. What comes behind a request after which
        its connection is closed is thrown away.
        """
        pieces: list[bytes] = []
        data: list[bytes] = []
        try:
            self._take(held, pieces, data)
        except Malformed as error:
            self.fault = error
            held.clear()
            self._restart()
        if data:
            pieces += (b"%x\r\n" % sum(map(len, data)), *data, b"\r\n")
        if self._phase == "between":
            if self._is_chunked:
                pieces.append(b"0\r\n\r\n")
            if self._is_last:
                self._phase = "over"
            self._restart()
        if self._phase == "over":
            held.clear()
        return b"".join(pieces)

    def _take(self, held: bytearray, pieces: list[bytes], data: list[bytes]) -> None:
        if held and self._phase == "between":
            self._phase = "head"
        while held and not self.is_between:
            if self._phase == "head":
                is_going_on = self._take_head(held, pieces)
            elif self._phase == "body":
                is_going_on = self._take_body(held, pieces)
            else:
                is_going_on = self._take_chunk(held, data)
            if not is_going_on:
                return

    def _restart(self) -> None:
        self._seen = 0
        self._num_head_bytes = 0
        self._request: tuple[bytes, bytes, bytes] | None = None
        self._lines: list[bytes] = []
        self._only: dict[bytes, bytes] = {}
        self._num_fields = 0
        self._is_chunked = False
        self._connection: list[bytes] = []
        self._is_last = False
        self._left = 0
        self._num_data = 0
        self._num_overhead = 0

    # Heads

    def _take_head(self, held: bytearray, pieces: list[bytes]) -> bool:
        """Take the lines of the head that are there; False while it is not complete."""
        while (line := self._line(held, is_head=True)) is not None:
            if self._request is None:
                if line:  # an empty line before a request is nothing
                    self._request = _request_of(line)
            elif line:
                self._add_field(line)
            else:
                pieces.append(self._head(*self._request))
                return True
        return False

    def _line(self, held: bytearray, *, is_head: bool) -> bytes | None:
        """The next line without its end, if it is there."""
        end = held.find(b"\n", self._seen)
        size = len(held) if end < 0 else end + 1
        if size > MAX_LINE_BYTES:
            _too_large(f"a line of it has more than {MAX_LINE_BYTES} bytes")
        if is_head and self._num_head_bytes + size > MAX_HEAD_BYTES:
            _too_large(f"it has more than {MAX_HEAD_BYTES} bytes")
        if end < 0:
            self._seen = size
            return None
        line = bytes(held[:size])
        del held[:size]
        self._seen = 0
        self._num_head_bytes += size
        if not line.endswith(b"\r\n") or b"\r" in line[:-2]:
            _bad("a line must end with CR LF, and neither may be inside of it")
        return line[:-2]

    def _add_field(self, line: bytes, *, is_head: bool = True) -> None:
        """Check a field, and take from that of a head what says where the request ends."""
        self._num_fields += 1
        if self._num_fields > MAX_FIELDS:
            _too_large(f"it has more than {MAX_FIELDS} fields")
        if line[0] in b" \t":
            _bad("a field must not be continued on another line")
        match = _FIELD.fullmatch(line)
        if match is None:
            _bad(
                "a field must be a name, a colon right after it, and a value without control "
                "characters"
            )
        if not is_head:
            return
        name, value = match[1].lower(), match[2].rstrip(b" \t")
        if name in _ONCE:
            if name in self._only:
                _bad(f"{name.decode()} may be given once")
            self._only[name] = value
        if name == b"connection":
            self._connection += [one.strip(b" \t") for one in value.lower().split(b",")]
        line = line.rstrip(b" \t")  # after some values no blanks are taken by some parsers
        # Under its own name it would have a parser lose the body.
        self._lines.append(b"x-" + line if name == b"upgrade" else line)

    def _head(self, method: bytes, target: bytes, version: bytes) -> bytes:
        """The head that a parser sees; the phase is then that of what follows it."""
        host = self._only.get(b"host")
        if host is None and version == b"1.1":
            _bad("the field host is missing")
        if host is not None and not _HOST.fullmatch(host):
            _bad("the field host must be a name or an address, and maybe a port")
        lines = self._lines
        target, authority = _target_of(method, target)
        if authority is not None:
            if host is not None and authority.lower() != host.lower():
                _bad("the address asked for and the field host name two different hosts")
            if host is None:
                lines.insert(0, b"host: " + authority)
        stays = b"keep-alive" in self._connection or version == b"1.1"
        self._is_last = b"close" in self._connection or not stays
        self._begin_body(version)
        first = b"%b %b HTTP/%b" % (method, target, version)
        return b"\r\n".join((first, *lines, b"", b""))

    def _begin_body(self, version: bytes) -> None:
        length = self._only.get(b"content-length")
        coding = self._only.get(b"transfer-encoding")
        if coding is not None:
            if length is not None or version != b"1.1":
                _bad("transfer-encoding excludes content-length, and HTTP/1.0 has none")
            if coding.lower() != b"chunked":
                raise NotImplementedHere("transfer-encoding may only be chunked.")
            self._is_chunked = True
            self._phase = "chunk_size"
            return
        if length is not None and not _LENGTH.fullmatch(length):
            _bad("content-length must be one number")
        self._left = int(length or 0)
        self._phase = "body" if self._left else "between"

    # Bodies

    def _take_body(self, held: bytearray, pieces: list[bytes]) -> bool:
        piece = bytes(held[: self._left])
        del held[: len(piece)]
        pieces.append(piece)
        self._left -= len(piece)
        if not self._left:
            self._phase = "between"
        return True

    def _take_chunk(self, held: bytearray, data: list[bytes]) -> bool:
        """Take a part of a chunked body; False while more of it must arrive."""
        if self._phase == "chunk":
            piece = bytes(held[: self._left])
            del held[: len(piece)]
            data.append(piece)
            self._num_data += len(piece)
            self._left -= len(piece)
            if not self._left:
                self._phase = "chunk_end"
            return True
        if self._phase == "chunk_end":
            return self._end_chunk(held)
        line = self._line(held, is_head=self._phase == "trailers")
        if line is None:
            return False
        if self._phase == "chunk_size":
            self._begin_chunk(line)
        elif line:
            self._add_field(line, is_head=False)
        else:
            self._phase = "between"
        return True

    def _begin_chunk(self, line: bytes) -> None:
        match = _CHUNK.fullmatch(line)
        if match is None:
            _bad("a chunk must begin with its size")
        self._num_overhead += len(line) + 4
        if self._num_overhead > MAX_HEAD_BYTES + self._num_data:
            _bad("the sizes of its chunks take more bytes than what is in them")
        self._left = int(match[1], 16)
        self._phase = "chunk" if self._left else "trailers"
        self._num_head_bytes = self._num_fields = 0

    def _end_chunk(self, held: bytearray) -> bool:
        if not b"\r\n".startswith(held[:2]):
            _bad("a chunk must be as long as its size says")
        if len(held) < 2:
            return False
        del held[:2]
        self._phase = "chunk_size"
        return True


def _request_of(line: bytes) -> tuple[bytes, bytes, bytes]:
    match = _REQUEST.fullmatch(line)
    if match is None:
        _bad("it must begin with a method, an address and HTTP/1.1")
    method, target, major, minor = match.groups()
    if major != b"1" or minor not in b"01":
        raise NotImplementedHere("Ask in HTTP/1.1 or HTTP/1.0.")
    if method not in METHODS:
        raise NotImplementedHere("No route here knows that method.")
    return method, target, major + b"." + minor


def _target_of(method: bytes, target: bytes) -> tuple[bytes, bytes | None]:
    """Path and query of what is asked for, and whom it names if it names anybody."""
    if b"#" in target:
        _bad("the address must not have a fragment (#)")
    if target.startswith(b"/") or (target == b"*" and method == b"OPTIONS"):
        return target, None
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or not _HOST.fullmatch(absolute[1]):
        _bad("the address must begin with / or with http:// and a host")
    rest = absolute[2] or b"/"
    return rest if rest.startswith(b"/") else b"/" + rest, absolute[1]


def _bad(why: str) -> NoReturn:
    raise Malformed(f"The request is no HTTP that is served: {why}.")


def _too_large(why: str) -> NoReturn:
    message = f"The head of the request is too large: {why}. Send fewer or shorter header fields."
    raise HeadTooLarge(message)
