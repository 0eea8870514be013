"""Numbers of tokens as flags of commands take them: `4096`, `32k`."""

from __future__ import annotations

import argparse

from runtime.units import TOKENS, number_in


def tokens_of(text: str) -> int:
    """What such a flag means, with the units of the configuration.

    Raises:
        argparse.ArgumentTypeError: it is no number of tokens.
    """
    number = int(text) if text.isascii() and text.isdigit() else number_in(text, TOKENS)
    if not isinstance(number, int) or number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not {TOKENS.name} such as 4096 or 32k")
    return number
