"""For how long files have lain untouched, as far as was seen: their own times are anybody's to set.

They are named by their paths below the store, of which the first part is their kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sqlalchemy import Connection, delete, func, select
from sqlalchemy.dialects.sqlite import insert

from store.slot_rows import chunks
from store.tables import Sighting


def ages(
    connection: Connection, kind: str, files: Mapping[str, int], now_s: float
) -> dict[str, float]:
    """Seconds of trusted time since each of all files of a kind was first seen as it is.

    `files` are modification times in nanoseconds, of which only a change counts. What is not
    among them any more is forgotten.
    """
    is_of_kind = func.substr(Sighting.path, 1, len(kind) + 1) == f"{kind}/"
    columns = select(Sighting.path, Sighting.mtime_ns, Sighting.since_s).where(is_of_kind)
    seen = {path: (mtime_ns, since_s) for path, mtime_ns, since_s in connection.execute(columns)}
    for some in chunks([path for path in seen if path not in files]):
        connection.execute(delete(Sighting).where(Sighting.path.in_(some)))
    since: dict[str, float] = {}
    for path, mtime_ns in files.items():
        before = seen.get(path)
        since[path] = before[1] if before is not None and before[0] == mtime_ns else now_s
        if before is None or before[0] != mtime_ns:
            fresh = insert(Sighting).values(path=path, mtime_ns=mtime_ns, since_s=now_s)
            changed = {"mtime_ns": mtime_ns, "since_s": now_s}
            connection.execute(fresh.on_conflict_do_update(index_elements=["path"], set_=changed))
    return {path: now_s - since_s for path, since_s in since.items()}


def forget_gone(connection: Connection, root: Path) -> None:
    """Forget files that are not below the store's folder `root` any more."""
    paths = connection.execute(select(Sighting.path)).scalars()
    for some in chunks([path for path in paths if not (root / path).exists()]):
        connection.execute(delete(Sighting).where(Sighting.path.in_(some)))
