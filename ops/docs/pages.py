"""Which pages are made between two marks, and from what."""

from __future__ import annotations

from pathlib import Path

from ops.docs import configuration, sizing

BEGIN, END = "<!-- made by python -m ops.docs -->", "<!-- /made -->"
DOCS = Path(__file__).resolve().parents[2] / "docs"


def made() -> dict[Path, str]:
    """Every such page as it should be."""
    parts = {"configuration": configuration.tables, "sizing": sizing.table}
    pages = {DOCS / f"{name}.md": make() for name, make in parts.items()}
    return {path: between(path.read_text("utf-8"), lines) for path, lines in pages.items()}


def between(text: str, lines: str) -> str:
    """The text with these lines between the marks.

    Raises:
        ValueError: there are no such marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no place for it: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{lines.rstrip()}\n{END}{after}"
