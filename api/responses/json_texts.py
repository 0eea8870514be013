"""The texts in JSON that comes in pieces, each as far as it is known. Pure."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

Path = tuple[str | int, ...]

_SAID = re.compile(
    r"""(?: [^"\\]+ | \\["\\/bfnrt] | \\u(?![dD][89a-fA-F])[\da-fA-F]{4}
    | \\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2} )+""",
    re.VERBOSE,
)
_ODD = re.compile(r"\\(?:u.{4}|.)", re.DOTALL)
"""Half of a pair, or what is no escape."""
_HALF = re.compile(r"\\(?:u(?:.{0,3}|[dD][89abAB][\da-fA-F]{2}(?:\\(?:u.{0,3})?)?))?\Z")
_BETWEEN = re.compile(r'[^"\[\]{},:]+')


class TextPiece(NamedTuple):
    """What was added to the text at `path`; each text begins with a piece that adds nothing."""

    path: Path
    text: str
    is_end: bool = False


class JsonTexts:
    """Reads the pieces. Keys are no texts; where one is there twice, the first one counts."""

    def __init__(self) -> None:
        self._places: list[str | int] = []
        """Of the values that are open: the key or the number of what comes next in each."""
        self._rest = ""
        self._is_key = False
        self._open: list[str] | None = None
        self._path: Path | None = None
        self._texts: dict[Path, list[str]] = {}
        self._ended: set[Path] = set()

    def read(self, text: str) -> list[TextPiece]:
        """What another piece of the JSON adds to its texts."""
        text, self._rest = self._rest + text, ""
        pieces: list[TextPiece] = []
        at = 0
        while at < len(text):
            if self._open is None:
                at = self._outside(text, at, pieces)
            elif _HALF.match(text, at):
                self._rest = text[at:]
                break
            else:
                at = self._inside(text, at, pieces)
        return pieces

    def text(self, *path: str | int) -> str | None:
        """The text at that path so far; None where there is none."""
        found = self._texts.get(path)
        return None if found is None else "".join(found)

    def is_whole(self, *path: str | int) -> bool:
        return path in self._ended

    def whole_in(self, key: str) -> list[str]:
        """The texts that are whole of a list."""
        return ["".join(self._texts[one]) for one in self._texts if self._is_in(key, one)]

    def _is_in(self, key: str, path: Path) -> bool:
        return len(path) == 2 and path[0] == key and path in self._ended

    def _outside(self, text: str, at: int, pieces: list[TextPiece]) -> int:
        if (between := _BETWEEN.match(text, at)) is not None:
            return between.end()
        sign, inner = text[at], self._places[-1] if self._places else None
        if sign == '"':
            self._begin(pieces)
        elif sign in "{[":
            self._places.append("" if sign == "{" else 0)
            self._is_key = sign == "{"
        elif sign in "}]":
            self._places = self._places[:-1]
            self._is_key = False
        elif sign == "," and isinstance(inner, int):
            self._places[-1] = inner + 1
        elif sign == ",":
            self._is_key = True
        return at + 1

    def _inside(self, text: str, at: int, pieces: list[TextPiece]) -> int:
        assert self._open is not None
        if text[at] == '"':
            self._end(pieces)
            return at + 1
        if (found := _SAID.match(text, at)) is not None:
            said, end = json.loads(f'"{found[0]}"', strict=False), found.end()
        else:
            odd = _ODD.match(text, at)
            said, end = "\ufffd", odd.end() if odd is not None else at + 1
        self._open.append(said)
        if self._path is not None:
            pieces.append(TextPiece(self._path, said))
        return end

    def _begin(self, pieces: list[TextPiece]) -> None:
        path = tuple(self._places)
        self._open, self._path = [], None
        if not self._is_key and path not in self._texts:
            self._texts[path], self._path = self._open, path
            pieces.append(TextPiece(path, ""))

    def _end(self, pieces: list[TextPiece]) -> None:
        assert self._open is not None
        if self._path is not None:
            self._ended.add(self._path)
            pieces.append(TextPiece(self._path, "", is_end=True))
        elif self._is_key and self._places:
            self._places[-1] = "".join(self._open)
        self._is_key = False
        self._open = self._path = None
