"""Varying fields: lines of a system prompt that clients write anew, and that stay in their place.

What precedes such a line is worth a boundary: layers that cannot be sliced are taken up there when
the line has changed. A boundary changes no text, so a shape that is not one of these costs nothing.
"""

from __future__ import annotations

import re

_LINES = (
    r"(?:current (?:date|time)|the current (?:date|time) is|today's date|today is|local time)\b",
    r"<(?:current_)?(?:date|time|datetime)>",
    r"gitStatus:|current branch:|git status:",
)
"""Observed: opencode `Today's date: Sat Nov 21 2026`, pi `Current date: …`, openclaw `Current
time: 11:23.`, Claude Code `gitStatus: This is the git status …`, Codex `<current_date>…`."""
_VARYING = re.compile(rf"^[ \t\-*]{{0,8}}(?:{'|'.join(_LINES)})", re.IGNORECASE | re.MULTILINE)


def varying_from(text: str) -> int | None:
    """Where the first line begins that is known to change; None where there is none."""
    match = _VARYING.search(text)
    return match.start() if match is not None else None
