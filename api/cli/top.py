"""`hearth top`: models, memory, tiers, running requests and the queue, live in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import cast

import msgspec
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Header, Static
from typing_extensions import override

from api.cli.client import ServerLink
from api.cli.errors import Misused
from api.cli.models import Running
from api.cli.views import count, show, size, span, took
from runtime.config.settings import Settings
from runtime.errors import HearthError

_PERIOD_S = 1.0
_BAR = 12
_MODELS = ("model", "state", "running", "waiting", "memory", "pinned", "leaves in")
_REQUESTS = ("request", "model", "phase", "for", "prompt", "reused", "output")


class MemoryReport(msgspec.Struct):
    """The ledger, in bytes."""

    budget_bytes: int
    reserved_bytes: int


class Tier(msgspec.Struct):
    tier: str
    used_bytes: int
    cap_bytes: int | None


class SavedReport(msgspec.Struct):
    prompt_tokens: int
    saved_tokens: int
    saved_prefill_s: float
    hit_rate: float | None


class Open(msgspec.Struct):
    """A request that is being answered."""

    id: str
    model: str
    phase: str
    for_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_pieces: int


class TrendSample(msgspec.Struct):
    first_token_ms: float | None
    tokens_per_s: float | None


class Now(msgspec.Struct):
    """`/admin/dashboard`, as far as it is shown."""

    models: list[Running]
    memory: MemoryReport
    tiers: list[Tier]
    cache: str
    saved_today: SavedReport
    saved_total: SavedReport
    requests: list[Open]
    sample: TrendSample | None = None


def top(settings: Settings, arguments: argparse.Namespace) -> int:
    """Show it until the user leaves; with `--json` once. Raises NoServer first of all, Misused
    where nobody could see it.
    """
    link = ServerLink(settings)
    now = ask(link)
    if arguments.as_json:
        return show(now, "", as_json=True)
    if not sys.stdout.isatty():
        raise Misused("`hearth top` needs a terminal: `hearth top --json` tells it once.")
    Top(link).run()
    return 0


def ask(link: ServerLink) -> Now:
    """How everything stands. Raises NoServer or HearthError."""
    return link.get("/admin/dashboard", Now)


class Top(App[None]):
    """One page, filled anew every second."""

    TITLE = "Hearth"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [Binding("q,escape", "quit", "Quit")]  # noqa: RUF012 - textual's own way
    CSS = "DataTable { height: auto; margin: 0 0 1 0; } Static { padding: 0 1; }"

    def __init__(self, link: ServerLink) -> None:
        super().__init__()
        self._link = link

    @override
    def compose(self) -> ComposeResult:
        yield Header()
        with VerticalScroll():
            yield Static(id="trouble")
            yield Static(id="memory")
            yield Static(id="saved")
            yield DataTable[str](id="models", show_cursor=False)
            yield DataTable[str](id="requests", show_cursor=False)
        yield Footer()

    async def on_mount(self) -> None:
        self.sub_title = self._link.url
        self._table("#models").add_columns(*_MODELS)
        self._table("#requests").add_columns(*_REQUESTS)
        await self.refill()
        self.set_interval(_PERIOD_S, self.refill)

    async def refill(self) -> None:
        """Ask the server and draw what it says; a server that is gone is said, not raised."""
        try:
            now = await asyncio.to_thread(ask, self._link)
        except HearthError as error:
            self._write("#trouble", error.message)
            return
        self._write("#trouble", "")
        self._write("#memory", memory_line(now))
        self._write("#saved", saved_line(now))
        self._fill("#models", [model_row(one) for one in now.models])
        self._fill("#requests", [request_row(one) for one in now.requests])

    def _write(self, name: str, text: str) -> None:
        found = self.query_one(name, Static)
        found.display = bool(text)
        found.update(text)

    def _fill(self, name: str, rows: list[tuple[str, ...]]) -> None:
        table = self._table(name)
        table.clear()
        for row in rows:
            table.add_row(*row)

    def _table(self, name: str) -> DataTable[str]:
        return cast("DataTable[str]", self.query_one(name, DataTable))


def memory_line(now: Now) -> str:
    """What is held of what may be held, in memory and in every tier."""
    names = {"hot": "hot", "warm": "warm (disk)", "cold": "cold"}
    parts = [("memory", now.memory.reserved_bytes, now.memory.budget_bytes)]
    parts += [(names.get(one.tier, one.tier), one.used_bytes, one.cap_bytes) for one in now.tiers]
    width = max(len(name) for name, _, _ in parts)
    return "\n".join(f"{name.ljust(width)}  {_meter(used, cap)}" for name, used, cap in parts)


def saved_line(now: Now) -> str:
    """Speed, and what reuse saved."""
    today, total, sample = now.saved_today, now.saved_total, now.sample
    share = f"{today.hit_rate:.0%}" if today.hit_rate is not None else "-"
    speed = ""
    if sample is not None and sample.tokens_per_s is not None:
        speed = f"decode {sample.tokens_per_s:.1f} tokens/s   "
    if sample is not None and sample.first_token_ms is not None:
        speed += f"first token {took(sample.first_token_ms)}   "
    return (
        f"{speed}reused today {share}, {span(today.saved_prefill_s)} of prefill saved "
        f"({span(total.saved_prefill_s)} in total)   cache {now.cache}"
    )


def model_row(one: Running) -> tuple[str, ...]:
    """A line of the models."""
    state = one.state
    if one.load_fraction is not None and state == "loading":
        state = f"loading {one.load_fraction:.0%}"
    leaves = span(one.expires_in_s) if one.expires_in_s is not None else "-"
    counts = (count(one.num_running), count(one.num_waiting), size(one.reserved_bytes))
    return (one.id, state, *counts, "yes" if one.pinned else "no", leaves)


def request_row(one: Open) -> tuple[str, ...]:
    """A line of the requests."""
    counts = (one.num_prompt_tokens, one.num_cached_tokens, one.num_pieces)
    return (one.id[-12:], one.model, one.phase, span(one.for_s), *map(count, counts))


def _meter(used: int, cap: int | None) -> str:
    if cap is None:
        return f"{'·' * _BAR}  {size(used)}"
    full = min(_BAR, round(_BAR * used / cap)) if cap else 0
    return f"{'█' * full}{'░' * (_BAR - full)}  {size(used)} of {size(cap)}"
