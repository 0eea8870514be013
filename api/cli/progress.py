"""How far long work has come: a bar on a terminal, plain lines elsewhere. Always on stderr."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO

from runtime.progress import Progress, Watch

_LINE_EVERY = 10
"""Percent between two plain lines of one step."""


@contextmanager
def watching(what: str) -> Generator[Watch]:
    """Show what the given function is told for as long as the block lasts."""
    if not sys.stderr.isatty():
        yield _Lines(what, sys.stderr).watch
        return
    # It takes a tenth of a second to import, which plain lines need not pay.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    from rich.progress import Progress as Bars  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[share]}"),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(what, total=None, share="")

        def watch(progress: Progress) -> None:
            total = progress.num_total or None
            share = f"{progress.num_done / total:.0%}" if total else ""
            said = f"{what}: {progress.step}" if progress.step != what else what
            bars.update(
                bar, description=said, completed=progress.num_done, total=total, share=share
            )

        yield watch


class _Lines:
    """A line for each step, and one for every tenth of a long one."""

    def __init__(self, what: str, out: TextIO) -> None:
        self._what = what
        self._out = out
        self._last: tuple[str, int] | None = None

    def watch(self, progress: Progress) -> None:
        percent = 100 * progress.num_done // progress.num_total if progress.num_total else 0
        said = (progress.step, percent // _LINE_EVERY)
        if said == self._last:
            return
        self._last = said
        step = f": {progress.step}" if progress.step != self._what else ""
        share = f" {percent} %" if progress.num_total else ""
        self._out.write(f"{self._what}{step}{share}\n")
        self._out.flush()
