"""Fetching pictures over TLS from a real server, and from where nothing may be fetched."""

from __future__ import annotations

import datetime as dt
import ipaddress
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typing_extensions import override

from runtime.errors import InvalidRequest
from runtime.types import CacheParams, ChatPrompt, GenerateRequest, Image, Message
from runtime.worker.vision.fetch import PUBLIC, FetchPolicy, fetch, is_public
from runtime.worker.vision.fetched import Fetched
from runtime.worker.vision.fetcher import Fetcher, names_pictures
from tests.waiting import PATIENCE_S

FIELD = "messages[0].content[0].image_url.url"
IMAGE = b"\x89PNG these are the bytes"


class _Handler(BaseHTTPRequestHandler):
    is_over: threading.Event
    asked: list[str]
    shown = IMAGE

    def do_GET(self) -> None:
        routes: dict[str, Callable[[], None]] = {
            "/image.png?size=1": lambda: self._say(200, IMAGE),
            "/changing.png": lambda: self._say(200, self.shown),
            "/moved": lambda: self._move("/image.png?size=1"),
            "/loop": lambda: self._move("/loop"),
            "/inside": lambda: self._move("https://10.0.0.1/secret"),
            "/plain": lambda: self._move("http://localhost/image.png"),
            "/elsewhere": lambda: self._move("//" + self.headers["host"] + "/image.png?size=1"),
            "/file": lambda: self._move("file:///etc/passwd"),
            "/large": lambda: self._say(200, bytes(3000)),
            "/drip": self._drip,
        }
        self.asked.append(self.path)
        routes.get(self.path, lambda: self._say(404, b""))()

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def _move(self, location: str) -> None:
        self.send_response(302)
        self.send_header("location", location)
        self.end_headers()

    def _drip(self) -> None:
        self.wfile.write(b"HTTP/1.0 200 OK\r\n")
        while not self.is_over.wait(0.02):
            try:
                self.wfile.write(b"x")
                self.wfile.flush()
            except OSError:
                return

    @override
    def log_message(self, format: str, *args: object) -> None:
        pass


def write_certificate(folder: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    day = dt.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "server.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[str, FetchPolicy]]:
    with serving(tmp_path_factory.mktemp("tls")) as place:
        yield place


@contextmanager
def serving(folder: Path) -> Generator[tuple[str, FetchPolicy]]:
    """Where a server is, and a policy under which it may be asked."""
    certificate = write_certificate(folder)
    _Handler.is_over = threading.Event()
    _Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(certificate)
    server.socket = inside.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    policy = FetchPolicy(
        is_allowed=lambda address: address.is_loopback,
        max_bytes=2000,
        context=ssl.create_default_context(cafile=str(certificate)),
    )
    yield f"https://localhost:{server.server_port}", policy
    _Handler.is_over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def certificate_of(url: str) -> str:
    place = urlsplit(url)
    return ssl.get_server_certificate((place.hostname or "", place.port or 443))


def refusal(url: str, policy: FetchPolicy = PUBLIC) -> str:
    with pytest.raises(InvalidRequest) as caught:
        fetch(url, FIELD, policy)
    assert caught.value.param == FIELD
    return caught.value.message


def test_a_picture_is_fetched_also_where_it_was_moved(place: tuple[str, FetchPolicy]):
    url, policy = place
    assert fetch(f"{url}/image.png?size=1", FIELD, policy) == IMAGE
    assert fetch(f"{url}/moved", FIELD, policy) == IMAGE


def test_a_redirect_is_checked_like_the_first_address(place: tuple[str, FetchPolicy]):
    url, policy = place
    assert "public internet" in refusal(f"{url}/inside", policy)
    assert "https" in refusal(f"{url}/plain", policy)
    assert "https" in refusal(f"{url}/file", policy)
    assert "redirected too often" in refusal(f"{url}/loop", policy)


def test_a_name_that_changes_its_address_is_asked_once_and_leads_nowhere_else(
    place: tuple[str, FetchPolicy], monkeypatch: pytest.MonkeyPatch
):
    """DNS rebinding: allowed when it is looked up, somewhere else when it is connected to."""
    url, policy = place
    answers = ["127.0.0.1", "10.0.0.1"]
    really = socket.getaddrinfo

    def look_up(host: str, *rest: Any, **named: Any) -> Any:
        return really(answers.pop(0) if host == "localhost" else host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert fetch(f"{url}/image.png?size=1", FIELD, policy) == IMAGE
    assert answers == ["10.0.0.1"]
    # The same name in a redirect is looked up, and judged, again.
    answers[:0] = ["127.0.0.1"]
    assert "public internet" in refusal(f"{url}/elsewhere", policy)
    assert answers == []


def test_what_is_too_large_too_slow_or_missing_is_refused(place: tuple[str, FetchPolicy]):
    url, policy = place
    assert "more than 2000 bytes" in refusal(f"{url}/large", policy)
    assert "404" in refusal(f"{url}/nothing", policy)
    assert "longer than 0.5 s" in refusal(f"{url}/drip", policy._replace(timeout_s=0.5))


def test_a_connection_that_is_made_when_its_time_is_over_is_not_used(
    place: tuple[str, FetchPolicy],
):
    url, policy = place

    class Late(ssl.SSLContext):
        """Takes until the alarm has rung."""

        @override
        def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
            alarms = [one for one in threading.enumerate() if isinstance(one, threading.Timer)]
            for alarm in alarms:
                alarm.join()
            return super().wrap_socket(*args, **options)

    context = Late(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=certificate_of(url))
    late = policy._replace(timeout_s=0.5, context=context)
    assert "longer than 0.5 s" in refusal(f"{url}/drip", late)


def test_a_server_that_cannot_show_its_certificate_is_refused(place: tuple[str, FetchPolicy]):
    url, policy = place
    assert "SSLCertVerificationError" in refusal(url, policy._replace(context=None))
    assert "SSL" in refusal(url.replace("localhost", "127.0.0.1"), policy)


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1/",
        "https://localhost/",
        "https://[::1]/",
        "https://10.1.2.3/",
        "https://192.168.0.1/",
        "https://169.254.169.254/latest/meta-data/",
        "https://[::ffff:127.0.0.1]/",
        "https://[fe80::1]/",
        "https://0.0.0.0/",
        "https://2130706433/",
    ],
)
def test_nothing_is_fetched_from_this_machine_or_its_networks(url: str):
    assert "public internet" in refusal(url)


