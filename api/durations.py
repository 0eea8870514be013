"""How long a model is to stay loaded, in Ollama's words: seconds, or `5m`, `1h30m`, `-1`."""

from __future__ import annotations

import re

from runtime.errors import InvalidRequest
from runtime.settings import MAX_KEEP_ALIVE_S

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?", re.ASCII)
_WHOLE = re.compile(rf"([+-]?)((?:{_PART.pattern})+)")


def seconds_of(keep_alive: float | str | None) -> float | None:
    """Seconds; negative is for ever, 0 not at all, None leaves it to the server.

    More than the settings allow is taken for the most that they do: later there is no date.

    Raises:
        InvalidRequest: it is no duration.
    """
    asked_s = _asked_s(keep_alive)
    return None if asked_s is None else min(asked_s, MAX_KEEP_ALIVE_S)


def _asked_s(keep_alive: float | str | None) -> float | None:
    if keep_alive is None or isinstance(keep_alive, int | float):
        return keep_alive
    text = keep_alive.strip()
    if found := _WHOLE.fullmatch(text):
        total_s = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(found[2]))
        return -total_s if found[1] == "-" else total_s
    if _NUMBER.fullmatch(text):
        return float(text)
    message = f"keep_alive is {text[:32]!r}: give seconds, or a duration such as 5m."
    raise InvalidRequest(message, "keep_alive")
