"""Whether a chat template is one: its syntax, checked without rendering anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from typing_extensions import override

_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


class BrokenTemplate(ValueError):
    """A chat template that is none; the message names the file and the line."""


class _Generation(Extension):
    """`{% generation %}`, by which templates for training mark what the model says."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - jinja2 says so

    @override
    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_template(template: object, folder: Path, override_file: str = "") -> None:
    """Raises BrokenTemplate. The template of a model in `folder` is in a file of its own there, or
    in a setting; or it is in the file that its owner gives instead.
    """
    environment = jinja2.Environment(extensions=[_Generation, loopcontrols], autoescape=False)  # noqa: S701
    for text in _texts(template):
        try:
            environment.compile(text, raw=True)
        except jinja2.TemplateSyntaxError as error:
            place = override_file or str(_place(folder))
            message = f"its chat template is broken: {place}, line {error.lineno}: {error.message}"
            raise BrokenTemplate(message) from error


def _texts(template: object) -> Iterator[str]:
    """The one template, or those that a model has by name."""
    if isinstance(template, str):
        yield template
    elif isinstance(template, dict):
        for one in cast("Mapping[str, object]", template).values():
            yield from _texts(one)


def _place(folder: Path) -> Path:
    return next((folder / one for one in _FILES if (folder / one).exists()), folder)
