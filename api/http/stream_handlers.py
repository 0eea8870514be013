"""`/v1/streams`: reading on after a lost connection."""

from __future__ import annotations

from typing import Annotated

from litestar import delete, get
from litestar.params import FromPath, QueryParameter

from api.http.body import HttpRequest
from api.http.caller import tenant_of
from api.http.refusal import refuse
from api.http.sse import EventStream, read_on
from api.http.streams import streams_of
from runtime.errors import UnknownStream

_MOST_DIGITS = 18
"""Of the number of an event; Python refuses to read some thousands of them."""


@get("/v1/streams/{stream_id:str}", tags=["Streams"], sync_to_thread=False)
def read_stream(
    stream_id: FromPath[str],
    request: HttpRequest,
    start: Annotated[int | None, QueryParameter(name="from", ge=0)] = None,
) -> EventStream:
    """Read a stream on, from the event with this number or the one after `Last-Event-ID`."""
    kept = streams_of(request.scope).find(stream_id, tenant_of(request.scope))
    if start is None:
        last = request.headers.get("last-event-id", "").strip()
        if last and not (last.isascii() and last.isdigit() and len(last) <= _MOST_DIGITS):
            refuse("last-event-id", "must be the number in the last event's id.")
        start = int(last) + 1 if last else 0
    if start < kept.log.first:
        raise UnknownStream(stream_id, kept.log.first)
    return read_on(kept, start - 1)


@delete("/v1/streams/{stream_id:str}", tags=["Streams"], sync_to_thread=False)
def end_stream(stream_id: FromPath[str], request: HttpRequest) -> None:
    """End a stream that nobody is going to read on, and what makes it."""
    streams_of(request.scope).find(stream_id, tenant_of(request.scope)).end()


HANDLERS = (read_stream, end_stream)
