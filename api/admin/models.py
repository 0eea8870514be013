"""What the operator may see and ask of models and requests; `/admin` is for this machine only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import PurePosixPath

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath

from api.admin.cache import operator_only
from api.http.body import HttpRequest
from api.http.gate import Gate
from api.http.sse import EVENTS, EventStream, unless_left
from runtime.errors import InvalidRequest
from runtime.supervisor.calls import LoadRequest
from runtime.supervisor.lifecycle import Transition
from runtime.supervisor.news import Listener
from runtime.supervisor.status import ModelStatus

_ACTIONS = ("load", "unload", "pin", "unpin", "restart")


class RunningModel(msgspec.Struct, gc=False):
    """A model that is not cold, or whose memory is missing. Times in seconds from now.

    `expires_in_s` is when it is unloaded unless it is used, `retry_in_s` when one that failed is
    tried again. `has_changed_files`: what is loaded is no longer what lies on disk.
    `unreturned_bytes` were held by a process of it and are missing since that ended. `shares_with`
    are the other names that its process serves: what is said of memory is of all together, and
    they are loaded and unloaded together. Requests and `pinned` are of this name.
    """

    id: str
    state: str
    pid: int | None
    num_running: int
    num_waiting: int
    pinned: bool
    reserved_bytes: int
    size_bytes: int
    context: int
    load_ms: float | None
    load_fraction: float | None
    since_s: float | None
    expires_in_s: float | None
    retry_in_s: float | None
    num_starts: int
    num_crashes: int
    has_changed_files: bool
    unreturned_bytes: int
    shares_with: list[str]
    error: str | None


class RunningModels(msgspec.Struct, gc=False):
    models: list[RunningModel]


class Cancelled(msgspec.Struct, gc=False):
    """How many prompts of the request were open."""

    id: str
    num_cancelled: int


@get("/running", tags=["Admin"], sync_to_thread=False)
def running(gate: NamedDependency[Gate]) -> RunningModels:
    """Every model that is not cold: loaded, on its way, waited for, failed; or missing memory."""
    return _running(gate)


@post("/admin/models/{target:path}", tags=["Admin"], guards=[operator_only], status_code=200)
async def change_model(
    target: FromPath[PurePosixPath], request: HttpRequest, gate: NamedDependency[Gate]
) -> RunningModel:
    """`/admin/models/{id}/load|unload|pin|unpin|restart`; the id may contain slashes.

    Load and restart answer when the model is loaded, the others at once.
    """
    name, _, action = str(target).removeprefix("/").rpartition("/")
    if not name or action not in _ACTIONS:
        raise InvalidRequest(f"The path must end in one of {', '.join(_ACTIONS)}.", "action")
    supervisor = gate.supervisor
    match action:
        case "load":
            await _granted(request, supervisor.load(name))
        case "restart":
            await _granted(request, supervisor.restart(name))
        case "unload":
            supervisor.unload(name)
        case _:
            supervisor.pin(name, is_pinned=action == "pin")
    return _view(supervisor.status_of(name))


@post("/admin/requests/{request_id:str}/cancel", tags=["Admin"], guards=[operator_only])
async def cancel_request(request_id: FromPath[str], gate: NamedDependency[Gate]) -> Cancelled:
    """End a request, by the id of its answer or its `x-request-id`, whatever it waits for."""
    return Cancelled(request_id, gate.cancel(request_id))


@get("/admin/events", tags=["Admin"], guards=[operator_only], media_type=EVENTS)
async def events(gate: NamedDependency[Gate]) -> EventStream:
    """Every transition of every model as it happens, after a first event with what is running.

    Who does not keep up misses the oldest and is told how many.
    """
    listener = gate.supervisor.news.listen()
    first = _event("running", _running(gate))
    feed = _feed(first, listener, gate.settings.keep_alive_s)
    return EventStream(feed, listener.close, {})


async def _granted(request: HttpRequest, wish: LoadRequest) -> None:
    """Wait for a model; who leaves waits no longer, which ends the wish but not the load."""
    await unless_left(request.receive, wish.granted())


async def _feed(
    first: bytes, listener: Listener[Transition], keep_alive_s: float
) -> AsyncIterator[bytes]:
    yield first
    while not listener.is_closed:
        batch = await listener.next(keep_alive_s)
        if batch is None:
            yield b": still here\n\n"
            continue
        if batch.num_missed:
            yield _event("missed", {"num_missed": batch.num_missed})
        yield b"".join(_event("transition", one) for one in batch.items)


def _event(name: str, data: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))


def _running(gate: Gate) -> RunningModels:
    return RunningModels(running_models(gate))


def running_models(gate: Gate) -> list[RunningModel]:
    """Every model that is not cold."""
    return [
        _view(one)
        for one in gate.supervisor.status()
        if one.state != "cold" or one.unreturned_bytes
    ]


def _view(status: ModelStatus) -> RunningModel:
    return RunningModel(
        id=status.spec.id,
        state=status.state,
        pid=status.pid,
        num_running=status.num_running,
        num_waiting=status.num_waiting,
        pinned=status.is_pinned,
        reserved_bytes=status.reserved_bytes,
        size_bytes=status.spec.nbytes,
        context=status.spec.context,
        load_ms=status.load_ms,
        load_fraction=status.load_fraction,
        since_s=status.since_s,
        expires_in_s=status.expires_in_s,
        retry_in_s=status.retry_in_s,
        num_starts=status.num_starts,
        num_crashes=status.num_crashes,
        has_changed_files=status.has_changed_files,
        unreturned_bytes=status.unreturned_bytes,
        shares_with=list(status.with_names),
        error=status.last_error,
    )


HANDLERS = [running, change_model, cancel_request, events]
