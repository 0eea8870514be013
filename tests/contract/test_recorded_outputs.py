"""Every recorded output of `canitoolcall` is read as the package says, but for what docs name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import recorded_outputs
from tests.recorded_outputs import Case

DOCS = Path(__file__).parents[2] / "docs" / "tool-calls.md"


@pytest.mark.parametrize("case", recorded_outputs.cases(), ids=lambda case: case.id)
def test_an_output_is_read_as_it_is_meant(case: Case):
    found = recorded_outputs.problems(case)
    assert bool(found) == (case.id in recorded_outputs.POLICIES), found


@pytest.mark.parametrize("case", recorded_outputs.cases(), ids=lambda case: case.id)
def test_a_whole_answer_has_no_call_whose_arguments_are_not_whole(case: Case):
    for call in recorded_outputs.whole(case).tool_calls:
        assert isinstance(json.loads(call.arguments_raw or ""), dict)


def test_the_count_in_docs_is_that_of_the_version_that_is_installed():
    num, num_other = len(recorded_outputs.cases()), len(recorded_outputs.POLICIES)
    num_soft = sum(why == "blanks" for why in recorded_outputs.POLICIES.values())
    row = f"| **Hearth** | {num} | {num - num_other} | {num_soft} | {num_other - num_soft} |"
    assert row in DOCS.read_text()
    assert f"`canitoolcall` {recorded_outputs.VERSION}" in DOCS.read_text()