@pytest.mark.parametrize(
    "url", ["http://example.org/a.png", "file:///etc/passwd", "ftp://example.org/a", "https:///a"]
)
def test_only_https_addresses_are_fetched(url: str):
    assert "only https" in refusal(url)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("172.16.5.4", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("::", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
    ],
)
def test_public_addresses_are_told_from_others(address: str, expected: bool):
    assert is_public(ipaddress.ip_address(address)) is expected


def request(name: str, *urls: str, tenant: str = "", came_after: int = 0) -> GenerateRequest:
    images = (
        Image(at=1, field="a", data=b"here"),
        *(Image(at=2, field=FIELD, url=u) for u in urls),
    )
    prompt = ChatPrompt(messages=(Message(role="user", text="see", images=images),))
    cache = CacheParams(tenant=tenant, after_deletion=came_after)
    return GenerateRequest(request_id=name, model="m", prompt=prompt, cache=cache)


def test_requests_come_back_with_their_pictures_or_are_refused(place: tuple[str, FetchPolicy]):
    url, policy = place
    answers: queue.SimpleQueue[GenerateRequest | tuple[str, InvalidRequest]] = queue.SimpleQueue()
    fetcher = Fetcher(answers.put, lambda name, error: answers.put((name, error)), policy)
    whole = request("whole", f"{url}/image.png?size=1", f"{url}/moved")
    assert names_pictures(whole)
    fetcher.take(whole)
    found = answers.get(timeout=PATIENCE_S)
    assert isinstance(found, GenerateRequest)
    assert not names_pictures(found)
    assert isinstance(found.prompt, ChatPrompt)
    (message,) = found.prompt.messages
    assert [image.data for image in message.images] == [b"here", IMAGE, IMAGE]
    fetcher.take(request("lost", f"{url}/nothing"))
    name, error = cast("tuple[str, InvalidRequest]", answers.get(timeout=PATIENCE_S))
    assert (name, error.param) == ("lost", FIELD)
    fetcher.take(request("dropped", f"{url}/drip"))
    fetcher.drop("dropped")
    fetcher.take(request("last", f"{url}/nothing"))
    name, _ = cast("tuple[str, InvalidRequest]", answers.get(timeout=PATIENCE_S))
    assert name == "last"


