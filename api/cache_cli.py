"""`hearth cache`: list, delete, verify, count, export and import what was kept of conversations."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterable, Sequence
from typing import cast

import msgspec
import structlog

from api import stock_exchange
from api.cache_desk import CacheDesk, opened_desk
from runtime.errors import HearthError
from runtime.inventory_views import ConversationView, StatsView
from runtime.settings import Settings

_SHOWN_ID = 12
_UNITS = ("B", "kB", "MB", "GB", "TB")


def run(settings: Settings, arguments: argparse.Namespace) -> int:
    """Do what the command line says; the exit code. Raises HearthError."""
    structlog.configure(  # stdout is for the answer
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    with opened_desk(settings) as desk:
        answer = _act(desk, settings, arguments)
    text = msgspec.json.encode(answer).decode() if arguments.as_json else _text(answer)
    sys.stdout.write(text + "\n")
    return 0


def _act(desk: CacheDesk, settings: Settings, arguments: argparse.Namespace) -> object:
    match arguments.action:
        case "ls":
            return desk.conversations(arguments.of_model)
        case "rm":
            return _remove(desk, arguments)
        case "stats":
            return desk.stats()
        case "export":
            return stock_exchange.export(desk, settings, arguments)
        case "import":
            return stock_exchange.import_(desk, settings, arguments)
        case _:
            return desk.verify()


def _remove(desk: CacheDesk, arguments: argparse.Namespace) -> object:
    given = (arguments.conversation, arguments.of_model, arguments.everything or None)
    if sum(one is not None for one in given) != 1:
        raise HearthError("Say what to delete: a conversation, --model NAME, or --all.")
    if arguments.conversation is not None:
        return desk.remove_conversation(arguments.conversation)
    if arguments.of_model is not None:
        return desk.remove_model(arguments.of_model)
    return desk.remove_all()


def _text(answer: object) -> str:
    if isinstance(answer, list):
        return _table(cast("list[ConversationView]", answer))
    if isinstance(answer, StatsView):
        return _stats(answer)
    return "\n".join(f"{name}: {value}" for name, value in msgspec.to_builtins(answer).items())


def _table(views: Sequence[ConversationView]) -> str:
    head = ("ID", "MODEL", "TOKENS", "TURNS", "SIZE", "TIER", "USED", "PINNED", "DURABLE")
    now_s = time.time()
    rows = [
        (
            view.id[:_SHOWN_ID],
            view.model or view.model_hash[:_SHOWN_ID],
            str(view.num_tokens),
            str(view.num_turns) if view.is_named else "-",
            _size(view.disk_bytes),
            view.tier,
            _ago(now_s - view.last_used_s),
            "yes" if view.is_pinned else "no",
            "yes" if view.is_durable else "no",
        )
        for view in views
    ]
    return _aligned([head, *rows])


def _stats(stats: StatsView) -> str:
    head = ("MODEL", "TIER", "SLOTS", "TOKENS", "SIZE")
    rows = [
        (
            tier.model or tier.model_hash[:_SHOWN_ID],
            tier.tier,
            str(tier.num_slots),
            str(tier.num_tokens),
            _size(tier.disk_bytes),
        )
        for tier in stats.tiers
    ]
    facts = [
        f"store: {stats.root}",
        f"conversations: {stats.num_conversations}",
        f"quarantine: {_size(stats.quarantine_bytes)}",
        f"free on disk: {_size(stats.free_bytes)}",
        *(f"{name}: {value:g}" for name, value in stats.counters.items()),
    ]
    return "\n".join([_aligned([head, *rows]), "", *facts])


def _aligned(rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _size(num_bytes: float) -> str:
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes /= 1000
        unit += 1
    return f"{num_bytes:.0f} {_UNITS[unit]}" if unit == 0 else f"{num_bytes:.1f} {_UNITS[unit]}"


def _ago(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
