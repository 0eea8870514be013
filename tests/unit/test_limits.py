"""What a request may cost, by the kind of its route."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.app import ROUTES
from api.limits import MAX_CONTAINERS, Bounds, is_too_nested, narrowed
from runtime.errors import SettingsError
from runtime.limits import GenerateLimits, LimitSettings, PromptLimits, ReadLimits
from runtime.settings import Settings, load_settings
from runtime.types import GenerateRequest, TextPrompt

REQUEST = GenerateRequest(request_id="a", model="m", prompt=TextPrompt(text="Hi"))
VALUES = st.recursive(
    st.text() | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


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


@pytest.mark.parametrize("text", [r"[[[[\"[[[", "\\", '"', '\\"[', "{" * 99, "\\\\" * 3])
def test_a_text_full_of_brackets_and_escapes_is_flat(text: str):
    assert not is_too_nested(json.dumps({"a": [text, text]}).encode(), 2)


def test_more_lists_than_anybody_sends_are_not_even_counted():
    assert not is_too_nested(b"[" + b"[]," * (MAX_CONTAINERS - 1) + b"1]", 2)
    assert is_too_nested(b"[" + b"[]," * MAX_CONTAINERS + b"1]", 2)


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
