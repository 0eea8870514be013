"""Errors after which nothing that this process computes can be trusted."""

from __future__ import annotations

_MARKS = ("[METAL]", "[metal::", "CUDA", "cuda")


class EngineTainted(Exception):
    """The device reported an error; nothing this process computes can be trusted any more."""


def raise_if_tainted(error: Exception) -> None:
    """Go on only where the error was not the device's.

    Raises:
        EngineTainted: it was.
    """
    if any(mark in str(error) for mark in _MARKS):
        raise EngineTainted(str(error)) from error
