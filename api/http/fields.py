"""The strings that end an answer, whoever's protocol they come in."""

from __future__ import annotations

from collections.abc import Sequence

from api.http.refusal import refuse

MAX_CHARACTERS = 8192
"""Of all together: each takes a hundred bytes in every answer that looks for it."""


def stops_of(stop: str | Sequence[str] | None, field: str, most: int = 64) -> tuple[str, ...]:
    """The strings that end an answer, at most `most` of them.

    Raises:
        InvalidRequest: there are too many, one is empty, or they are too long.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > most:
        refuse(field, f"has {len(stops)} entries, at most {most} are served.")
    if "" in stops:
        refuse(field, "must not contain an empty string: remove it.")
    if (length := sum(map(len, stops))) > MAX_CHARACTERS:
        refuse(field, f"has {length} characters, at most {MAX_CHARACTERS} are served.")
    return stops
