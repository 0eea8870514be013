"""Who is let in, decided without a server."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from api.http.guard import GuardRules, canonical, judge, rules_of
from api.http.sessions import MAX_WRONG
from runtime.config.settings import Settings
from runtime.errors import Forbidden, SettingsError, TooManyWrongKeys, Unauthorized
from runtime.keys import ANYONE, Keyring, Principal, digest_of, needs_of, new_key

ALICE, BOB, ADMIN, TOKEN = "alice-key", "bob-key", "admin-key", "token"
KEYS = {"alice": digest_of(ALICE), "bob": digest_of(BOB)}


def rules(**settings: Any) -> GuardRules:
    return rules_of(Settings(home=Path("/nowhere"), **settings), digest_of(TOKEN))


OPEN = rules()
KEYED = rules(api_keys=KEYS, admin_key=digest_of(ADMIN))


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8420", "localhost", "localhost:8420", "[::1]:8420", "127.0.0.2", "LOCALHOST"],
)
def test_a_server_on_this_machine_answers_to_its_own_names(host: str):
    assert judge("/v1/models", {"host": host}, OPEN) == ANYONE


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8420", "192.168.1.7:8420", "localhost.evil.example", "[::2]"],
)
def test_a_name_that_somebody_made_resolve_here_is_refused(host: str):
    with pytest.raises(Forbidden) as caught:
        judge("/health/live", {"host": host}, OPEN)
    assert caught.value.code == "host_not_allowed"


def test_further_names_can_be_allowed():
    named = rules(allowed_hosts=("Studio.local",))
    assert judge("/", {"host": "studio.local:8420"}, named) == ANYONE


def test_a_page_of_this_server_may_ask_and_pages_of_others_may_not():
    own = {"host": "localhost:8420", "origin": "http://localhost:8420"}
    assert judge("/v1/models", own, OPEN) == ANYONE
    for origin in ("https://evil.example", "http://localhost:3000", "null", ""):
        with pytest.raises(Forbidden) as caught:
            judge("/v1/models", own | {"origin": origin}, OPEN)
        assert caught.value.code == "origin_not_allowed"
    listed = rules(allowed_origins=("http://localhost:3000/",))
    assert judge("/v1/models", own | {"origin": "http://localhost:3000"}, listed) == ANYONE


def test_a_hidden_request_of_another_site_is_refused_and_a_followed_link_is_not():
    hidden = {"host": "localhost", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    with pytest.raises(Forbidden):
        judge("/metrics", hidden, OPEN)
    assert judge("/", hidden | {"sec-fetch-mode": "navigate"}, OPEN) == ANYONE


def basic(key: str) -> str:
    return "Basic " + base64.b64encode(f"me:{key}".encode()).decode()


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {ALICE}"},
        {"authorization": f"bearer  {ALICE} "},
        {"x-api-key": ALICE},
        {"authorization": basic(ALICE)},
    ],
)
def test_a_key_names_its_tenant_however_it_is_sent(headers: dict[str, str]):
    assert judge("/v1/models", headers, KEYED) == Principal("alice")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-api-key": "guess"},
        {"x-api-key": digest_of(ALICE)},
        {"authorization": ALICE},
        {"authorization": "Basic §"},
        {"authorization": basic("guess")},
        {"x-api-key": "\udcff"},
    ],
)
def test_without_a_known_key_only_liveness_is_told(headers: dict[str, str]):
    for path in ("/v1/models", "/metrics", "/", "/admin/cache", "/health/ready"):
        with pytest.raises(Unauthorized):
            judge(path, headers, KEYED)
    assert judge("/health/live", headers, KEYED) == ANYONE


def test_administration_takes_the_admin_key_or_the_token_of_this_machine():
    with pytest.raises(Forbidden) as caught:
        judge("/admin/cache", {"x-api-key": ALICE}, KEYED)
    assert caught.value.code == "admin_key_needed"
    for key in (ADMIN, TOKEN):
        assert judge("/admin/cache", {"x-api-key": key}, KEYED) == Principal(is_admin=True)
    assert judge("/administrators", {"x-api-key": BOB}, KEYED) == Principal("bob")


@pytest.mark.parametrize(
    "path", ["//admin/cache", "///admin//cache", "/admin/cache/", "/", "//", "/v1//models"]
)
def test_a_path_is_judged_as_the_router_reads_it(path: str):
    assert canonical(path) == "/" + "/".join(filter(None, path.split("/")))
    if "admin" in path:
        with pytest.raises(Forbidden):
            judge(canonical(path), {"x-api-key": ALICE}, KEYED)


@pytest.mark.parametrize("tenants", [{}, {"alice": KEYS["alice"]}, KEYS])
@pytest.mark.parametrize("admin_key", [None, digest_of(ADMIN)])
def test_what_is_asked_for_depends_on_the_keys_alone(
    tenants: dict[str, str], admin_key: str | None
):
    use, sums, admin = needs_of(tenants, admin_key)
    assert use == ("API key" if tenants else "nothing")
    assert sums == ("admin key" if len(tenants) != 1 and (tenants or admin_key) else use)
    assert admin == ("admin key" if tenants or admin_key else "nothing")
    here = rules(api_keys=tenants, admin_key=admin_key)
    everywhere = (
        rules(host="0.0.0.0", allow_remote=True, api_keys=tenants, admin_key=admin_key)
        if (tenants)
        else here
    )
    assert here.needs == everywhere.needs == (use, sums, admin)


def test_guesses_are_counted_where_no_key_is_needed_and_nobody_is_kept_out():
    known = rules(admin_key=digest_of(ADMIN))
    for number in range(MAX_WRONG + 5):
        key = {"x-api-key": f"guess-{number}"}
        assert judge("/v1/models", key, known, address="127.0.0.1") == ANYONE
    for path in ("/v1/models", "/health"):
        assert judge(path, {"x-api-key": ADMIN}, known, address="127.0.0.1") == ANYONE
    with pytest.raises(TooManyWrongKeys):
        judge("/admin/cache", {"x-api-key": ADMIN}, known, address="127.0.0.1")


class Digest(str):
    """One that must not be looked at character by character until they differ."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared in a time that tells how much was right")


