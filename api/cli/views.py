"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import msgspec

_UNITS = ("B", "kB", "MB", "GB", "TB")


def show(answer: object, text: str, *, as_json: bool) -> int:
    """Print it the way that was asked for; the exit code of a command that did what it should."""
    written = msgspec.json.encode(answer).decode() if as_json else text
    sys.stdout.write(written.rstrip("\n") + "\n")
    return 0


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Rows as columns, the first row being the head."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def size(num_bytes: float) -> str:
    """Bytes in the unit that fits."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes /= 1000
        unit += 1
    return f"{num_bytes:.0f} {_UNITS[unit]}" if unit == 0 else f"{num_bytes:.1f} {_UNITS[unit]}"


def span(seconds: float) -> str:
    """A length of time in the unit that fits."""
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def ago(seconds: float) -> str:
    """How long something is past."""
    return f"{span(seconds)} ago"
