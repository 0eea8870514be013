"""Explain: a composed prompt as the model reads it, piece by piece, each with what it is made of.

Belongs to the intake thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from runtime.kv.media import model_ids, place_media
from runtime.prompt.kept_tools import KEPT_TOOLS, RESPELLED
from runtime.prompt.tools_as_text import CALLS, DEFINITIONS, is_lost
from runtime.types import Explained, PromptChange, PromptPart
from runtime.worker.input.beginning import gone_on
from runtime.worker.input.compose import BEGUN, HEALED, Composed, Composer, PromptInput
from runtime.worker.input.places import ends_of
from runtime.worker.input.template import DEFERRED, TOOLS_FIRST, Template
from store.turns import Turn

ANSWER = "the opening of the answer"


class _Cut(NamedTuple):
    """A piece of a rendered text: where it ends, and what it is made of."""

    end: int
    sources: tuple[str, ...]
    rules: tuple[str, ...]


def explain(composer: Composer, composed: Composed) -> Explained:
    """What the model is given. Raises InvalidRequest as `compose` does."""
    template, asked = composer.template, composed.asked
    token_ids = composed.token_ids
    if asked is None:
        whole = PromptPart(("prompt",), template.text_of(token_ids), len(token_ids))
        return Explained(0, (whole,), tuple(token_ids))
    way = composed.lineage.way if composed.lineage is not None else ()
    parts = _healed(template, asked, way)
    num_left = len(token_ids) - sum(part.num_tokens for part in parts)
    if num_left:
        written = template.write(asked.prompt).text
        text = gone_on(written, asked.beginning, composer.dialect)
        cuts = _cuts(template, asked, text, composed)
        first = _number_of(asked, way[-1]) + 1 if way else 0
        start = cuts[first - 1].end if first else 0
        rest = _rendered(template, asked, text[start:], _from(cuts, first, start), num_left)
        if way and rest:  # it has the end of the last turn too, as far as that was not generated
            ids = token_ids[len(token_ids) - num_left :][: rest[0].num_tokens]
            rest[0] = msgspec.structs.replace(rest[0], text=_said(template, ids))
        parts += rest
    return Explained(0, tuple(parts), tuple(token_ids))


def _healed(template: Template, asked: PromptInput, way: Sequence[Turn]) -> list[PromptPart]:
    """Turns that are the very tokens that were generated, each with what was asked before it."""
    parts: list[PromptPart] = []
    first = 0
    for turn in way:
        last = _number_of(asked, turn)
        ids = array("I", turn.token_ids).tolist()
        sources = _tools(asked) if not first else ()
        rules = _rules_of_tools(asked.changes) if not first else ()
        for number in range(first, last + 1):
            sources += _sources(asked, number)
            rules += asked.parts[number].rules
        rules = tuple(dict.fromkeys((*rules, HEALED)))
        parts.append(PromptPart(sources, _said(template, ids), len(ids), rules))
        first = last + 1
    return parts


def _said(template: Template, token_ids: list[int]) -> str:
    """What the model is shown there, with placeholders for pictures."""
    markup = template.markup
    return template.text_of(model_ids(token_ids, markup.placeholder) if markup else token_ids)


def _number_of(asked: PromptInput, turn: Turn) -> int:
    """Which message a turn is; the beginning of the answer comes after all."""
    return asked.links.index(turn.key) if turn.key in asked.links else len(asked.links) - 1


def _tools(asked: PromptInput) -> tuple[str, ...]:
    if _rules_of_tools(asked.changes) == (KEPT_TOOLS,):
        return ("tools of the conversation",)
    return ("tools",) if asked.prompt.tools else ()


def _rules_of_tools(changes: Sequence[PromptChange]) -> tuple[str, ...]:
    """Those that touched all tools."""
    told = {change.rule for change in changes}
    return tuple(rule for rule in (KEPT_TOOLS, RESPELLED) if rule in told)


def _sources(asked: PromptInput, number: int) -> tuple[str, ...]:
    sources = asked.parts[number].sources
    return tuple(f"messages[{one}] ({asked.sent[one].role})" for one in sources)


def _cuts(template: Template, asked: PromptInput, text: str, composed: Composed) -> list[_Cut]:
    """A piece for each message, the first with the tools, and one for the answer's opening."""
    prompt = asked.prompt
    ends = ends_of(template, prompt, text, range(len(prompt.messages)))
    told = {change.rule for change in composed.changes}
    cuts: list[_Cut] = []
    first = tuple(rule for rule in (TOOLS_FIRST, DEFERRED, DEFINITIONS) if rule in told)
    start, last = 0, _Cut(0, _tools(asked), _rules_of_tools(composed.changes) + first)
    for number, end in enumerate(accumulate(ends, max)):
        sources, rules = _sources(asked, number), asked.parts[number].rules
        if is_lost(prompt.messages[number], template.tool_forms):
            rules = (*rules, CALLS)
        if last.end == start:  # what has no text of its own is part of what follows
            sources = last.sources + sources
            rules = tuple(dict.fromkeys(last.rules + rules))
        start, last = last.end, _Cut(end, sources, rules)
        cuts.append(last)
    begun = (f"messages[{len(asked.sent) - 1}] (assistant)",)
    is_begun = asked.beginning is not None
    return [*cuts, _Cut(len(text), (ANSWER, *begun * is_begun), (BEGUN,) * is_begun)]


def _from(cuts: Sequence[_Cut], first: int, start: int) -> list[_Cut]:
    """Those from message `first` on, of a text that begins there."""
    return [cut._replace(end=cut.end - start) for cut in cuts[first:]]


def _rendered(
    template: Template, asked: PromptInput, text: str, cuts: Sequence[_Cut], num_tokens: int
) -> list[PromptPart]:
    """The pieces of a text of so many tokens; what ends a healed turn counts with the first."""
    marked = template.encode(text, [cut.end for cut in cuts])
    total, positions = len(marked.token_ids), marked.positions
    messages = asked.prompt.messages
    pictures = asked.pictures(messages[len(messages) + 1 - len(cuts) :])
    if template.markup is not None and pictures:
        placed = place_media(marked.token_ids, template.markup.placeholder, pictures, positions)
        total, positions = len(placed.token_ids), placed.positions
    shift = num_tokens - total
    at = [0, *(position + shift for position in positions[:-1]), num_tokens]
    chars = [0, *(cut.end for cut in cuts)]
    pieces = zip(cuts, pairwise(chars), pairwise(at), strict=True)
    return [
        PromptPart(cut.sources, text[start:end], last - first, cut.rules)
        for cut, (start, end), (first, last) in pieces
        if end > start or last > first
    ]
