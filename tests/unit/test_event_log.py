"""What a reader of a stream finds who comes at any time, and comes back."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.event_log import PIECE_BYTES, EventLog
from api.http.streams import MAX_STREAMS, KeptStreams
from runtime.errors import UnknownStream
from tests.waiting import until

EVENTS = st.lists(st.sampled_from([b"data: {}\n\n", b": queued\n\n", b"event: ping\ndata: 1\n\n"]))


async def read(log: EventLog, after: int) -> list[bytes]:
    joined = b"".join([events async for events in log.follow(after)])
    return [event + b"\n\n" for event in joined.split(b"\n\n") if event]


@given(EVENTS, st.integers(-1, 30), st.integers(0, 300))
def test_a_reader_finds_every_event_behind_its_last_one_that_is_still_known(
    events: list[bytes], after: int, max_bytes: int
):
    numbered = [
        event if event.startswith(b":") else b"id: %d\n%s" % (number, event)
        for number, event in enumerate(events)
    ]

    async def check() -> None:
        log = EventLog(has_ids=True, max_bytes=max_bytes)
        for event in events:
            log.add(event)
        log.complete()
        known = len(numbered) - log.first
        assert log.whole == b"".join(numbered[log.first :])
        assert len(log.whole) <= max_bytes
        assert known == len(numbered) or len(b"".join(numbered[log.first - 1 :])) > max_bytes
        wanted = numbered[after + 1 :] if after + 1 >= log.first else []
        assert await read(log, after) == wanted

    asyncio.run(check())


class Source:
    """Events that are made until somebody closes it."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def events(self) -> AsyncIterator[bytes]:
        yield b"data: first\n\n"
        await self.closed.wait()
        yield b"data: last\n\n"


async def test_a_stream_is_its_tenants_own_and_ends_when_nobody_comes_back():
    streams, source = KeptStreams(keep_s=0.01), Source()
    kept = streams.keep(source.events(), source.closed.set, "one")
    assert kept is not None
    kept.joined()
    assert streams.find(kept.name, "one") is kept
    for tenant in ("", "another"):
        with pytest.raises(UnknownStream):
            streams.find(kept.name, tenant)
    kept.left()
    await until(source.closed.is_set, "its end")
    with pytest.raises(UnknownStream):
        streams.find(kept.name, "one")
    await streams.close()


async def test_a_stream_waits_for_a_reader_that_comes_back():
    streams, source = KeptStreams(keep_s=60.0), Source()
    kept = streams.keep(source.events(), source.closed.set, "")
    assert kept is not None
    kept.joined()
    kept.left()
    kept.joined()
    assert not source.closed.is_set()
    kept.end()
    assert await read(kept.log, -1) == [b"id: 0\ndata: first\n\n", b"id: 1\ndata: last\n\n"]
    await streams.close()


@given(st.lists(st.integers(1, 3 * PIECE_BYTES), max_size=9))
def test_a_reader_who_is_far_behind_is_given_a_piece_at_a_time(sizes: list[int]):
    """What waits to be sent to a client that does not read is a copy for each that does not."""

    async def check() -> None:
        log = EventLog()
        for size in sizes:
            log.add(b"x" * size + b"\n\n")
        log.complete()
        pieces = [piece async for piece in log.follow(-1)]
        assert b"".join(pieces) == log.whole
        for piece in pieces:
            *others, _, _ = piece.split(b"\n\n")
            assert len(b"\n\n".join(others)) < PIECE_BYTES

    asyncio.run(check())


async def ended_stream(streams: KeptStreams, tenant: str) -> str:
    """The name of a stream that has ended and that nobody reads."""
    source = Source()
    source.closed.set()
    kept = streams.keep(source.events(), source.closed.set, tenant)
    assert kept is not None
    await until(lambda: kept.is_idle, "its end")
    return kept.name


async def test_a_tenant_with_many_streams_takes_no_room_from_another():
    streams, source = KeptStreams(num_tenants=2), Source()
    bobs = await ended_stream(streams, "bob")
    first, *others = [await ended_stream(streams, "alice") for _ in range(MAX_STREAMS // 2)]
    latest = await ended_stream(streams, "alice")
    for name in (*others, latest):
        assert streams.find(name, "alice").is_idle
    with pytest.raises(UnknownStream):
        streams.find(first, "alice")
    running = [streams.keep(source.events(), source.closed.set, "alice") for _ in range(40)]
    assert [one is not None for one in running] == [
        number < MAX_STREAMS // 2 for number in range(40)
    ]
    assert streams.find(bobs, "bob").is_idle
    assert streams.keep(source.events(), source.closed.set, "bob") is not None
    source.closed.set()
    await streams.close()


async def test_all_tenants_together_have_no_more_than_all():
    streams = KeptStreams(num_tenants=10 * MAX_STREAMS)
    names = [await ended_stream(streams, str(number)) for number in range(MAX_STREAMS + 1)]
    with pytest.raises(UnknownStream):
        streams.find(names[0], "0")
    assert streams.find(names[1], "1").is_idle
    await streams.close()
