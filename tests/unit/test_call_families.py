"""The table of families in the documentation, and how a model's family is found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runtime.prompt.call_marks import MARKS
from runtime.types import Tool
from runtime.worker.output import forced_calls
from runtime.worker.output.dialect import Dialect
from runtime.worker.output.families import FAMILIES, find, speaking

PAGE = Path(__file__).parents[2] / "docs" / "tool-calls.md"
ROWS = {
    name: cells.split(" | ")
    for name, cells in re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    if name in FAMILIES
}
PLAIN = Tool(
    name="look",
    parameters=json.dumps({"type": "object", "properties": {"at": {"type": "integer"}}}),
    is_strict=True,
)
PATTERN = Tool(
    name="look",
    parameters=json.dumps(
        {"type": "object", "properties": {"at": {"type": "string", "pattern": "a+"}}}
    ),
    is_strict=True,
)


def test_the_table_has_every_family_and_no_other():
    assert set(ROWS) == set(FAMILIES)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_row_of_the_table_is_what_the_family_does(name: str):
    models, is_streamed, is_forced, strict = ROWS[name]
    row, spoken = FAMILIES[name], speaking(FAMILIES[name], Dialect())
    assert models
    assert is_streamed == ("yes" if row.streams else "no")
    assert is_forced.startswith("yes") == forced_calls.can_force(spoken, (PLAIN,))
    is_whole = is_forced != "no" and forced_calls.is_exact(spoken, PATTERN)
    assert (strict == "whole schema") == is_whole
    assert (strict == "no") == (row.syntax is None)


@pytest.mark.parametrize("name", sorted(name for name, marks in MARKS.items() if marks.template))
def test_a_family_is_found_by_what_its_template_names(name: str):
    assert find(" ".join(MARKS[name].template), ()) is FAMILIES[name]


@pytest.mark.parametrize("name", sorted(name for name, marks in MARKS.items() if marks.vocab))
def test_a_family_is_found_by_its_vocabulary_where_the_template_says_nothing(name: str):
    assert find("{{ messages }}", MARKS[name].vocab) is FAMILIES[name]


def test_a_template_that_names_no_marks_is_of_no_family():
    assert find("{{ messages }} {{ tools }}", ("<s>", "</s>")) is None
