"""What is remembered besides slots: models, weights digests, finished requests, counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime

import msgspec
from sqlalchemy import Connection, delete, func, select, update
from sqlalchemy.dialects.sqlite import insert

from store.database import Database
from store.tables import Counter, FileDigest, Model, Request
from store.types import FileStamp, ModelRow, RequestRow, RunFigures

_MODEL_COLUMNS = (
    Model.hash,
    Model.label,
    Model.weights_bytes,
    Model.load_ms,
    Model.peak_bytes,
    Model.last_used_s,
    Model.blindness,
    Model.prefill_slice,
    Model.slice_device,
)
MAX_REQUESTS = 20_000
"""Some MB of rows: days of an agent's work."""

MAX_DAYS = 92
"""Days that have counters: their names are the wall clock's, so they go by number, not by age."""

_LATEST_LOAD = 0.3
_PEAK_LEFT = 0.95


class Records:
    """Figures and memos of a store. All futures fail as those of `Database.submit`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put_model(self, row: ModelRow) -> Future[None]:
        """Remember a model; what the row leaves None keeps the value it had."""
        return self._database.submit(lambda connection: _put_model(connection, row))

    def measured(self, model: bytes, run: RunFigures) -> Future[bool]:
        """Take one run of a known model into its figures; False when there is no such model.

        `load_ms` becomes a moving average, `peak_bytes` a highest value that fades when it is not
        reached again, and `blindness` and `prefill_slice` are as they were found last.
        """
        return self._database.submit(lambda connection: _measured(connection, model, run))

    def models(self) -> list[ModelRow]:
        """All models, the latest used first."""
        return self._database.read(_models)

    def model(self, model: bytes) -> ModelRow | None:
        """What is remembered of one model."""
        return self._database.read(lambda connection: _model(connection, model))

    def put_digest(self, stamp: FileStamp, digest: bytes, now_s: float) -> Future[None]:
        """Remember the digest of a weights file, read at trusted time `now_s`."""
        return self._database.submit(
            lambda connection: _put_digest(connection, stamp, digest, now_s)
        )

    def digest(self, stamp: FileStamp) -> bytes | None:
        """The digest of exactly this state of a file; None where it was never read."""
        return self._database.read(lambda connection: _digest(connection, stamp))

    def has_other_digest(self, stamp: FileStamp) -> bool:
        """Whether the digest of the same file in another state is known."""
        return self._database.read(lambda connection: _has_other_digest(connection, stamp))

    def add_requests(self, rows: Sequence[RequestRow], now_s: float) -> Future[None]:
        """Remember at trusted time `now_s` requests that finished; second rows are ignored.

        Of very many the oldest are forgotten.
        """
        return self._database.submit(lambda connection: _add_requests(connection, rows, now_s))

    def requests(self, limit: int = 100) -> list[RequestRow]:
        """The latest finished requests, the latest first."""
        return self._database.read(lambda connection: _requests(connection, limit))

    def count(self, values: Mapping[str, float], now_s: float) -> Future[None]:
        """Add to the counters of the day of wall time `now_s`, in UTC."""
        return self._database.submit(lambda connection: _count(connection, values, now_s))

    def counters(self, since_s: float = 0.0) -> dict[str, float]:
        """The sums of all counters from the day of wall time `since_s` on."""
        return self._database.read(lambda connection: _counters(connection, since_s))

    def forget_requests(self) -> Future[None]:
        """Forget all finished requests, and the counters that tell of them."""
        return self._database.submit(_forget_requests)

    def trim(self, before_s: float) -> Future[int]:
        """Forget requests and digests from before trusted time `before_s`, and counters of all but
        the last `MAX_DAYS` days there are; how many.
        """
        return self._database.submit(lambda connection: _trim(connection, before_s))


def day_of(wall_s: float) -> str:
    """`YYYY-MM-DD` in UTC."""
    return datetime.fromtimestamp(wall_s, UTC).date().isoformat()


def _add_requests(connection: Connection, rows: Sequence[RequestRow], now_s: float) -> None:
    statement = insert(Request).on_conflict_do_nothing()
    if rows:
        connection.execute(
            statement, [msgspec.structs.asdict(row) | {"kept_s": now_s} for row in rows]
        )
    last = select(func.max(Request.number)).scalar_subquery()
    connection.execute(delete(Request).where(Request.number <= last - MAX_REQUESTS))


def _put_model(connection: Connection, row: ModelRow) -> None:
    values = msgspec.structs.asdict(row)
    known = {name: value for name, value in values.items() if value is not None and name != "hash"}
    statement = insert(Model).values({"layout": "", **values})
    connection.execute(statement.on_conflict_do_update(index_elements=["hash"], set_=known))


def _measured(connection: Connection, model: bytes, run: RunFigures) -> bool:
    row = connection.execute(select(Model.load_ms, Model.peak_bytes).filter_by(hash=model)).first()
    if row is None:
        return False
    old_ms, old_bytes = row
    load_ms, peak_bytes = run.load_ms, run.peak_bytes
    if load_ms is None:
        load_ms = old_ms
    elif old_ms is not None:
        load_ms = old_ms + _LATEST_LOAD * (load_ms - old_ms)
    if peak_bytes is None:
        peak_bytes = old_bytes
    elif old_bytes is not None:
        peak_bytes = max(peak_bytes, int(old_bytes * _PEAK_LEFT))
    figures: dict[str, object] = {"load_ms": load_ms, "peak_bytes": peak_bytes}
    if run.blindness is not None:
        figures["blindness"] = run.blindness
    if run.prefill_slice is not None:
        figures |= {"prefill_slice": run.prefill_slice, "slice_device": run.slice_device}
    connection.execute(update(Model).filter_by(hash=model).values(figures))
    return True


def _models(connection: Connection) -> list[ModelRow]:
    rows = connection.execute(select(*_MODEL_COLUMNS).order_by(Model.last_used_s.desc(), Model.id))
    return [ModelRow(*row) for row in rows]


def _model(connection: Connection, model: bytes) -> ModelRow | None:
    row = connection.execute(select(*_MODEL_COLUMNS).filter_by(hash=model)).first()
    return ModelRow(*row) if row is not None else None


def _put_digest(connection: Connection, stamp: FileStamp, digest: bytes, now_s: float) -> None:
    fresh = {"digest": digest, "last_used_s": now_s}
    keys = list(stamp._fields)
    statement = insert(FileDigest).values({**stamp._asdict(), **fresh})
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=fresh))


def _digest(connection: Connection, stamp: FileStamp) -> bytes | None:
    found = select(FileDigest.digest).filter_by(**stamp._asdict())
    return connection.execute(found).scalar()


def _has_other_digest(connection: Connection, stamp: FileStamp) -> bool:
    states = select(FileDigest.size_bytes, FileDigest.mtime_ns, FileDigest.ctime_ns)
    same = states.filter_by(device=stamp.device, inode=stamp.inode)
    return any(tuple(row) != stamp[2:] for row in connection.execute(same))


def _requests(connection: Connection, limit: int) -> list[RequestRow]:
    columns = select(
        Request.id,
        Request.model,
        Request.finished_s,
        Request.num_prompt_tokens,
        Request.num_cached_tokens,
        Request.num_output_tokens,
        Request.tier,
        Request.reason,
        Request.finish_reason,
        Request.queue_ms,
        Request.restore_ms,
        Request.prefill_ms,
        Request.decode_ms,
        Request.rewrites,
    )
    rows = connection.execute(columns.order_by(Request.number.desc()).limit(limit))
    return [RequestRow(*row) for row in rows]


def _count(connection: Connection, values: Mapping[str, float], now_s: float) -> None:
    for name, value in values.items():
        statement = insert(Counter).values(day=day_of(now_s), name=name, value=value)
        added = {"value": Counter.value + statement.excluded.value}
        connection.execute(
            statement.on_conflict_do_update(index_elements=["day", "name"], set_=added)
        )


def _counters(connection: Connection, since_s: float) -> dict[str, float]:
    sums = select(Counter.name, func.sum(Counter.value)).where(Counter.day >= day_of(since_s))
    rows = connection.execute(sums.group_by(Counter.name).order_by(Counter.name))
    return dict(rows.all())


def _forget_requests(connection: Connection) -> None:
    for table in (Request, Counter):
        connection.execute(delete(table))


def _trim(connection: Connection, before_s: float) -> int:
    days = select(Counter.day).distinct().order_by(Counter.day.desc()).limit(MAX_DAYS)
    old = (
        delete(Request).where(Request.kept_s < before_s),
        delete(Counter).where(Counter.day.not_in(days)),
        delete(FileDigest).where(FileDigest.last_used_s < before_s),
    )
    return sum(connection.execute(statement).rowcount for statement in old)
