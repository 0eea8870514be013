"""Recipes: how a server is installed, started and asked, as TOML that anybody can write."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import msgspec

from runtime.errors import HearthError

_SHIPPED = files("api.bench") / "recipes"


class RecipeError(HearthError):
    """A recipe cannot be read, or asks for what there is not."""

    code = "bench_recipe"


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server. In its texts the names that `Peer` has values for are filled in: {port}, {model}.

    `start` is a command that stays in the foreground; without it the server at `url` runs already,
    and nothing is asked that needs a restart. `model` and `second` are what requests name.
    `key` is sent as a bearer token, `body` goes into every request. `install` are commands that
    make {venv}, `files` are written into {home} before the start. `tried` says what of all this
    was run, and where.
    """

    name: str
    title: str
    tried: str
    url: str
    model: str = "{model}"
    second: str | None = None
    start: tuple[str, ...] = ()
    install: tuple[tuple[str, ...], ...] = ()
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    body: dict[str, object] = {}
    key: str | None = None
    ready: str | None = None


def shipped() -> list[str]:
    """The names of the recipes that come with Hearth."""
    return sorted(one.name.removesuffix(".toml") for one in _SHIPPED.iterdir())


def find(word: str) -> Recipe:
    """The recipe by its name, in a file, or for a server that runs at a URL.

    Raises:
        RecipeError: there is none, or it is not well formed.
    """
    if word.startswith(("http://", "https://")):
        url = word.rstrip("/").removesuffix("/v1") + "/v1"
        return Recipe(name=word, title=word, tried="a server that ran already", url=url)
    try:
        return _read(word)
    except OSError as error:
        names = ", ".join(shipped())
        raise RecipeError(f"There is no recipe {word}. Shipped are: {names}.") from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise RecipeError(f"The recipe {word} cannot be used: {error}") from error


def _read(word: str) -> Recipe:
    is_file = word.endswith(".toml")
    text = (Path(word) if is_file else _SHIPPED / f"{word}.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), Recipe)


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with every {name} of `values` replaced; other braces stay."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def fill_all(texts: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Each of them filled."""
    return [fill(text, values) for text in texts]