class Turns:
    """A fetcher that is asked one request after another, with a clock of ours."""

    def __init__(self, policy: FetchPolicy, max_bytes: int = 1000) -> None:
        self.now_s = 0.0
        self._answers: queue.SimpleQueue[GenerateRequest] = queue.SimpleQueue()
        fetched = Fetched(max_bytes, ttl_s=60.0, clock=lambda: self.now_s)
        self.fetcher = Fetcher(self._answers.put, self._refuse, policy, fetched)
        self._num_taken = 0

    def _refuse(self, name: str, error: InvalidRequest) -> None:
        raise AssertionError(name, error.message)

    def take(self, *urls: str, tenant: str = "", came_after: int = 0) -> tuple[list[bytes], int]:
        """The pictures at these addresses, and how often the server was asked for them."""
        before = len(_Handler.asked)
        self._num_taken += 1
        name = f"r{self._num_taken}"
        self.fetcher.take(request(name, *urls, tenant=tenant, came_after=came_after))
        prompt = self._answers.get(timeout=PATIENCE_S).prompt
        assert isinstance(prompt, ChatPrompt)
        images = [image.data for image in prompt.messages[0].images[1:]]
        return images, len(_Handler.asked) - before


def test_a_picture_of_an_earlier_turn_is_not_fetched_again(place: tuple[str, FetchPolicy]):
    url, policy = place
    turns, first = Turns(policy), f"{url}/image.png?size=1"
    assert turns.take(first) == ([IMAGE], 1)
    assert turns.take(first, f"{url}/changing.png") == ([IMAGE, IMAGE], 1)
    assert turns.take(first, first) == ([IMAGE, IMAGE], 0)


def test_a_picture_that_changes_meanwhile_is_what_it_was_until_its_time_is_over(
    place: tuple[str, FetchPolicy], monkeypatch: pytest.MonkeyPatch
):
    url, policy = place
    turns, changing = Turns(policy), f"{url}/changing.png"
    assert turns.take(changing) == ([IMAGE], 1)
    monkeypatch.setattr(_Handler, "shown", b"another picture")
    turns.now_s = 50.0
    assert turns.take(changing) == ([IMAGE], 0)
    turns.now_s = 105.0
    assert turns.take(changing) == ([IMAGE], 0), "its time begins anew whenever it is wanted"
    turns.now_s = 166.0
    assert turns.take(changing) == ([b"another picture"], 1)


def test_what_was_fetched_is_bounded_and_forgotten_and_each_tenants_own(
    place: tuple[str, FetchPolicy],
):
    url, policy = place
    first, second = f"{url}/image.png?size=1", f"{url}/changing.png"
    turns = Turns(policy, max_bytes=len(IMAGE) + 5)
    turns.take(first)
    assert turns.take(first, tenant="another")[1] == 1
    assert turns.take(first)[1] == 1, "there is room for one"
    assert turns.take(second)[1] == 1
    assert turns.take(second)[1] == 0
    turns.fetcher.forget(1)
    assert turns.take(second, came_after=1)[1] == 1
    assert turns.take(second, came_after=1)[1] == 0


def test_a_picture_that_is_on_its_way_when_something_is_deleted_is_not_kept(
    place: tuple[str, FetchPolicy], monkeypatch: pytest.MonkeyPatch
):
    """Whoever wanted it came before that: it is shown to that request alone."""
    url, policy = place
    turns, here, may_go = Turns(policy), threading.Event(), threading.Event()

    def show(handler: _Handler) -> bytes:
        here.set()
        may_go.wait(PATIENCE_S)
        return IMAGE

    monkeypatch.setattr(_Handler, "shown", property(show))
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(turns.take, f"{url}/changing.png")
        assert here.wait(PATIENCE_S)
        turns.fetcher.forget(1)
        may_go.set()
        assert asked.result() == ([IMAGE], 1)
    assert turns.take(f"{url}/changing.png")[1] == 1, "it waited in the server meanwhile"
    assert turns.take(f"{url}/changing.png", came_after=1)[1] == 1
    assert turns.take(f"{url}/changing.png", came_after=1)[1] == 0


def test_what_may_not_be_fetched_is_refused_whatever_was_fetched_before(
    place: tuple[str, FetchPolicy],
):
    url, policy = place
    fetched = Fetched()
    answers: queue.SimpleQueue[InvalidRequest | GenerateRequest] = queue.SimpleQueue()
    fetcher = Fetcher(answers.put, lambda _, error: answers.put(error), policy, fetched)
    for _ in range(2):
        fetcher.take(request("r", f"{url}/inside"))
        refused = answers.get(timeout=PATIENCE_S)
        assert isinstance(refused, InvalidRequest)
        assert "public internet" in refused.message


def test_what_is_refused_leaves_no_connection_open(tmp_path: Path):
    told: list[BaseException] = []  # each holds what was at hand when it was raised
    with serving(tmp_path) as (url, policy):
        port = int(url.rsplit(":", 1)[1])
        for path in ("/missing", "/large"):
            with pytest.raises(InvalidRequest) as caught:
                fetch(url + path, FIELD, policy)
            told.append(caught.value)
        open_ones = psutil.Process().net_connections()
    assert not [one for one in open_ones if one.raddr and one.raddr.port == port]