@pytest.mark.parametrize("key", ["guess", ALICE, BOB, ADMIN, "x" * 10_000])
def test_no_key_is_compared_in_a_time_that_depends_on_it(key: str):
    keyring = Keyring(
        {name: Digest(one) for name, one in KEYS.items()}, (Digest(digest_of(ADMIN)),)
    )
    found = keyring.find(key)
    assert (found is not None) == (key in (ALICE, BOB, ADMIN))


def test_where_no_key_is_needed_any_key_will_do():
    assert judge("/v1/models", {"authorization": "Bearer sk-dummy"}, OPEN) == ANYONE
    assert judge("/admin/cache", {"x-api-key": TOKEN}, OPEN) == Principal(is_admin=True)


def test_other_machines_are_let_in_only_on_purpose_and_with_a_key():
    alone = {"allow_remote": True, "admin_key": digest_of(ADMIN)}
    for settings in ({}, {"allow_remote": True}, {"api_keys": KEYS}, alone):
        with pytest.raises(SettingsError, match="allow_remote"):
            rules(host="0.0.0.0", **settings)
    remote = rules(host="0.0.0.0", allow_remote=True, api_keys=KEYS)
    keyed = {"x-api-key": BOB}
    assert judge("/v1/models", {"host": "192.168.1.7:8420", **keyed}, remote) == Principal("bob")
    with pytest.raises(Forbidden):
        judge("/v1/models", {"host": "evil.example", **keyed}, remote)


def test_a_key_in_plain_text_is_refused_by_name():
    with pytest.raises(SettingsError, match=r"'alice'.*hearth key"):
        rules(api_keys={"alice": "secret"})
    with pytest.raises(SettingsError, match="admin_key"):
        rules(admin_key="secret")


def test_keys_are_long_and_never_the_same():
    assert len({new_key() for _ in range(100)}) == 100
    assert len(new_key()) >= 48
