"""Damaged files of the history that were set aside: known, and said, until acknowledged."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, delete, select, update
from sqlalchemy.dialects.sqlite import insert

from store.history.history_tables import SetAside


class SetAsideRow(NamedTuple):
    """One file by its name. `at_s` is wall time, for people, and `found_s` trusted time.

    So many agents and responses were taken over from it; `is_whole` says that this was all.
    """

    name: str
    at_s: float
    found_s: float
    num_agents: int = 0
    num_responses: int = 0
    is_whole: bool = False
    is_acknowledged: bool = False


def add(connection: Connection, row: SetAsideRow) -> None:
    """Know of a file; one that is known stays as it is."""
    connection.execute(insert(SetAside).values(row._asdict()).on_conflict_do_nothing())


def listing(connection: Connection) -> list[SetAsideRow]:
    """All that there are, the latest first."""
    columns = select(
        SetAside.name,
        SetAside.at_s,
        SetAside.found_s,
        SetAside.num_agents,
        SetAside.num_responses,
        SetAside.is_whole,
        SetAside.is_acknowledged,
    )
    rows = connection.execute(columns.order_by(SetAside.found_s.desc(), SetAside.name))
    return [SetAsideRow(*row) for row in rows]


def acknowledge(connection: Connection) -> int:
    """The operator knows of all of them; how many were new to him."""
    known = update(SetAside).where(~SetAside.is_acknowledged).values(is_acknowledged=True)
    return connection.execute(known).rowcount


def forget(connection: Connection, name: str) -> None:
    """The file is gone."""
    connection.execute(delete(SetAside).where(SetAside.name == name))
