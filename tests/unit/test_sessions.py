"""Who signed in, for how long and for what; how many wrong keys are looked at."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from urllib.parse import urljoin, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.dashboard.sign_in import place
from api.http.sessions import (
    MAX_SESSIONS,
    MAX_WRONG,
    PAGE_TOKEN,
    SESSION_S,
    WRONG_EVERY_S,
    KeyChecker,
    Sessions,
)
from runtime.errors import Forbidden, TooManyWrongKeys
from runtime.keys import Keyring, Principal, digest_of

ALICE, ADMIN, OTHER = "alice-key", "admin-key", "another-admin-key"
KEYS = {"alice": digest_of(ALICE)}
OWN = {"host": "localhost:8420", "origin": "http://localhost:8420", "sec-fetch-site": "same-origin"}


class Clock:
    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def sessions(clock: Clock | None = None) -> Sessions:
    return Sessions(Keyring(KEYS, (digest_of(ADMIN),)), 8420, clock or Clock())


def sent(table: Sessions, token: str, **more: str) -> Mapping[str, str]:
    return {**OWN, "cookie": f"theme=dark; {table.cookie}={token}", **more}


def test_a_cookie_is_who_signed_in_and_says_nothing_of_the_key():
    table = sessions()
    token = table.open(ADMIN)
    assert table.caller("GET", sent(table, token)) == Principal(is_admin=True)
    assert ADMIN not in token
    assert digest_of(ADMIN).removeprefix("sha256:") not in token
    assert table.caller("GET", sent(table, token[:-1])) is None
    assert table.caller("GET", sent(table, table.open(ADMIN) + "x")) is None
    assert table.caller("GET", OWN) is None


def test_a_session_ends_when_it_is_over_and_when_it_is_signed_out():
    clock = Clock()
    table = sessions(clock)
    one, other = table.open(ADMIN), table.open(ADMIN)
    table.close(sent(table, one))
    assert table.find(sent(table, one)) is None
    clock.now_s += SESSION_S - 1
    assert table.find(sent(table, other)) is not None
    clock.now_s += 1
    assert table.find(sent(table, other)) is None


def test_a_session_is_worth_what_its_key_is_and_a_tenants_is_worth_nothing():
    table = sessions()
    for key in (OTHER, ALICE):
        assert table.find(sent(table, table.open(key))) is None


def test_there_are_only_so_many_sessions():
    table = sessions()
    tokens = [table.open(ADMIN) for _ in range(MAX_SESSIONS + 1)]
    kept = [token for token in tokens if table.find(sent(table, token)) is not None]
    assert kept == tokens[1:]


@pytest.mark.parametrize("method", ["POST", "DELETE", "PATCH", "PUT"])
def test_what_changes_something_needs_the_token_of_the_page(method: str):
    table = sessions()
    token, other = table.open(ADMIN), table.open(ADMIN)
    session, foreign = table.find(sent(table, token)), table.find(sent(table, other))
    assert session is not None
    assert foreign is not None
    right = {PAGE_TOKEN: session.page_token}
    assert table.caller(method, sent(table, token, **right)) == Principal(is_admin=True)
    for wrong in ({}, {PAGE_TOKEN: ""}, {PAGE_TOKEN: foreign.page_token}, {PAGE_TOKEN: token}):
        with pytest.raises(Forbidden) as caught:
            table.caller(method, sent(table, token, **wrong))
        assert caught.value.code == "page_token_needed"


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "where",
    [
        {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
        {"origin": "http://localhost:3000"},
        {"origin": "null"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_other_pages_cannot_use_the_cookie(method: str, where: dict[str, str]):
    table = sessions()
    token = table.open(ADMIN)
    session = table.find(sent(table, token))
    assert session is not None
    asked = {"host": "localhost:8420", **where, PAGE_TOKEN: session.page_token}
    cookie = {"cookie": f"{table.cookie}={token}"}
    with pytest.raises(Forbidden) as caught:
        table.caller(method, asked | cookie)
    assert caught.value.code == "origin_not_allowed"


def test_a_link_that_is_followed_is_answered_and_a_form_of_nowhere_is_not():
    table = sessions()
    token = table.open(ADMIN)
    session = table.find(sent(table, token))
    assert session is not None
    bare = {"host": "localhost:8420", "cookie": f"{table.cookie}={token}"}
    link = {"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate"}
    for asked in (bare, bare | link, bare | {"sec-fetch-site": "none"}):
        assert table.caller("GET", asked) == Principal(is_admin=True)
        with pytest.raises(Forbidden):
            table.caller("POST", asked | {PAGE_TOKEN: session.page_token})


def test_many_wrong_keys_close_an_address_to_new_ones_and_to_nobody_else():
    clock, wrong = Clock(), count()
    desk = KeyChecker(Keyring(KEYS, (digest_of(ADMIN),)), clock)
    assert desk.find(ALICE, "a") == Principal("alice")
    for _ in range(10 * MAX_WRONG):  # a program that goes on with an old key
        assert desk.find("old", "a") is None
    for _ in range(MAX_WRONG - 1):
        assert desk.find(f"guess {next(wrong)}", "a") is None
    for key in (f"guess {next(wrong)}", ADMIN):
        with pytest.raises(TooManyWrongKeys) as caught:
            desk.find(key, "a")
        assert caught.value.retry_after_s >= 1
    assert desk.find(ALICE, "a") == Principal("alice")
    assert desk.find("old", "a") is None
    assert desk.find(ADMIN, "b") == Principal(is_admin=True)
    clock.now_s += caught.value.retry_after_s
    assert desk.find(ADMIN, "a") == Principal(is_admin=True)


def test_so_many_keys_can_be_guessed_in_an_hour():
    clock = Clock()
    desk, num_looked_at = KeyChecker(Keyring(KEYS, ()), clock), 0
    for guess in range(36_000):
        clock.now_s += 0.1
        try:
            desk.find(f"guess {guess}", "a")
        except TooManyWrongKeys:
            continue
        num_looked_at += 1
    assert num_looked_at <= MAX_WRONG + 3600 / WRONG_EVERY_S + 1


@given(
    st.one_of(
        st.text(),
        st.text(alphabet="/\\.:@?#%\t\n a-e2fhtps"),
        st.sampled_from(
            ("//evil.example", "/\\evil.example", "/\t/evil.example", "https://evil.example", "")
        ),
    )
)
def test_who_signed_in_stays_on_this_server(wanted: str):
    base = "http://localhost:8420/sign-in"
    there = place(wanted)
    assert urlsplit(urljoin(base, there)).netloc == "localhost:8420"
    assert there.startswith("/")
    assert "//" not in there
    assert "\\" not in there
    assert there.isascii()
    assert there.isprintable()


def test_who_signed_in_gets_what_was_wanted():
    for wanted in ("/", "/metrics", "/admin/cache/chain?conversation=a%20b&x=1"):
        assert place(wanted) == wanted
