"""Run uv, and show on one line how far it is: `python ops/installing.py WHAT uv pip sync …`.

uv itself either names every package or says nothing. This names none: what uv warns of, and why it
fails, comes through as it is. Only the standard library is used: nothing else is installed yet.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

_EVERY_S = 0.2
_OF_A_PACKAGE = re.compile(r" [-+~] \S+")
_OF_ALL = re.compile(
    r"(Resolved|Prepared|Installed|Uninstalled|Checked|Audited) (\d+) packages? in"
)
_ASKS_FOR_CERTIFICATES = "--system-certs"
_CERTIFICATES = """\
Hearth: the certificate of the package registry is not known here. Type UV_SYSTEM_CERTS=1 make …
to use those of the system, or name a file with the right one in SSL_CERT_FILE.
"""
_NOW = {"": "looking up packages", "Resolved": "fetching packages", "Prepared": "unpacking"}


class Line:
    """The one line: updated on a terminal, elsewhere told at the beginning and at the end."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begun_s = time.monotonic()
        self._is_live = sys.stderr.isatty()
        if not self._is_live:
            self.say("…\n")

    def say(self, news: str) -> None:
        """Show this behind what is being done."""
        begin = "\r\033[K" if self._is_live else ""
        sys.stderr.write(f"{begin}Hearth: {self._what}{news}")
        sys.stderr.flush()

    def update(self, news: str) -> None:
        """How far it is, on a terminal."""
        if self._is_live:
            self.say(f": {news}, {time.monotonic() - self._begun_s:.0f} s")

    def interrupt(self, text: str) -> None:
        """Something else that is to be read, on a line of its own."""
        sys.stderr.write(("\r\033[K" if self._is_live else "") + text)
        sys.stderr.flush()


class Report:
    """What uv has written so far; what is for people goes to the line's place."""

    def __init__(self, line: Line) -> None:
        self.stage = ""
        self.num_packages = 0
        self._line = line

    def read(self, stream: IO[str]) -> None:
        """Take all there is, in a thread of its own."""
        for text in stream:
            counted = _OF_ALL.match(text)
            if counted is not None:
                self.stage = counted[1]
                self.num_packages = max(self.num_packages, int(counted[2]))
            elif _ASKS_FOR_CERTIFICATES in text:  # a flag that nobody who runs make can give
                self._line.interrupt(_CERTIFICATES)
            elif not _OF_A_PACKAGE.match(text):
                self._line.interrupt(text)


def main(what: str, command: list[str]) -> int:
    """Run it; its exit code."""
    line = Line(what)
    report = Report(line)
    begun_s = time.monotonic()
    cache = _packages_in_cache(command[0])
    num_before = _count(cache)
    uv = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert uv.stderr is not None
    reading = threading.Thread(target=report.read, args=(uv.stderr,))
    reading.start()
    while reading.is_alive():
        news = _NOW.get(report.stage, "unpacking")
        if report.stage == "Resolved" and (fetched := _count(cache) - num_before):
            news = f"{fetched} of {report.num_packages} packages fetched"
        line.update(news)
        reading.join(_EVERY_S)
    code = uv.wait()
    took = f"{time.monotonic() - begun_s:.0f} s"
    line.say(f": done in {took}\n" if code == 0 else f": failed after {took}\n")
    return code


def _packages_in_cache(uv: str) -> Path:
    """Where uv unpacks what it has fetched, a folder for each package."""
    found = subprocess.run([uv, "cache", "dir"], capture_output=True, text=True, check=False)
    return Path(found.stdout.strip() or "/nowhere") / "archive-v0"


def _count(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], sys.argv[2:]))
    except KeyboardInterrupt:
        sys.exit(130)
