"""What commands print, tables for people and JSON for programs, and what they log meanwhile."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence

import msgspec
import structlog

_PREFIXES = ("", "k", "M", "G", "T")


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
    return "{} {}B".format(*_scaled(num_bytes))


def count(number: float) -> str:
    """A number of tokens or other things, in thousands or millions where it has many digits."""
    return "".join(_scaled(number))


def _scaled(number: float) -> tuple[str, str]:
    power = 0
    while round(number, 1) >= 1000 and power < len(_PREFIXES) - 1:
        number /= 1000
        power += 1
    return f"{number:.1f}" if power else f"{number:.0f}", _PREFIXES[power]


def took(milliseconds: float) -> str:
    """How long something took."""
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    return f"{milliseconds / 1000:.1f} s" if milliseconds < 60_000 else span(milliseconds / 1000)


def fact(name: str, value: object) -> str:
    """A line about one field of an answer, whose name says what it is: bytes, seconds, a count."""
    words = name.removeprefix("num_").removeprefix("is_").replace("_", " ")
    if isinstance(value, bool):
        return f"{words}: {'yes' if value else 'no'}"
    if not isinstance(value, int | float):
        return f"{words}: {value}"
    if name.endswith("_bytes"):
        return f"{words.removesuffix(' bytes')}: {size(value)}"
    if name.endswith("_s"):
        return f"{words.removesuffix(' s')}: {span(value)}"
    return f"{words}: {count(value)}"


def span(seconds: float) -> str:
    """A length of time in the unit that fits."""
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def ago(seconds: float) -> str:
    """How long something is past."""
    return f"{span(seconds)} ago"


def log_errors_only() -> None:
    """Have what works on the store log to stderr, and errors only: stdout is for the answer."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
