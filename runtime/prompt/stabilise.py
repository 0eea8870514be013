"""Stabilise: what clients write anew into a system prompt shall not cost the KV of the rest.

Telemetry is taken out, by rules that are data. A rule says what was observed. It removes one whole
line at the beginning of the first system text, for the client that sends it, or where every field
of the line is one that this client writes. Two clients
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
from runtime.prompt.rewriting import Made, RewriteStep, Rewritten, rewrite
from runtime.types import Image, LineRule, Message

_WORD = r"[a-z][a-z0-9_-]{0,31}"
_COUNT = r"\d{1,9}"
_BILLED = {
    "cch": r"[0-9a-f]{5,16}",
    "cc_workload": _WORD,
    "cc_is_subagent": r"true",
    "cc_prev_req": r"req_[\w-]{1,36}",
    "cc_prompt_id": r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "cc_turn_origin": _WORD,
    "cc_prompt_index": _COUNT,
    "cc_turn_index": _COUNT,
    "cc_gateway": r"1|env",
    "cc_project": r"\w{1,64}",
    "cc_project_src": _WORD,
    "cc_prev_msg": r"msg_\w{1,64}",
    "cc_prev_prompt_index": _COUNT,
    "cc_prev_turn_index": _COUNT,
    "cc_dispatch_entrypoint": _WORD,
}
"""The fields that Claude Code 2.1.329 writes behind its version and entrypoint, and their values,
none of which has room for a sentence."""


class Rule(NamedTuple):
    """One observed shape, which `pattern` matches at the beginning of the first system text.

    `client` is the family that sends it, or `*` where the form alone tells whose it is.
    """

    name: str
    pattern: re.Pattern[str]
    client: str
    observed: str


_OBSERVED = "x-anthropic-billing-header: cc_version=2.1.329.ec4; cc_entrypoint=sdk-cli; cch=7f3a9;"
RULES = (
    Rule(
        "billing_header",
        re.compile(r"x-anthropic-billing-header: cc_version=[^\n]*(?:\n|\Z)"),
        "claude-code",
        _OBSERVED,
    ),
    # A proxy between them drops the headers that tell the client.
    Rule(
        "billing_header",
        re.compile(
            r"x-anthropic-billing-header: "
            r"cc_version=\d{1,4}(?:\.\d{1,5}){2}(?:-[a-z0-9.]{1,32})?\.[0-9a-f]{3,8}; "
            rf"cc_entrypoint={_WORD};"
            rf"(?: (?:{'|'.join(f'{name}=(?:{form})' for name, form in _BILLED.items())});){{0,32}}"
            r"(?:\n|\Z)",
            re.ASCII,
        ),
        "*",
        _OBSERVED,
    ),
)

SYSTEM_FIRST = "system_first"
MOVED_FIELDS = "moved_fields"
RULE_NAMES = frozenset({SYSTEM_FIRST, MOVED_FIELDS, *(rule.name for rule in RULES)})


def stabilising_steps(
    client: str, switched_off: frozenset[str], own: Sequence[LineRule] = ()
) -> list[RewriteStep]:
    """What is done to a request of this client (its family; "" is unknown).

    A message that only held telemetry disappears. OpenClaw is known by what it says, and so is
    telemetry that comes through a proxy. The owner's own rules come last.
    """
    telemetry = next(rule for rule in RULES if rule.client in (client, "*"))
    steps = [RewriteStep(telemetry.name, partial(_without_telemetry, telemetry))]
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


def _without_telemetry(rule: Rule, messages: Sequence[Message]) -> list[Made]:
    made = [Made(message, (number,)) for number, message in enumerate(messages)]
    match = None
    if messages and messages[0].role == "system":
        match = rule.pattern.match(messages[0].text)
    if match is None:
        return made
    stripped = _without(messages[0], match.end())
    is_left = bool(stripped.text.strip() or stripped.images)
    return [Made(stripped, (0,)), *made[1:]] if is_left else made[1:]


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
