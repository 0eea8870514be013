"""`hearth prompt explain`: a prompt as its model reads it, and where two of them part."""

from __future__ import annotations

import argparse

import msgspec

from api.cli.client import ServerLink
from api.cli.prewarm import read_body
from api.cli.views import count, show
from runtime.config.settings import Settings
from runtime.prompt.healing import num_common_characters


class ExplainedPart(msgspec.Struct):
    """A piece of the prompt and what it is made of."""

    sources: list[str]
    num_tokens: int
    rules: list[str]
    text: str

    @property
    def title(self) -> str:
        return ", ".join(self.sources)


class Prompt(msgspec.Struct):
    """A prompt as the server explains it."""

    model: str
    parts: list[ExplainedPart]
    rewrites: list[dict[str, str | int]]
    tokens: list[int]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


class Divergence(msgspec.Struct):
    """Where two prompts part: at which token, in which part of each, and in which of its lines.

    Without a line their texts are the same: other pictures, or other tokens for the same text.
    """

    num_tokens: int
    num_other_tokens: int
    at: int | None = None
    part: str = ""
    other_part: str = ""
    line: int = 0
    text: str = ""
    other_text: str = ""


def prompt(settings: Settings, arguments: argparse.Namespace) -> int:
    """Explain a request's prompt, or say where it parts from that of a second one."""
    link = ServerLink(settings)
    found = _explained(link, arguments.file, arguments)
    if arguments.other is None:
        show(found, _shown(found), as_json=arguments.as_json)
    else:
        parting = parting_of(found, _explained(link, arguments.other, arguments))
        show(parting, _told(parting), as_json=arguments.as_json)
    return 0


def _explained(link: ServerLink, file: str, arguments: argparse.Namespace) -> Prompt:
    body = read_body(file)
    own = {"model": arguments.model, "agent_id": arguments.agent}
    body |= {name: value for name, value in own.items() if value}
    given = {"client": arguments.client, "tenant": arguments.tenant}
    query = {name: value for name, value in given.items() if value}
    content = msgspec.json.encode(body)
    return link.ask("POST", "/admin/prompt/explain", Prompt, query=query, body=content)


def parting_of(one: Prompt, other: Prompt) -> Divergence:
    """Where two prompts part; without `at` where they are the same."""
    parting = Divergence(len(one.tokens), len(other.tokens))
    if one.tokens == other.tokens:
        return parting
    pairs = zip(one.tokens, other.tokens, strict=False)
    shorter = min(len(one.tokens), len(other.tokens))
    parting.at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    parting.part, parting.other_part = (_part_at(found, parting.at) for found in (one, other))
    if one.text == other.text:
        return parting
    at = num_common_characters(one.text, other.text)
    parting.line = one.text.count("\n", 0, at) + 1
    parting.text, parting.other_text = (_line_at(text, at) for text in (one.text, other.text))
    return parting


def _line_at(text: str, at: int) -> str:
    start = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    return text[start : end if end >= 0 else len(text)]


def _part_at(found: Prompt, at: int) -> str:
    """What has the token at this position."""
    for part in found.parts:
        at -= part.num_tokens
        if at < 0:
            return part.title
    return "its end"


def _shown(found: Prompt) -> str:
    pieces: list[str] = []
    for part in found.parts:
        rules = f" · {', '.join(part.rules)}" if part.rules else ""
        pieces += [f"── {part.title} · {count(part.num_tokens)} tokens{rules}", part.text]
    told = ", ".join(f"{one['rule']} ({one['num_places']})" for one in found.rewrites)
    pieces.append(f"── {found.model}: {count(len(found.tokens))} tokens; {told or 'no rule'}")
    return "\n".join(pieces)


def _told(parting: Divergence) -> str:
    numbers = f"{count(parting.num_tokens)} and {count(parting.num_other_tokens)}"
    if parting.at is None:
        return f"They are the same, {count(parting.num_tokens)} tokens."
    if not parting.line:
        return (
            f"The same up to token {parting.at:,} (of {numbers}), in {parting.part}: another "
            "picture, or other tokens for the same text."
        )
    return (
        f"The same up to token {parting.at:,} (of {numbers}), in line {parting.line} of the "
        f"prompt.\n- {parting.part}: {parting.text}\n+ {parting.other_part}: {parting.other_text}"
    )
