"""Which family of programs a client belongs to, as its headers tell it."""

from __future__ import annotations

import re
from collections.abc import Mapping

FAMILIES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), family)
    for pattern, family in (
        (r"^claude-(cli|code)\b", "claude-code"),
        (r"^codex[_-]|^codex\b", "codex"),
        (r"\bopencode\b", "opencode"),
        (r"^qwen-?code\b", "qwen-code"),
        (r"^openclaw\b", "openclaw"),
        (r"\bcline\b", "cline"),
        (r"\baider\b", "aider"),
        (r"^pi\b", "pi"),
        (r"^litellm\b", "litellm"),
        (r"\bopen-?webui\b", "open-webui"),
        (r"\bai-sdk\b|^ai/", "ai-sdk"),
        (r"^(async)?openai/", "openai-sdk"),
        (r"^(async)?anthropic/", "anthropic-sdk"),
        (r"^ollama\b", "ollama"),
    )
)
"""The first pattern that is found in the user agent counts: programs before what they are made of.
"""

_ORIGINS = {"originator": "codex", "x-claude-code-session-id": "claude-code"}


def client_family(headers: Mapping[str, str]) -> str:
    """The family's name, empty when it is not known. `headers` are looked up in lower case."""
    for name, family in _ORIGINS.items():
        if name in headers and (name != "originator" or headers[name].startswith(family)):
            return family
    user_agent = headers.get("user-agent", "")[:256]
    for pattern, family in FAMILIES:
        if pattern.search(user_agent):
            return family
    return ""
