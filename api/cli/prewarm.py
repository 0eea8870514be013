"""`hearth prewarm`: have a prompt in memory before it is asked for, and wait until it is."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec

from api.cli.client import ServerLink
from api.cli.errors import Misused
from api.cli.progress import watching
from api.cli.views import count, show, took
from runtime.config.settings import Settings
from runtime.errors import HearthError
from runtime.progress import Progress

_POLL_S = 0.2
_UNDER_WAY = frozenset({"queued", "running"})


class Warmed(msgspec.Struct, omit_defaults=True):
    """What `--json` prints; counts are known once it is warm."""

    id: str
    model: str
    status: str
    message: str
    pinned: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tier: str | None = None
    elapsed_ms: float | None = None
    error: str | None = None


def prewarm(settings: Settings, arguments: argparse.Namespace) -> int:
    """Announce a prompt; unless `--no-wait`, return when it is warm or will not be now."""
    link = ServerLink(settings)
    body = _body(arguments)
    with watching("prewarm") as watch:
        found = link.post("/v1/prewarm", Warmed, body)
        while _is_awaited(found, arguments) and "session_id" not in body:
            watch(Progress(step=found.status))
            time.sleep(_POLL_S)
            found = link.get(f"/v1/prewarm/{found.id}", Warmed)
    show(found, _text(found), as_json=arguments.as_json)
    return 1 if found.status == "failed" else 0


def _is_awaited(found: Warmed, arguments: argparse.Namespace) -> bool:
    is_loading = found.status == "waiting" and arguments.load
    return not arguments.no_wait and (is_loading or found.status in _UNDER_WAY)


def _body(arguments: argparse.Namespace) -> dict[str, object]:
    given = (arguments.file, arguments.system, arguments.session)
    if sum(one is not None for one in given) != 1:
        raise Misused("Say what to warm: a FILE, --system TEXT, or --session ID.")
    body: dict[str, object] = {}
    if arguments.file is not None:
        body = read_body(arguments.file)
    elif arguments.system is not None:
        body = {"messages": [{"role": "system", "content": arguments.system}]}
    else:
        body = {"session_id": arguments.session}
    options = {"model": arguments.model, "load": arguments.load, "pinned": arguments.pinned}
    return body | {name: value for name, value in options.items() if value}


def read_body(file: Path | str) -> dict[str, object]:
    """The body of a request, from a file or with `-` from stdin. Raises HearthError."""
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else Path(file).read_bytes()
        return msgspec.json.decode(content, type=dict[str, object])
    except OSError as error:
        raise HearthError(f"{file} cannot be read: {error.strerror}.") from error
    except msgspec.MsgspecError as error:
        message = f"{file} does not hold a request's body, one JSON object: {error}."
        raise HearthError(message) from error


def _text(found: Warmed) -> str:
    said = f"{found.id}: {found.status}. {found.error or found.message}"
    if found.status != "completed" or found.elapsed_ms is None:
        return said
    counts = f"{count(found.cached_tokens or 0)} of {count(found.prompt_tokens or 0)} tokens reused"
    return f"{said} {counts} ({found.tier}), {took(found.elapsed_ms)}"
