"""The pages that users read, taken apart: links, fenced blocks, and what is marked as not run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")],
    key=lambda path: path.as_posix(),
)

_FENCE = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")


class Block(NamedTuple):
    """A fenced block, and the line of text above it."""

    page: Path
    line: int
    kind: str
    text: str
    above: str

    @property
    def is_run(self) -> bool:
        """Whether its commands can run anywhere: else a comment says why they are not."""
        return "not run" not in self.above and not self.text.startswith("# not run")

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*kinds: str) -> Iterator[Block]:
    """The fenced blocks of these kinds, of all pages."""
    for page in PAGES:
        text = page.read_text("utf-8")
        for found in _FENCE.finditer(text):
            if found["kind"] in kinds:
                before = text[: found.start()].rstrip()
                line = text.count("\n", 0, found.start()) + 1
                above = before.rpartition("\n")[2]
                yield Block(page, line, found["kind"], found["text"], above)


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text("utf-8"))


def links(page: Path) -> list[str]:
    """Where a page's links go, those to other sites left out."""
    found = (one["target"] for one in _LINK.finditer(prose(page)))
    return [target for target in found if "://" not in target and not target.startswith("mailto:")]


def inline_code(page: Path) -> list[str]:
    """What stands between single backticks."""
    return _CODE.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """The names that headings can be linked by."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", title.replace("`", "")).lower() for title in titles)
    return {title.replace(" ", "-") for title in kept}
