"""What a request may cost, by the kind of its route."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.app import ROUTES
from api.http.limits import LONG_NUMBER, MAX_NUMBER, SLOW_NUMBER_PARTS, BodyCheck, Bounds, narrowed
from runtime.config.limits import GenerateLimits, LimitSettings, PromptLimits, ReadLimits
from runtime.config.settings import Settings, load_settings
from runtime.errors import SettingsError
from runtime.types import GenerateRequest, TextPrompt
from tests.unit.test_framing import split

REQUEST = GenerateRequest(request_id="a", model="m", prompt=TextPrompt(text="Hi"))
VALUES = st.recursive(
    st.text() | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def checked(pieces: Iterable[bytes], depth: int, parts: int = 1 << 30) -> BodyCheck:
    check = BodyCheck(depth, parts)
    for piece in pieces:
        check.feed(piece)
    check.feed(b"", is_last=True)
    return check


def is_too_nested(body: bytes, depth: int) -> bool:
    return checked([body], depth).is_too_nested


def depth_of(value: object) -> int:
    match value:
        case dict():
            return 1 + max(map(depth_of, value.values()), default=0)
        case list():
            return 1 + max(map(depth_of, value), default=0)
        case _:
            return 0


@given(VALUES)
def test_brackets_are_counted_where_they_nest_and_not_in_texts(value: object):
    for ensure_ascii in (True, False):
        body = json.dumps(value, ensure_ascii=ensure_ascii).encode()
        depth = depth_of(value)
        assert not is_too_nested(body, depth)
        assert depth == 0 or is_too_nested(body, depth - 1)


def bad_byte_of(body: bytes) -> int | None:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


PARTS = st.sampled_from(
    ["\\", '"', "[", "]", "{", "}", "a", "é", "\\\\", '\\"', "[" * 9, "\x00", "𝄞"]
)


@given(
    parts=st.lists(PARTS, max_size=30),
    cuts=st.lists(st.integers(0, 90), max_size=9),
    lost=st.sampled_from([b"", b"", b"\xff", b"\xe2\x82", b"\x9d"]),
    depth=st.integers(0, 9),
)
def test_where_a_body_was_split_changes_nothing_of_what_is_found(
    parts: list[str], cuts: list[int], lost: bytes, depth: int
):
    """Be it JSON or not, and UTF-8 or not."""
    body = "".join(parts).encode()
    body = body[: len(body) // 2] + lost + body[len(body) // 2 :]
    whole = checked([body], depth)
    pieces = checked(split(body, cuts), depth)
    assert (whole.is_odd, whole.bad_byte) == (pieces.is_odd, pieces.bad_byte)
    assert whole.bad_byte == bad_byte_of(body)


@pytest.mark.parametrize("text", [r"[[[[\"[[[", "\\", '"', '\\"[', "{" * 99, "\\\\" * 3])
def test_a_text_full_of_brackets_and_escapes_is_flat(text: str):
    assert not is_too_nested(json.dumps({"a": [text, text]}).encode(), 2)


def eighths_of(value: object) -> int:
    """The least that any way to write the value comes to."""
    match value:
        case dict():
            return 8 * (1 + len(value)) + sum(map(eighths_of, value.values()))
        case list():
            return 8 + sum(map(eighths_of, value)) + max(len(value) - 1, 0)
        case str():
            return 8
        case _:
            return 0


@given(VALUES, st.lists(st.integers(0, 200), max_size=5))
def test_all_that_decoding_makes_an_object_of_is_counted(value: object, cuts: list[int]):
    """Each list, object, field name and text, and numbers by their commas."""
    for ensure_ascii in (True, False):
        body = json.dumps(value, ensure_ascii=ensure_ascii).encode()
        parts = checked([body], 99).num_parts
        assert parts >= eighths_of(value) // 8
        assert checked(split(body, cuts), 99).num_parts == parts
        assert not checked([body], 99, parts).is_odd
        assert parts == 0 or checked(split(body, cuts), 99, parts - 1).has_too_many_parts


SLOW = st.sampled_from(["1e300", "-12.5E-300", "1" * LONG_NUMBER, "0." + "0" * LONG_NUMBER + "1"])
QUICK = st.sampled_from(["1", "-2.5", "1e22", "9" * (LONG_NUMBER - 1), "true", '"1e300"', "[]"])


@given(st.lists(SLOW | QUICK, max_size=20), st.lists(st.integers(0, 200), max_size=9))
def test_a_slow_number_counts_as_many_parts_wherever_the_body_was_split(
    values: list[str], cuts: list[int]
):
    body = f"[{','.join(values)}]".encode()
    num_slow = sum(len(one) >= LONG_NUMBER or one.endswith("300") for one in values)
    parts = checked(split(body, cuts), 9).num_parts
    assert (
        num_slow * SLOW_NUMBER_PARTS <= parts < num_slow * SLOW_NUMBER_PARTS + 3 * len(values) + 2
    )


@given(st.integers(MAX_NUMBER - 2, MAX_NUMBER + 2), st.lists(st.integers(0, 1100), max_size=9))
def test_a_number_without_end_is_seen_before_it_is_read(length: int, cuts: list[int]):
    for body in (b"1" * length, b"1." + b"1" * (length - 2), b"[1e" + b"1" * (length - 2) + b"]"):
        assert checked(split(body, cuts), 9).has_endless_number == (length > MAX_NUMBER)
    assert not checked([b'"' + b"1" * length + b'"'], 9).has_endless_number


def configured(folder: Path, text: str) -> Settings:
    (folder / "hearth.toml").write_text(text)
    return load_settings({"home": str(folder)}, {})


def test_a_kind_keeps_its_other_defaults(tmp_path: Path):
    settings = configured(tmp_path, "[limits.read]\ntime_s = 5\n")
    assert settings.limits == LimitSettings(read=ReadLimits(time_s=5))
    assert settings.limits.read.body_bytes == 65_536


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[limits.embeddings]\ndepth = 3", "The nearest is limits.embed."),
        ("[limits.read]\nprompt_tokens = 3", "limits.read.prompt_tokens"),
        ("[limits.generate]\noutput_token = 3", "The nearest is limits.generate.output_tokens."),
        ("[limits.admin]\ndepth = 0", "a whole number from 1 to 512"),
    ],
)
def test_what_is_no_limit_is_named_with_the_nearest(tmp_path: Path, text: str, hint: str):
    with pytest.raises(SettingsError) as refused:
        configured(tmp_path, text)
    assert hint in refused.value.message


def test_what_holds_for_all_routes_holds_for_each(tmp_path: Path):
    text = "max_body_bytes = 1000\nrequest_deadline_s = 7\n[limits.history]\nbody_bytes = 900"
    settings = configured(tmp_path, text)
    bounds = {kind: Bounds.of(kind, settings) for kind in ROUTES}
    assert {kind: one.body_bytes for kind, one in bounds.items()} == {
        **dict.fromkeys(ROUTES, 1000),
        "history": 900,
    }
    assert bounds["history"].body_setting == "limits.history.body_bytes"
    assert bounds["embed"].body_setting == "max_body_bytes"
    times_s = {kind: one.time_s for kind, one in bounds.items()}
    assert times_s == {
        "generate": None,
        "embed": 7,
        "prewarm": 60,
        "history": 60,
        "admin": None,
        "read": 30,
    }


def test_a_request_is_cut_down_to_what_its_route_may_ask():
    limits = GenerateLimits(prompt_tokens=9, output_tokens=5, time_s=3)
    for wanted, granted in ((None, 5), (6, 5), (4, 4), (0, 0)):
        asked = narrowed(
            GenerateRequest(request_id="a", model="m", prompt=REQUEST.prompt, max_tokens=wanted),
            limits,
        )
        assert (asked.max_prompt_tokens, asked.max_tokens, asked.deadline_s) == (9, granted, 3)
    assert narrowed(REQUEST, GenerateLimits()) == REQUEST
    assert narrowed(REQUEST, PromptLimits(prompt_tokens=9)).max_prompt_tokens == 9
    assert narrowed(REQUEST, ReadLimits()) == REQUEST
