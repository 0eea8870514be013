"""The rules of `stabilise`, as data: what real clients put into early prompts that changes.

Each rule says what was observed. A `strip` removes telemetry that is not meant for the model; a
`relocate` moves whole lines to the end of the prompt, values intact; a `keep` notes a shape that
looks volatile, is not, and stays.

Patterns never try two ways to share out a run of blanks (`*+` gives nothing back): on a line of
thousands of them that stands still for seconds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

Scope = Literal["system", "early", "user"]
"""System messages; those and the first user message; or all user messages."""

_DATE = (
    r"(?:[A-Z][a-z]{2,8},? )?"
    r"(?:[A-Z][a-z]{2,8} \d{1,2},? \d{4}|\d{1,2} [A-Z][a-z]{2,8} \d{4}|\d{4}-\d{2}-\d{2}"
    r"|\d{1,2}/\d{1,2}/\d{4})"
)
_GIT_STATUS = (
    r"^gitStatus: .*(?:\n(?:Current branch: .*|Main branch .*|Git user: .*|[ \t]*"
    r"|Status:(?:\n(?!\n).+)*|Recent commits:(?:\n[0-9a-f]{7,40} .*)*)$)*"
)


class Rule(NamedTuple):
    """One observed shape. `pattern` matches whole lines, unless it is `inline`.

    With `is_unmistakable` the shape alone decides; otherwise only requests of one of the `clients`
    are changed. `observed` is what a client really sent.
    """

    name: str
    kind: Literal["strip", "relocate", "keep"]
    scope: Scope
    pattern: re.Pattern[str]
    clients: tuple[str, ...]
    observed: str
    is_unmistakable: bool = True
    is_inline: bool = False


def _lines(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)


RULES = (
    Rule(
        "billing_header",
        "strip",
        "system",
        _lines(r"^x-anthropic-billing-header:.*$"),
        ("claude-code",),
        "x-anthropic-billing-header: cc_version=2.1.329.ec4; cc_entrypoint=sdk-cli;",
    ),
    Rule(
        "cch_nonce",
        "strip",
        "system",
        _lines(r"(?<=[; ])cch=[0-9a-f]{4,64};?[ \t]?"),
        ("claude-code",),
        "x-client-header: cc_entrypoint=cli; cch=7f3a9;",
        is_inline=True,
    ),
    Rule(
        "current_date",
        "relocate",
        "early",
        _lines(
            r"^[ \t]*+(?:<system-reminder>[ \t]*+\n?)?[ \t]*+(?:[-*] )?(?:Today's date(?: is|:)"
            r"|The current date is:?|Current date(?: is|:)|<current_date>)[ \t]*"
            + _DATE
            + r"[^\n<]*+(?:</current_date>)?[ \t]*+(?:\n?</system-reminder>[ \t]*)?$"
        ),
        ("claude-code", "codex", "opencode", "qwen-code"),
        "Today's date is 2026-11-21.",
    ),
    Rule(
        "current_time",
        "relocate",
        "early",
        _lines(
            r"^[ \t]*(?:[-*] )?(?:The )?[Cc]urrent (?:date and )?time(?: is|:)"
            r".*\b\d{1,2}:\d{2}.*$"
        ),
        ("openclaw", "cline"),
        "Current time is Saturday, November 21st, 2026 - 11:23 (UTC)",
    ),
    Rule(
        "git_status",
        "relocate",
        "system",
        _lines(_GIT_STATUS),
        ("claude-code",),
        "gitStatus: This is the git status at the start of the conversation. [...]\n"
        "Current branch: main\n\nStatus:\n M a.py\n\nRecent commits:\n0a1b2c3 Begin",
    ),
    Rule(
        "message_id",
        "relocate",
        "user",
        _lines(r"^\[message_id: [^\]\n]+\]$|^[ \t]*\"message_id\": \"[^\"\n]*\",?$"),
        ("openclaw",),
        "[message_id: 8c1f22d0]",
        is_unmistakable=False,
    ),
    Rule(
        "run_stats",
        "relocate",
        "user",
        _lines(r"^Stats: runtime .*$"),
        ("openclaw",),
        "Stats: runtime 42s, tokens 12.3k (in 11.9k / out 400)",
        is_unmistakable=False,
    ),
    Rule(
        "tool_timing",
        "keep",
        "user",
        _lines(r"^(?:Chunk ID: [0-9a-f]+|Wall time: [\d.]+ seconds)$"),
        ("codex",),
        "Chunk ID: 1f62e7\nWall time: 0.0000 seconds",
    ),
    Rule(
        "system_reminder",
        "keep",
        "early",
        _lines(r"^<system-reminder>$"),
        ("claude-code", "qwen-code"),
        "<system-reminder>\nAs you answer, use this context: [...]\n</system-reminder>",
    ),
)
"""In the order in which they are applied. What is kept was found frozen once it was sent: moving
it would break prefixes that hold."""

RULE_NAMES = frozenset(rule.name for rule in RULES)


def rules_for(client: str, switched_off: frozenset[str]) -> Sequence[Rule]:
    """The rules that change a request of this client (its family; "" is unknown)."""
    return tuple(
        rule
        for rule in RULES
        if rule.kind != "keep"
        and rule.name not in switched_off
        and (rule.is_unmistakable or client in rule.clients)
    )
