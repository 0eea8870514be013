"""`hearth top`: models, memory, tiers, running requests and the queue, live in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from typing import NamedTuple, cast

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Header, Static
from typing_extensions import override

from api.cli.connection import ServerLink
from api.cli.models import RunningList
from api.cli.views import size, span
from runtime.errors import HearthError
from runtime.settings import Settings

_PERIOD_S = 1.0
_SAMPLE = re.compile(r"^(?P<name>[a-z_]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$", re.MULTILINE)
_HEAD = ("model", "state", "running", "waiting", "memory", "pinned", "leaves in")


class Figure(NamedTuple):
    """One sample of `/metrics`."""

    name: str
    labels: str
    value: float


def figures_of(exposition: str) -> list[Figure]:
    """The samples in Prometheus' text form."""
    return [
        Figure(found["name"], found["labels"] or "", float(found["value"]))
        for found in _SAMPLE.finditer(exposition)
    ]


def total(figures: list[Figure], name: str, label: str = "") -> float:
    """The sum of the samples of a name that have a label, written `key="value"`."""
    return sum(one.value for one in figures if one.name == name and label in one.labels)


def top(settings: Settings, _: argparse.Namespace) -> int:
    """Show it until the user leaves. Raises NoServer before anything is drawn."""
    link = ServerLink(settings)
    link.get("/running", RunningList)
    Top(link).run()
    return 0


class Top(App[None]):
    """One page, filled anew every second."""

    TITLE = "Hearth"
    BINDINGS = [Binding("q", "quit", "Quit")]  # noqa: RUF012 - textual's own way
    CSS = "DataTable { height: auto; margin: 1 0; } Static { padding: 0 1; }"

    def __init__(self, link: ServerLink) -> None:
        super().__init__()
        self._link = link
        self._before: tuple[float, float] | None = None

    @override
    def compose(self) -> ComposeResult:
        yield Header()
        with VerticalScroll():
            yield DataTable[str](id="models", show_cursor=False)
            yield Static(id="tiers")
            yield Static(id="work")
            yield Static(id="trouble")
        yield Footer()

    async def on_mount(self) -> None:
        self.sub_title = self._link.url
        self.query_one("#models", DataTable).add_columns(*_HEAD)
        await self.refill()
        self.set_interval(_PERIOD_S, self.refill)

    async def refill(self) -> None:
        """Ask the server and draw what it says; a server that is gone is said, not raised."""
        trouble = self.query_one("#trouble", Static)
        try:
            running, exposition = await asyncio.to_thread(self._ask)
        except HearthError as error:
            trouble.update(error.message)
            return
        trouble.update("")
        self._draw_models(running)
        figures = figures_of(exposition)
        self.query_one("#tiers", Static).update(_tiers(figures))
        self.query_one("#work", Static).update(self._work(figures))

    def _ask(self) -> tuple[RunningList, str]:
        running = self._link.get("/running", RunningList)
        with self._link.stream("GET", "/metrics") as answer:
            return running, answer.read().decode()

    def _draw_models(self, running: RunningList) -> None:
        table = cast("DataTable[str]", self.query_one("#models", DataTable))
        table.clear()
        for one in running.models:
            leaves = span(one.expires_in_s) if one.expires_in_s is not None else "-"
            counts = (str(one.num_running), str(one.num_waiting), size(one.reserved_bytes))
            table.add_row(one.id, one.state, *counts, "yes" if one.pinned else "no", leaves)

    def _work(self, figures: list[Figure]) -> str:
        tokens = total(figures, "hearth_output_tokens_total")
        now_s = time.monotonic()
        before, self._before = self._before, (now_s, tokens)
        rate = (tokens - before[1]) / (now_s - before[0]) if before is not None else 0.0
        reused = total(figures, "hearth_cached_prompt_tokens_total")
        prompts = total(figures, "hearth_prompt_tokens_total")
        share = f"{reused / prompts:.0%}" if prompts else "-"
        return (
            f"decode {rate:.1f} tokens/s   answered {tokens:.0f} tokens   "
            f"prompts {prompts:.0f} tokens, {share} of them reused"
        )


def _tiers(figures: list[Figure]) -> str:
    hot = total(figures, "hearth_kv_hot_bytes")
    warm = total(figures, "hearth_kv_disk_bytes", 'tier="warm"')
    cold = total(figures, "hearth_kv_disk_bytes", 'tier="cold"')
    return f"hot {size(hot)}   warm {size(warm)}   cold {size(cold)}"
