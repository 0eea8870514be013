"""Stabilise: what clients write anew into a system prompt shall not cost the KV of the rest.

Telemetry is taken out, by rules that are data. A rule says what was observed. It removes whole
lines at the beginning of a system message, and only for the client that sends them. Two clients
have system texts in places where they cost the others: Claude Code says the same in every session
after what its user said first, which is read before it, and OpenClaw's envelope has fields that are
other ones at every request, which are read last. What a user or a tool says is never touched, and
everything done is told.

Other meaning that changes (a date, the state of a repository) stays where its client put it. What
precedes such a line is worth a boundary: layers that cannot be sliced are taken up there when the
line has changed. A boundary changes no text, so a shape that is not one of these costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from runtime.prompt import openclaw
from runtime.prompt.rewriting import Made, RewriteStep, Rewritten, each, rewrite
from runtime.types import Image, LineRule, Message


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

SYSTEM_FIRST = "system_first"
MOVED_FIELDS = "moved_fields"
RULE_NAMES = frozenset({SYSTEM_FIRST, MOVED_FIELDS, *(rule.name for rule in RULES)})


def stabilising_steps(
    client: str, switched_off: frozenset[str], own: Sequence[LineRule] = ()
) -> list[RewriteStep]:
    """What is done to a request of this client (its family; "" is unknown).

    A message that only held telemetry disappears. OpenClaw is known by what it says. The owner's
    own rules come last.
    """
    steps = [
        RewriteStep(rule.name, each(partial(_stripped, rule)))
        for rule in RULES
        if rule.client == client
    ]
    if client == "claude-code":
        steps.append(RewriteStep(SYSTEM_FIRST, _with_system_first))
    steps.append(RewriteStep(MOVED_FIELDS, _with_fields_last))
    owners = [RewriteStep(rule.name, partial(_with_lines_moved, rule)) for rule in own]
    return [step for step in steps if step.rule not in switched_off] + owners


def stabilise(
    messages: Sequence[Message],
    client: str,
    switched_off: frozenset[str] = frozenset(),
    own: Sequence[LineRule] = (),
) -> Rewritten:
    """Apply these rules and nothing else."""
    return rewrite(messages, stabilising_steps(client, switched_off, own))


def _with_system_first(messages: Sequence[Message]) -> list[Made]:
    """System messages right after what the user said first, before it."""
    roles = [message.role for message in messages]
    first = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    order = list(range(len(roles)))
    if first < len(roles) and roles[first] == "user":
        end = next((i for i in order[first + 1 :] if roles[i] != "system"), len(roles))
        order[first:end] = [*range(first + 1, end), first]
    return [Made(messages[number], (number,)) for number in order]


def _with_fields_last(messages: Sequence[Message]) -> list[Made]:
    """The fields of OpenClaw's system prompt in a system message behind all others.

    An answer that its client began stays the last. Pictures are none of OpenClaw's there.
    """
    made = [Made(message, (number,)) for number, message in enumerate(messages)]
    if not messages or messages[0].role != "system" or messages[0].images:
        return made
    rest, fields = openclaw.parted(messages[0].text)
    if not fields:
        return made
    made[0] = Made(msgspec.structs.replace(messages[0], text=rest), (0,))
    moved = Made(Message(role="system", text="\n\n".join(fields)), (0,))
    made.insert(len(made) - (messages[-1].role == "assistant"), moved)
    return made


def _with_lines_moved(rule: LineRule, messages: Sequence[Message]) -> list[Made]:
    """Lines of the first system messages in a system message before or behind all others.

    A system message with pictures stays as it is; one that had no other lines is left out.
    """
    made: list[Made] = []
    moved: list[str] = []
    sources: list[int] = []
    is_head = True
    for number, message in enumerate(messages):
        is_head = is_head and message.role == "system"
        lines = message.text.split("\n") if is_head and not message.images else []
        ours = [line for line in lines if line.startswith(rule.begins)]
        if not ours:
            made.append(Made(message, (number,)))
            continue
        moved += ours
        sources.append(number)
        rest = "\n".join(line for line in lines if not line.startswith(rule.begins))
        if rest.strip():
            made.append(Made(msgspec.structs.replace(message, text=rest), (number,)))
    if moved:
        last = len(made) - (messages[-1].role == "assistant")
        lines_moved = Message(role="system", text="\n".join(moved))
        made.insert(0 if rule.to == "first" else last, Made(lines_moved, tuple(sources)))
    return made


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
    r"now: \d{4}-\d\d-\d\d|\[message_id: |## inbound context \(trusted metadata\)",
    r"<(?:current_)?(?:date|time|datetime)>",
    r"gitStatus:|current branch:|git status:",
)
"""Observed: opencode `Today's date: Sat Nov 21 2026`, pi `Current date: …`, openclaw `Current
time: 11:23.`, Claude Code `gitStatus: This is the git status …`, Codex `<current_date>…`."""
_VARYING = re.compile(
    rf"^[ \t\-*]{{0,8}}(?:{'|'.join(_VARYING_LINES)})"
    r"|(?<=[.!?] )(?:the )?current (?:date|time)\b[^\n]{0,30}\d",
    re.IGNORECASE | re.MULTILINE,
)
"""At the beginning of a line, or of a sentence that has a figure in it (`You are X. Current date:
2026-11-21.`)."""


def varying_from(text: str) -> int | None:
    """Where the first line begins that is known to change; None where there is none."""
    match = _VARYING.search(text)
    return match.start() if match is not None else None
