"""`make test` runs what it says: every path is there, and every promise has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.promises import PATHS, arguments

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", arguments())
def test_every_path_is_a_test_that_is_there_and_takes_no_minutes(path: str):
    assert not re.search(r"\s", path), "a shell takes it for two"
    file, _, name = path.partition("[")[0].partition("::")
    text = (ROOT / file).read_text()
    assert name in ("", *re.findall(r"^(?:async )?def (test_\w+)\(", text, re.MULTILINE))
    before = text[: text.index(f"def {name}(")].rpartition("\n\n\n")[2] if name else ""
    assert "@pytest.mark.soak" not in before


def test_every_promise_of_the_readme_has_a_path():
    section = _section("README.md", "The KV cache")
    promises = re.findall(r"^- \*\*([^*]+?)\.?\*\*", section, re.MULTILINE)
    said = {promise.lower() for promise in promises}
    assert len(said) > 3
    for promise in said:
        assert any(one in promise for one in PATHS), promise


def test_each_kind_of_limits_has_a_path_where_its_page_says_that_it_is_attacked():
    limits = re.findall(r"^### .+ \((.+)\)$", _section("docs/security.md", "Limits"), re.MULTILINE)
    assert len(limits) > 4
    run = {file for files in PATHS.values() for file in files}
    for files in limits:
        assert any(
            file.startswith("tests/unit/") or file.removeprefix("tests/") in run
            for file in files.split(", ")
        ), files


def _section(page: str, title: str) -> str:
    return (ROOT / page).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
