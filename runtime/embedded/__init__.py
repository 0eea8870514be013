"""Models that ship inside the package."""

from pathlib import Path

HEARTH_TINY = Path(__file__).parent / "hearth-tiny"
