"""How long a model is to stay loaded, in Ollama's words: seconds, or `5m`, `1h30m`, `-1`."""

from __future__ import annotations

import re

from runtime.config.settings import MAX_KEEP_ALIVE_S
from runtime.config.units import TIME, number_in
from runtime.errors import InvalidRequest

_NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?", re.ASCII)


def seconds_of(keep_alive: float | str | None) -> float | None:
    """Seconds; negative is for ever, 0 not at all, None leaves it to the server.

    More than the settings allow is taken for the most that they do: later there is no date.

    Raises:
        InvalidRequest: it is no duration.
    """
    return None if keep_alive is None else min(_asked_s(keep_alive), MAX_KEEP_ALIVE_S)


def _asked_s(keep_alive: float | str) -> float:
    if isinstance(keep_alive, int | float):
        return keep_alive
    text = keep_alive.strip()
    if _NUMBER.fullmatch(text):
        return float(text)
    if len(text.split()) == 1 and (asked_s := number_in(text, TIME)) is not None:
        return asked_s
    message = f"keep_alive is {text[:32]!r}: give seconds, or a duration such as 5m."
    raise InvalidRequest(message, "keep_alive")
