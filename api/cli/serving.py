"""`hearth serve`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from api.serve import serve as serve_house
from runtime.settings import Settings

if TYPE_CHECKING:
    from api.app import House


def serve(settings: Settings, _: argparse.Namespace) -> int:
    """Serve until a signal says stop; the exit code."""
    return serve_house(settings, lambda: _build(settings))


def _build(settings: Settings) -> House:
    """Imported in a thread, while liveness is already answered."""
    from api.app import build_house  # noqa: PLC0415

    return build_house(settings)
