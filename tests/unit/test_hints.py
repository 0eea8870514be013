"""Hints in headers, in the words that a client may use."""

from __future__ import annotations

import pytest

from api.http.hints import PAUSE_HEADER, RELEASE_HEADER, Hints, hints_in, with_hints
from runtime.errors import InvalidRequest
from runtime.types import CacheParams


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, Hints()),
        ({PAUSE_HEADER: "30"}, Hints(30.0)),
        ({PAUSE_HEADER: "0.5", RELEASE_HEADER: "false"}, Hints(0.5)),
        ({RELEASE_HEADER: "True"}, Hints(None, is_last=True)),
        ({RELEASE_HEADER: "1"}, Hints(None, is_last=True)),
    ],
)
def test_what_headers_say(headers: dict[str, str], expected: Hints):
    assert hints_in(headers) == expected


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((PAUSE_HEADER, said) for said in ("soon", "-1", "3601", "", "[30]", "NaN", "1e9")),
        *((RELEASE_HEADER, said) for said in ("yes", "", "2")),
    ],
)
def test_what_is_not_understood_is_refused_by_its_name(name: str, said: str):
    with pytest.raises(InvalidRequest) as caught:
        hints_in({name: said})
    assert caught.value.param == name


def test_fields_count_before_headers():
    asked = CacheParams(pause_s=5.0)
    assert with_hints(asked, Hints(30.0)) == asked
    assert with_hints(CacheParams(), Hints(30.0, True)) == CacheParams(pause_s=30.0, is_last=True)
