"""What a parser is given of a connection: bounded, in one reading, however it was split."""

from __future__ import annotations

import itertools

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.http.framing import (
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    MAX_LINE_BYTES,
    METHODS,
    Framing,
    HeadTooLarge,
    Malformed,
    NotImplementedHere,
)
from tests.examples import usual

GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def told(*pieces: bytes) -> tuple[bytes, type[Malformed] | None, int]:
    """All that a parser is given of these pieces, the fault that ended it, and how many bytes were
    ever held back.
    """
    framing, held, passed, most = Framing(), bytearray(), b"", 0
    for piece in pieces:
        held += piece
        while held and (taken := framing.take(held)):
            passed += taken
        if framing.fault is not None:
            return passed, type(framing.fault), most
        most = max(most, len(held))
    return passed, None, most


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[begin:end] for begin, end in itertools.pairwise(places)]


def head(*fields: bytes, line: bytes = b"POST /x HTTP/1.1", host: bytes = b"localhost") -> bytes:
    return b"\r\n".join((line, b"Host: " + host, *fields, b"", b""))


BAD = {
    "bare LF": b"GET / HTTP/1.1\nHost: localhost\n\n",
    "bare CR": b"GET / HTTP/1.1\r\nHost: local\rhost\r\n\r\n",
    "NUL in a value": head(b"x-a: \x00"),
    "NUL in a name": head(b"x\x00a: 1"),
    "DEL in a value": head(b"x: \x7f"),
    "folded": head(b"x-a: 1", b" content-length: 5"),
    "folded by a tab": head(b"x-a: 1", b"\tmore"),
    "folded at once": b"GET / HTTP/1.1\r\n Host: localhost\r\n\r\n",
    "space before the colon": head(b"Content-Length : 5") + b"hello",
    "no colon": head(b"content-length"),
    "no name": head(b": 5"),
    "two hosts": head(b"host: localhost"),
    "two different hosts": head(b"Host: evil.example"),
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "an empty host": head(host=b""),
    "a host with a user": head(host=b"me@localhost"),
    "two hosts in one": head(host=b"localhost, evil.example"),
    "two lengths": head(b"Content-Length: 5", b"content-length: 5") + b"hello",
    "two different lengths": head(b"Content-Length: 5", b"content-length: 6") + b"hello!",
    "a list of lengths": head(b"Content-Length: 5, 5") + b"hello",
    "a signed length": head(b"Content-Length: +5") + b"hello",
    "a negative length": head(b"Content-Length: -5") + b"hello",
    "a length in hex": head(b"Content-Length: 0x5") + b"hello",
    "an empty length": head(b"Content-Length: "),
    "an endless length": head(b"Content-Length: " + b"9" * 40),
    "length and coding": head(b"Content-Length: 5", b"Transfer-Encoding: chunked") + b"0\r\n\r\n",
    "coding and length": head(b"Transfer-Encoding: chunked", b"Content-Length: 5") + b"0\r\n\r\n",
    "two codings": head(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
    "a coding of HTTP/1.0": head(b"Transfer-Encoding: chunked", line=b"POST / HTTP/1.0"),
    "a foreign address": head(line=b"GET http://evil.example/ HTTP/1.1"),
    "an address with a user": head(line=b"GET http://localhost@evil.example/ HTTP/1.1"),
    "another port": head(line=b"GET http://localhost:1/ HTTP/1.1", host=b"localhost:2"),
    "a fragment": head(line=b"GET /#x HTTP/1.1"),
    "no address": head(line=b"GET  HTTP/1.1"),
    "spaces in the address": head(line=b"GET /a b HTTP/1.1"),
    "a name as address": head(line=b"GET localhost HTTP/1.1"),
    "another scheme": head(line=b"GET file:///etc/passwd HTTP/1.1"),
    "HTTP/0.9": b"GET /\r\n\r\n",
    "no chunk size": CHUNKED + b"x\r\n",
    "a signed chunk size": CHUNKED + b"+5\r\nhello\r\n",
    "a chunk size in C": CHUNKED + b"0x5\r\nhello\r\n",
    "a chunk size with a space": CHUNKED + b"5 \r\nhello\r\n",
    "a huge chunk size": CHUNKED + b"f" * 17 + b"\r\n",
    "a chunk size ended by LF": CHUNKED + b"5\nhello\r\n",
    "a chunk that is longer": CHUNKED + b"5\r\nhello!\r\n",
    "a chunk ended by LF": CHUNKED + b"5\r\nhello\n0\r\n\r\n",
    "a NUL in an extension": CHUNKED + b"5;\x00\r\nhello\r\n",
    "trailers that fold": CHUNKED + b"0\r\na: b\r\n c\r\n\r\n",
    "trailers that are none": CHUNKED + b"0\r\nGET / HTTP/1.1\r\n\r\n",
}
NOT_SPOKEN = {
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/1.2": head(line=b"GET / HTTP/1.2"),
    "tunnels": head(line=b"CONNECT evil.example:443 HTTP/1.1"),
    "methods of our own": head(line=b"BREW / HTTP/1.1"),
    "methods in small letters": head(line=b"get / HTTP/1.1"),
    "gzip": head(b"Transfer-Encoding: gzip, chunked"),
    "identity": head(b"Transfer-Encoding: identity"),
    "a coding with a tab in it": head(b"Transfer-Encoding: \x0bchunked".replace(b"\x0b", b"x")),
}
TOO_LARGE = {
    "a long address": b"GET /" + b"a" * MAX_LINE_BYTES,
    "a long name": b"GET / HTTP/1.1\r\n" + b"a" * (MAX_LINE_BYTES + 1),
    "a long value": head(b"x: " + b"a" * MAX_LINE_BYTES),
    "many fields": head(*(b"x: 1",) * MAX_FIELDS),
    "long fields": head(*(b"x: " + b"a" * 9_000,) * 8),
    "empty lines": b"\r\n" * MAX_HEAD_BYTES,
    "a long extension": CHUNKED + b"5;" + b"a" * MAX_LINE_BYTES,
    "many trailers": CHUNKED + b"0\r\n" + b"x: 1\r\n" * (MAX_FIELDS + 1),
    "long trailers": CHUNKED + b"0\r\n" + (b"x: " + b"a" * 9_000 + b"\r\n") * 8,
}


@pytest.mark.parametrize("name", BAD)
def test_what_can_be_read_in_two_ways_is_not_read(name: str):
    assert told(BAD[name])[1] is Malformed


@pytest.mark.parametrize("name", NOT_SPOKEN)
def test_what_is_not_spoken_is_refused_as_that(name: str):
    assert told(NOT_SPOKEN[name])[1] is NotImplementedHere


@pytest.mark.parametrize("name", TOO_LARGE)
def test_heads_and_trailers_are_bounded(name: str):
    passed, fault, held = told(*split(TOO_LARGE[name], list(range(0, 140_000, 500))))
    assert fault is HeadTooLarge
    assert held <= MAX_LINE_BYTES, "of a head no more is held as bytes than one line"
    assert len(passed) <= len(CHUNKED)


def test_just_within_the_bounds_is_served():
    fields = [b"x: " + b"a" * (MAX_LINE_BYTES - 5)] * 3
    request = head(*fields, b"y: " + b"b" * 10_000)
    assert told(request) == (request, None, 0)
    many = head(*[b"x: 1"] * (MAX_FIELDS - 1))
    assert told(many) == (many, None, 0)


@pytest.mark.parametrize("after", [b" ", b"\t", b" \t "])
def test_a_parser_sees_no_blanks_after_a_value(after: bytes):
    request = head(b"Content-Length: 2", b"x: y") + b"hi" + CHUNKED + b"2\r\nhi\r\n0\r\n\r\n"
    spaced = request
    for value in (b"localhost", b"Length: 2", b"x: y", b"chunked"):
        spaced = spaced.replace(value, value + after)
    assert told(spaced)[:2] == told(request)[:2]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_what_passes_as_a_method_is_one_to_the_parser(method: bytes):
    passed = told(head(line=method + b" /there HTTP/1.1"))[0]
    assert content(passed).startswith(b"/there")


def test_a_body_of_sizes_more_than_of_content_is_refused():
    assert told(CHUNKED + b"1\r\na\r\n" * 100_000)[1] is Malformed
    passed, fault, _ = told(CHUNKED + b"8\r\nabcdefgh\r\n" * 50_000 + b"0\r\n\r\n")
    assert fault is None
    assert passed == CHUNKED + b"%x\r\n" % 400_000 + b"abcdefgh" * 50_000 + b"\r\n0\r\n\r\n"


def test_a_parser_sees_neither_extensions_nor_trailers_and_does_not_upgrade():
    body = b'5;a=b;c="d"\r\nhello\r\n1\r\n!\r\n0;x\r\nTrailer: yes\r\nHost: evil\r\n\r\n'
    passed, fault, _ = told(CHUNKED + body)
    assert (passed, fault) == (CHUNKED + b"6\r\nhello!\r\n0\r\n\r\n", None)
    upgrade = head(b"Connection: Upgrade", b"uPGRADE: websocket", line=b"GET / HTTP/1.1")
    assert told(upgrade)[0] == upgrade.replace(b"uPGRADE:", b"x-uPGRADE:")


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://LOCALHOST/v1/models?a=b", b"/v1/models?a=b"),
        (b"http://localhost", b"/"),
        (b"https://localhost?x", b"/?x"),
    ],
)
def test_an_address_that_names_this_server_is_a_path(target: bytes, path: bytes):
    passed, fault, _ = told(head(line=b"GET %b HTTP/1.1" % target))
    assert fault is None
    assert passed.startswith(b"GET %b HTTP/1.1\r\nHost: localhost\r\n" % path)
    old = told(b"GET %b HTTP/1.0\r\n\r\n" % target)[0]  # what it names is judged like a host
    assert old.lower() == b"get %b http/1.0\r\nhost: localhost\r\n\r\n" % path


