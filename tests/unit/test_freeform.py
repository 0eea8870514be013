"""The text of a custom tool, as it stands in the arguments that a model writes."""

from __future__ import annotations

import json

import pytest

from api.openai.freeform import freeform_arguments, freeform_input

TEXT = 'a\\b "c"\n😀 é'


@pytest.mark.parametrize("arguments", [freeform_arguments(TEXT), json.dumps({"input": TEXT})])
def test_a_text_that_is_cut_anywhere_is_its_beginning(arguments: str):
    first = arguments.index(":") + arguments[arguments.index(":") :].index('"') + 1
    cuts = [freeform_input(arguments[:end]) for end in range(first, arguments.rindex('"'))]
    assert all(TEXT.startswith(cut) for cut in cuts)
    assert cuts == sorted(cuts, key=len)
    assert freeform_input(arguments) == TEXT


@pytest.mark.parametrize("arguments", ['{"inp', '{"other": "a"}', '{"input": "a\\qb"}', "[1"])
def test_what_is_no_such_text_stays_as_it_was_written(arguments: str):
    assert freeform_input(arguments) == arguments
