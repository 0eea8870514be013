"""Stabilise: what clients write anew into a system prompt shall not cost the KV of the rest.

Telemetry is taken out, by rules that are data. A rule says what was observed. It removes whole
lines at the beginning of a system message, and only for the client that sends them: what a user or
a tool says is never touched, and everything done is told.

What carries meaning (a date, the state of a repository) stays where its client put it. What
precedes such a line is worth a boundary: layers that cannot be sliced are taken up there when the
line has changed. A boundary changes no text, so a shape that is not one of these costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from runtime.prompt.rewriting import RewriteStep, Rewritten, each, rewrite
from runtime.types import Image, Message


class Rule(NamedTuple):
    """One observed shape, which `pattern` matches at the beginning of a system message."""

    name: str
    pattern: re.Pattern[str]
    client: str
    observed: str


RULES = (
    Rule(
        "billing_header",
        re.compile(r"x-anthropic-billing-header: cc_version=[^\n]*(?:\n|\Z)"),
        "claude-code",
        "x-anthropic-billing-header: cc_version=2.1.329.ec4; cc_entrypoint=sdk-cli; cch=7f3a9;",
    ),
)

RULE_NAMES = frozenset(rule.name for rule in RULES)


def rules_for(client: str, switched_off: frozenset[str]) -> Sequence[Rule]:
    """The rules that change a request of this client (its family; "" is unknown)."""
    return tuple(rule for rule in RULES if rule.client == client and rule.name not in switched_off)


def telemetry_steps(rules: Sequence[Rule]) -> list[RewriteStep]:
    """One step for each rule. A message that only held telemetry disappears."""
    return [RewriteStep(rule.name, each(partial(_stripped, rule))) for rule in rules]


def stabilise(messages: Sequence[Message], rules: Sequence[Rule]) -> Rewritten:
    """Apply these rules and nothing else."""
    return rewrite(messages, telemetry_steps(rules))


def _stripped(rule: Rule, message: Message) -> Message | None:
    match = rule.pattern.match(message.text) if message.role == "system" else None
    if match is None:
        return message
    stripped = _without(message, match.end())
    return stripped if stripped.text.strip() or stripped.images else None


def _without(message: Message, end: int) -> Message:
    """The message without its first `end` characters."""

    def earlier(image: Image) -> Image:
        return msgspec.structs.replace(image, at=max(image.at - end, 0))

    images = tuple(map(earlier, message.images))
    return msgspec.structs.replace(message, text=message.text[end:], images=images)


_VARYING_LINES = (
    r"(?:current (?:date|time)|the current (?:date|time) is|today's date|today is|local time)\b",
    r"<(?:current_)?(?:date|time|datetime)>",
    r"gitStatus:|current branch:|git status:",
)
"""Observed: opencode `Today's date: Sat Nov 21 2026`, pi `Current date: …`, openclaw `Current
time: 11:23.`, Claude Code `gitStatus: This is the git status …`, Codex `<current_date>…`."""
_VARYING = re.compile(
    rf"^[ \t\-*]{{0,8}}(?:{'|'.join(_VARYING_LINES)})", re.IGNORECASE | re.MULTILINE
)


def varying_from(text: str) -> int | None:
    """Where the first line begins that is known to change; None where there is none."""
    match = _VARYING.search(text)
    return match.start() if match is not None else None
