"""Numbers of tokens on the command line."""

from __future__ import annotations

import pytest

from api.cli.commands import parser


@pytest.mark.parametrize(("text", "number"), [("300", 300), ("2k", 2048), ("1.5K", 1536)])
def test_numbers_of_tokens_may_have_the_units_of_the_configuration(text: str, number: int):
    assert parser().parse_args(["chat", "--max-tokens", text]).max_tokens == number
    assert parser().parse_args(["bench", "--tokens", text]).tokens == number


@pytest.mark.parametrize("text", ["", "0", "-1", "32kB", "5m", "1.0001k", "many"])
def test_what_is_no_number_of_tokens_is_refused_with_an_example(
    text: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        parser().parse_args(["chat", f"--max-tokens={text}"])
    assert "such as 4096 or 32k" in capsys.readouterr().err
