"""`hearth status`, `ps`, `models`, `pull`, and what is done to one model."""

from __future__ import annotations

import argparse
import sys
from urllib.parse import quote

import msgspec

from api.cli.client import ServerLink
from api.cli.progress import watching
from api.cli.views import aligned, count, show, size, span
from runtime.config.settings import Settings
from runtime.errors import InvalidRequest
from runtime.models import download
from runtime.supervisor.lifecycle import LOADED
from runtime.types import TemplateForms

_CONTENTS = {"string": "as strings", "parts": "as lists of parts", "mixed": "by role"}
_DONE = {"pin": "is pinned, and {state}", "unpin": "is pinned no longer, and {state}"}


class ReadinessReport(msgspec.Struct):
    """`/health/ready`, as far as it is shown."""

    status: str
    cache: str = "ok"
    cache_reason: str | None = None
    cold: str = "off"
    cold_reason: str | None = None
    history: str = "ok"
    history_reason: str | None = None


class Running(msgspec.Struct):
    """An entry of `/running`, as far as it is shown."""

    id: str
    state: str
    pid: int | None = None
    num_running: int = 0
    num_waiting: int = 0
    pinned: bool = False
    reserved_bytes: int = 0
    load_fraction: float | None = None
    expires_in_s: float | None = None
    retry_in_s: float | None = None
    error: str | None = None
    shares_with: list[str] = []


class RunningList(msgspec.Struct):
    models: list[Running]


class Card(msgspec.Struct):
    """An entry of `/v1/models`, as far as it is shown."""

    id: str
    state: str
    context: int
    size_bytes: int
    aliases: list[str] = []
    vision: str = "no"
    vision_reason: str | None = None
    template: TemplateForms | None = None


class RefusedEntry(msgspec.Struct):
    """A model that cannot be used, and why."""

    id: str
    code: str
    reason: str
    state: str = "refused"


class CardList(msgspec.Struct):
    data: list[Card]
    refused: list[RefusedEntry] = []


class StatusReport(msgspec.Struct):
    """What `hearth status --json` prints."""

    url: str
    health: ReadinessReport
    models: list[Running]


def status(settings: Settings, arguments: argparse.Namespace) -> int:
    """Whether a server runs, how it is, and what it has loaded."""
    link = ServerLink(settings)
    found = StatusReport(
        url=link.url,
        health=link.peek("/health/ready", ReadinessReport),
        models=link.get("/running", RunningList).models,
    )
    lines = [f"server   {found.url} ({found.health.status})"]
    lines.append(f"cache    {_with_reason(found.health.cache, found.health.cache_reason)}")
    if found.health.cold != "off":
        lines.append(f"cold     {_with_reason(found.health.cold, found.health.cold_reason)}")
    lines.append(f"history  {_with_reason(found.health.history, found.health.history_reason)}")
    lines += ["", _running_table(found.models)] if found.models else ["", "no model is loaded"]
    return show(found, "\n".join(lines), as_json=arguments.as_json)


def ps(settings: Settings, arguments: argparse.Namespace) -> int:
    """The models that are not cold."""
    found = ServerLink(settings).get("/running", RunningList)
    return show(found.models, _running_table(found.models), as_json=arguments.as_json)


def models(settings: Settings, arguments: argparse.Namespace) -> int:
    """Every model that can be named, or what was found of one."""
    if arguments.action == "check":
        return _check(settings, arguments)
    found = ServerLink(settings).get("/v1/models", CardList)
    cards = found.data
    head = ("MODEL", "STATE", "CONTEXT", "SIZE", "VISION", "ALIASES")
    rows = [
        (
            *(card.id, card.state, count(card.context), size(card.size_bytes)),
            *(card.vision, ", ".join(card.aliases)),
        )
        for card in cards
    ]
    refused = [f"cannot be used: {one.id}: {one.reason}" for one in found.refused]
    if arguments.as_json:
        return show([*cards, *found.refused], "", as_json=True)
    return show(cards, "\n".join([aligned([head, *rows]), *refused]), as_json=False)


def _check(settings: Settings, arguments: argparse.Namespace) -> int:
    """What a model's chat template shows. It is loaded for that; 1 if something is lost."""
    link, name = ServerLink(settings), quote(arguments.model or "")
    if not name:
        message = "hearth models check needs the name of a model."
        raise InvalidRequest(message, "model")
    link.post(f"/admin/models/{name}/load", Running)
    card = link.get(f"/v1/models/{name}", Card)
    lines = template_lines(card.template)
    show(
        card, "\n".join([f"{card.id}", *(f"  {line}" for line in lines)]), as_json=arguments.as_json
    )
    return int(card.template is not None and bool(lost_of(card.template)))


def lost_of(forms: TemplateForms) -> list[str]:
    """What a template should show and leaves out: many have no thoughts, as their models do not."""
    return [one for one in forms.lost if one != "thoughts"]


def template_lines(forms: TemplateForms | None) -> list[str]:
    """What was found of a chat template, a line for each thing."""
    if forms is None:
        return ["it has no chat template: only /v1/completions"]
    ways = {"native": "in the template's own form", "generic": "as text", "user": "as a user's"}
    arguments = " (arguments as JSON in a string)" if forms.arguments == "text" else ""
    return [
        f"texts: {_CONTENTS[forms.content]}",
        f"system prompt: {ways[forms.system]}",
        f"tools: {ways[forms.tools]}",
        f"calls: {ways[forms.calls]}{arguments}",
        f"results: {ways[forms.results]}",
        f"left out: {', '.join(forms.lost) or 'nothing'}",
    ]


def change(settings: Settings, arguments: argparse.Namespace) -> int:
    """Load, unload, pin, unpin or restart a model."""
    action: str = arguments.command
    path = f"/admin/models/{quote(arguments.model)}/{action}"
    if action in ("load", "restart") and sys.stderr.isatty():
        sys.stderr.write(f"loading {arguments.model} …\n")
    found = ServerLink(settings).post(path, Running)
    said = _DONE.get(action, "is {state}").format(state=found.state)
    if found.shares_with and action not in _DONE:
        said += f", and so is {', '.join(found.shares_with)}, with which it shares a process"
    return show(found, f"{found.id} {said}", as_json=arguments.as_json)


def _with_reason(state: str, reason: str | None) -> str:
    return f"{state}: {reason}" if reason else state


def _running_table(found: list[Running]) -> str:
    head = ("MODEL", "STATE", "PID", "RUNNING", "WAITING", "MEMORY", "PINNED", "LEAVES IN")
    return aligned([head, *(_row(one) for one in found)])


def _row(one: Running) -> tuple[str, ...]:
    state = one.state
    if one.load_fraction is not None and state == "loading":
        state = f"loading {one.load_fraction:.0%}"
    if one.error and state not in LOADED:
        state = f"{state}: {one.error}"
    return (
        one.id,
        state,
        str(one.pid or "-"),
        count(one.num_running),
        count(one.num_waiting),
        size(one.reserved_bytes),
        "yes" if one.pinned else "no",
        span(one.expires_in_s) if one.expires_in_s is not None else "-",
    )


class Pulled(msgspec.Struct):
    """What `hearth pull --json` prints: the directory that the model is in now."""

    repo: str
    path: str


def pull(_: Settings, arguments: argparse.Namespace) -> int:
    """Fetch what is not there yet. Raises DownloadFailed."""
    with watching(f"pull {arguments.repo}") as watch:
        path = download.pull(arguments.repo, watch)
    found = Pulled(arguments.repo, str(path))
    return show(found, found.path, as_json=arguments.as_json)
