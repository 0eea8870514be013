"""Decoding without the search for garbage."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None]:
    """No garbage is looked for meanwhile, which decoding makes none of: each time that a good part
    more objects are there, all of them would be looked at.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
