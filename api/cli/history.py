"""`hearth history`: what expired and can be restored, and damaged files that were set aside."""

from __future__ import annotations

import argparse
import time

from api.admin.history import (
    Acknowledged,
    ExpiredView,
    HistoryView,
    Restored,
    SetAsideView,
    look,
    restore,
)
from api.cli.client import ServerLink
from api.cli.errors import Misused, NoServer
from api.cli.views import ago, aligned, count, log_errors_only, show, size, span
from runtime.cache.history import FILE, OpenHistory
from runtime.config.settings import Settings
from runtime.errors import HearthError
from store.errors import StoreError
from store.history import set_aside_rows


def history(settings: Settings, arguments: argparse.Namespace) -> int:
    """Ask the server, or open the database where none runs; the exit code. Raises HearthError."""
    log_errors_only()
    if (arguments.action == "restore") != bool(arguments.ids):
        raise Misused("`hearth history restore ID…` names what to restore; nothing else takes ids.")
    try:
        answer = _ask(ServerLink(settings), arguments)
    except NoServer:
        answer = _act(settings, arguments)
    show(answer, _text(answer), as_json=arguments.as_json)
    return int(isinstance(answer, Restored) and bool(answer.taken))


def _ask(link: ServerLink, arguments: argparse.Namespace) -> HistoryView | Restored | Acknowledged:
    match arguments.action:
        case "restore":
            return link.post("/admin/history/restore", Restored, {"ids": arguments.ids})
        case "acknowledge":
            return link.post("/admin/history/acknowledge", Acknowledged)
        case _:
            return link.get("/admin/history", HistoryView)


def _act(
    settings: Settings, arguments: argparse.Namespace
) -> HistoryView | Restored | Acknowledged:
    if not (settings.home / FILE).exists():
        raise HearthError(f"There is no history in {settings.home}; it is made by the server.")
    try:
        opened = OpenHistory(settings.home)
        try:
            database = opened.database
            match arguments.action:
                case "restore":
                    now_s = database.clock.now_s()
                    return database.submit(lambda c: restore(c, arguments.ids, now_s)).result()
                case "acknowledge":
                    return Acknowledged(database.submit(set_aside_rows.acknowledge).result())
                case _:
                    grace_s = settings.history_grace_s
                    return database.read(lambda c: look(c, database.clock, grace_s))
        finally:
            opened.close()
    except StoreError as error:
        raise HearthError(f"The history cannot be used: {error}.") from error


def _text(answer: HistoryView | Restored | Acknowledged) -> str:
    match answer:
        case Restored(restored=restored, taken=taken):
            said = [f"restored: {one}" for one in restored]
            said += [f"not restored, there is another one: {one}" for one in taken]
            return "\n".join(said)
        case Acknowledged(num_new=num_new):
            return f"acknowledged: {num_new}"
        case HistoryView(expired=expired, set_aside=set_aside):
            return f"{_expired(expired)}\n\n{_set_aside(set_aside)}"


def _expired(views: list[ExpiredView]) -> str:
    if not views:
        return "Nothing has expired that could be restored."
    now_s = time.time()
    rows = [
        (
            one.kind,
            one.id,
            size(one.num_bytes),
            ago(now_s - one.last_used_s),
            f"in {span(max(one.erased_s - now_s, 0.0))}",
        )
        for one in views
    ]
    return aligned([("KIND", "ID", "SIZE", "USED", "ERASED"), *rows])


def _set_aside(views: list[SetAsideView]) -> str:
    if not views:
        return "No damaged file was set aside."
    rows = [
        (
            one.name,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(one.at_s)),
            count(one.num_agents),
            count(one.num_responses),
            "all" if one.is_whole else "not all",
            "yes" if one.is_acknowledged else "no",
        )
        for one in views
    ]
    return aligned([("FILE", "SINCE", "AGENTS", "RESPONSES", "SALVAGED", "ACKNOWLEDGED"), *rows])