@pytest.mark.parametrize(
    ("line", "fields", "is_last"),
    [
        (b"GET / HTTP/1.0", [], True),
        (b"GET / HTTP/1.0", [b"Connection: Keep-Alive"], False),
        (b"GET / HTTP/1.1", [b"Connection: x, CLOSE"], True),
        (b"GET / HTTP/1.1", [b"Connection: keep-alive", b"Connection: close"], True),
        (b"GET / HTTP/1.1", [], False),
    ],
)
def test_nothing_is_read_behind_the_last_request(line: bytes, fields: list[bytes], is_last: bool):
    request = head(*fields, line=line)
    passed, fault, held = told(request + GET)
    assert (fault, held) == (None, 0)
    assert content(passed).count(b"|") == (1 if is_last else 2)


NAMES = st.sampled_from(
    b"Connection Host host Content-Length Transfer-Encoding X-A X\x0bB".split(b" ")
)
VALUES = st.sampled_from(
    [
        b"localhost",
        b"close",
        b"keep-alive",
        b"5",
        b"0",
        b"05",
        b"chunked",
        b" chunked ",
        b"chunked\t",
        b"a\x00b",
        b"\xff",
        b"",
        b"b\nc: d",
    ]
)
LINES = st.builds(lambda name, value: name + b": " + value, NAMES, VALUES)
ENDS = st.sampled_from([b"\r\n"] * 8 + [b"\n", b"\r", b""])
STARTS = st.sampled_from(
    [b"GET / HTTP/1.1", b"POST /x HTTP/1.1", b"POST http://localhost/x HTTP/1.0", b"\x16\x03\x01"]
)
REQUESTS = st.builds(
    lambda start, lines, ends, body: (
        b"".join(itertools.chain.from_iterable(zip((start, *lines, b""), ends, strict=False)))
        + body
    ),
    STARTS,
    st.lists(LINES, max_size=4).map(lambda lines: [b"Host: localhost", *lines]),
    st.lists(ENDS, min_size=7, max_size=7),
    st.sampled_from(
        [b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"5;x\r\nhello\r\n0\r\na: b\r\n\r\n"]
    ),
)
STREAMS = st.lists(st.one_of(REQUESTS, st.sampled_from([GET, *BAD.values()])), max_size=4).map(
    b"".join
)


def content(passed: bytes) -> bytes:
    """The same with every chunk in pieces of one byte, as chunks depend on what came together."""
    seen: list[bytes] = []

    class Listener:
        def on_url(self, url: bytes) -> None:
            seen.append(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            seen.append(name + b"=" + value + b";")

        def on_body(self, body: bytes) -> None:
            seen.append(body)

        def on_message_complete(self) -> None:
            seen.append(b"|")

    parser = httptools.HttpRequestParser(Listener())
    parser.feed_data(passed)
    return b"".join(seen)


@settings(max_examples=usual(300), deadline=None)
@given(data=STREAMS, cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_how_bytes_were_split_changes_nothing(data: bytes, cuts: list[int]):
    """And what passes is what a parser takes: it never meets what it would refuse."""
    whole, fault, _ = told(data)
    passed, also, _ = told(*split(data, cuts))
    bytewise = told(*split(data, list(range(len(data)))))
    assert fault is also is bytewise[1]
    assert content(whole) == content(passed) == content(bytewise[0])
