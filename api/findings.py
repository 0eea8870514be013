"""What a look at the setup gives."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """One thing that was looked at. Without a remedy it is as it should be."""

    subject: str
    fact: str
    remedy: str | None = None
