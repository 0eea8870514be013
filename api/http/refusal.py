"""How a field that cannot be served is refused."""

from __future__ import annotations

from typing import NoReturn

from runtime.errors import InvalidRequest


def refuse(path: str, problem: str) -> NoReturn:
    """Refuse the request for what stands at `path`; `problem` goes on from there to the remedy.

    Raises:
        InvalidRequest: always.
    """
    raise InvalidRequest(f"{path} {problem}", param=path)
