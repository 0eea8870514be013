"""The rules of `stabilise`, as data: telemetry that a known client puts into its system prompt.

A rule says what was observed. It removes whole lines at the beginning of a system message, and only
for the client that sends them: what a user or a tool says is never touched, and what carries
meaning (a date, the state of a repository) stays where its client put it, whatever that costs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


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
