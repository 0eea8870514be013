"""`make test` runs what it says: every path is there, and every promise has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.promises import PATHS, arguments

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", arguments())
def test_every_path_is_a_test_that_is_there_and_takes_no_minutes(path: str):
    file, _, name = path.partition("::")
    text = (ROOT / file).read_text()
    assert name in ("", *re.findall(r"^(?:async )?def (test_\w+)\(", text, re.MULTILINE))
    before = text[: text.index(f"def {name}(")].rpartition("\n\n\n")[2] if name else ""
    assert "@pytest.mark.soak" not in before


def test_every_promise_of_the_readme_has_a_path():
    promises = re.findall(r"^- \*\*([^*]+?)\.?\*\*", _section("The KV cache"), re.MULTILINE)
    said = {promise.lower() for promise in promises}
    assert len(said) > 3
    for promise in said:
        assert any(one in promise for one in PATHS), promise


def _section(title: str) -> str:
    return (ROOT / "README.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
