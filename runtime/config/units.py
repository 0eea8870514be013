"""Sizes, times and numbers of tokens as people write them: `1.5 GiB`, `1h30m`, `32k`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import NamedTuple

_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-zµ]+)", re.ASCII)
_WHOLE = re.compile(rf"([+-]?)((?:{_PART.pattern}\s*)+)", re.ASCII)
_LARGEST = 1 << 62
_MAX_CHARACTERS = 64


class Quantity(NamedTuple):
    """What a number measures: in words, with examples, and how much each unit is."""

    name: str
    examples: str
    factors: Mapping[str, Decimal]

    @property
    def expected(self) -> str:
        """The rest of a sentence that says what is taken."""
        return f"{self.name} such as {self.examples}"


def _sizes() -> dict[str, Decimal]:
    """In either case: nobody means bits."""
    sizes = {"B": Decimal(1)}
    for power, letter in enumerate("KMGT", 1):
        sizes |= {f"{letter}B": Decimal(1000**power), f"{letter}iB": Decimal(1024**power)}
    return sizes | {name.lower(): size for name, size in sizes.items()}


def _times(unit_s: str) -> dict[str, Decimal]:
    seconds = {"ns": "1e-9", "us": "1e-6", "µs": "1e-6", "ms": "1e-3", "s": "1"}
    seconds |= {"m": "60", "h": "3600", "d": "86400", "w": "604800"}
    return {name: Decimal(length) / Decimal(unit_s) for name, length in seconds.items()}


SIZE = Quantity("a size", "500MB or 1.5GiB", _sizes())
TIME = Quantity("a time", "90s, 5m or 1h30m", _times("1"))
MILLISECONDS = Quantity("a time", "250ms or 1s", _times("1e-3"))
TOKENS = Quantity(
    "a number of tokens",
    "32k",
    {"k": Decimal(1024), "K": Decimal(1024), "M": Decimal(1024**2)},
)
_ALL = (SIZE, TIME, TOKENS)


def number_in(text: str, quantity: Quantity) -> float | None:
    """The number that such a text means, whole where it can be; None if it has no such unit."""
    found = _WHOLE.fullmatch(text.strip()) if len(text) <= _MAX_CHARACTERS else None
    parts = _PART.findall(found[2]) if found is not None else []
    if found is None or any(unit not in quantity.factors for _, unit in parts):
        return None
    if len(parts) > 1 and quantity.factors is not TIME.factors:
        return None
    total = sum((Decimal(number) * quantity.factors[unit] for number, unit in parts), Decimal(0))
    signed = -total if found[1] == "-" else total
    is_whole = abs(signed) < _LARGEST and signed == signed.to_integral_value()
    return int(signed) if is_whole else float(signed)


def quantity_in(text: str) -> str | None:
    """What a text measures, in words; None if that is not to be seen."""
    return next((one.name for one in _ALL if number_in(text, one) is not None), None)
