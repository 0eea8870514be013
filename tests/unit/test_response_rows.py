"""Stored responses in a real database: chains that share beginnings, and what goes first."""

from __future__ import annotations

from sqlalchemy import Connection

from store.database import Database
from store.history import response_rows
from store.history.expired_rows import expire_responses
from store.history.quota import FAMILIES, HistoryCapacity, make_room, used_bytes
from store.history.response_rows import Chain, ItemRow, PageWish, ResponseRow


def item(name: str, *, is_output: bool = False) -> ItemRow:
    return ItemRow(name, f'"{name}"'.encode(), is_output)


def put(
    connection: Connection, name: str, previous: str | None, now_s: float, size: int = 0
) -> None:
    row = ResponseRow(name, previous, b" " * size, created_s=now_s)
    items = [item(f"in_{name}"), item(f"out_{name}", is_output=True)]
    if previous is not None:
        response_rows.touch(connection, previous, now_s)
    response_rows.put(connection, row, items, now_s)


def put_family(connection: Connection) -> None:
    """`a` goes on as `b` and then `c`, and again as `d`."""
    for now_s, (name, previous) in enumerate([("a", None), ("b", "a"), ("c", "b"), ("d", "a")]):
        put(connection, name, previous, float(now_s))


def names(chain: Chain) -> list[str]:
    return [row.id for row in chain.items]


def found(connection: Connection, *item_ids: str) -> dict[str, bytes]:
    """What is found of these."""
    rows = response_rows.find_items(connection, item_ids)
    bodies = {one: response_rows.item_body(connection, row.number) for one, row in rows.items()}
    assert {one: len(body) for one, body in bodies.items()} == {
        one: row.num_bytes for one, row in rows.items()
    }
    return bodies


def test_a_chain_has_all_items_from_its_beginning(database: Database) -> None:
    database.submit(put_family).result()
    chains = {
        end: names(database.read(lambda c, end=end: response_rows.chain(c, end))) for end in "cd"
    }
    assert chains == {
        "c": ["in_a", "out_a", "in_b", "out_b", "in_c", "out_c"],
        "d": ["in_a", "out_a", "in_d", "out_d"],
    }


def test_the_size_of_a_chain_is_known_before_it_is_read(database: Database) -> None:
    database.submit(put_family).result()
    for end in "abcd":
        chain = database.read(lambda c, end=end: response_rows.chain(c, end))
        size = database.read(lambda c, end=end: response_rows.chain_size(c, end))
        assert size == (len(chain.items), sum(len(row.body) for row in chain.items))
    assert database.read(lambda c: response_rows.chain_size(c, "z")) == (0, 0)


def test_of_items_with_one_id_the_newest_is_found_among_any_number(database: Database) -> None:
    for number in range(3):
        row = ResponseRow(f"r{number}", None, b"", created_s=0.0)
        items = [ItemRow("same", str(number).encode(), is_output=False)]
        database.submit(
            lambda c, row=row, items=items: response_rows.put(c, row, items, 0)
        ).result()
    many = [f"none{number}" for number in range(40_000)]
    assert database.read(lambda c: found(c, *many, "same")) == {"same": b"2"}


def test_a_chain_with_a_gap_is_none_and_names_what_is_gone(database: Database) -> None:
    database.submit(put_family).result()
    assert database.submit(lambda c: response_rows.remove(c, "a", 9.0)).result()
    assert not database.submit(lambda c: response_rows.remove(c, "a", 9.0)).result()
    assert database.read(lambda c: response_rows.chain(c, "c")) == Chain([], missing="a")
    assert database.read(lambda c: response_rows.chain(c, "z")) == Chain([], missing="z")
    assert database.read(lambda c: found(c, "in_a", "out_b", "x")) == {"out_b": b'"out_b"'}


def test_a_response_is_stored_in_the_place_of_what_was_known_of_it(database: Database) -> None:
    database.submit(lambda c: put(c, "a", None, 0.0)).result()
    row = ResponseRow("a", None, b"whole", created_s=0.0)
    items = [item("in"), item("out", is_output=True)]
    database.submit(lambda c: response_rows.put(c, row, items, 1.0)).result()
    assert database.read(lambda c: response_rows.get(c, "a")) == (row, items)
    assert database.read(lambda c: found(c, "in_a")) == {}


def test_a_circle_is_a_gap_and_no_endless_chain(database: Database) -> None:
    database.submit(lambda c: put(c, "a", "a", 0.0)).result()
    assert database.read(lambda c: response_rows.chain(c, "a")).missing == "a"


def test_using_an_end_keeps_its_beginning(database: Database) -> None:
    database.submit(put_family).result()
    database.submit(lambda c: response_rows.touch(c, "c", 10.0)).result()
    assert database.submit(lambda c: expire_responses(c, 10.0, 5.0)).result() == 1
    kept = [one for one in "abcd" if database.read(lambda c, one=one: response_rows.get(c, one))]
    assert kept == ["a", "b", "c"]


def test_ends_make_room_before_beginnings(database: Database) -> None:
    def fill(connection: Connection) -> None:
        for i in range(6):
            put(connection, f"r{i}", f"r{i - 1}" if i else None, 1.0, size=40_000)

    database.submit(fill).result()
    before = database.read(used_bytes)
    num_removed = database.submit(
        lambda c: make_room(c, HistoryCapacity(before - 50_000, keep="r0"), 2.0)
    ).result()
    assert num_removed == 2
    assert names(database.read(lambda c: response_rows.chain(c, "r3")))[-1] == "out_r3"
    assert database.read(lambda c: response_rows.chain(c, "r4")).missing == "r4"
    assert len(FAMILIES) == 3


def paged(database: Database, wish: PageWish) -> tuple[list[str], bool] | None:
    """The ids of a page of `a`, and whether more follow."""
    found = database.read(lambda c: response_rows.page(c, "a", wish))
    return None if found is None else ([row.id for row in found.items], found.has_more)


def test_items_are_read_a_page_at_a_time_in_either_order(database: Database) -> None:
    rows = [item(f"i{number}", is_output=number == 2) for number in range(5)]
    put_row = ResponseRow("a", None, b"", created_s=0.0)
    database.submit(lambda c: response_rows.put(c, put_row, rows, 0)).result()
    database.submit(put_family).result()
    database.submit(lambda c: response_rows.put(c, put_row, rows, 0)).result()
    oldest, newest = PageWish(2, False, None), PageWish(2, True, None)
    assert paged(database, oldest) == (["i0", "i1"], True)
    assert paged(database, newest) == (["i4", "i3"], True)
    assert paged(database, oldest._replace(after="i2")) == (["i3", "i4"], False)
    assert paged(database, newest._replace(after="i1")) == (["i0"], False)
    assert paged(database, oldest._replace(after="in_b")) is None
    assert paged(database, oldest._replace(is_of_input=True, limit=9)) == (
        ["i0", "i1", "i3", "i4"],
        False,
    )
    assert database.read(lambda c: response_rows.own_item(c, "a", "i3")) == b'"i3"'
    assert database.read(lambda c: response_rows.own_item(c, "a", "in_b")) is None


def test_a_page_has_so_many_bytes_at_most_and_one_item_at_least(database: Database) -> None:
    rows = [ItemRow(f"i{number}", b"x" * 10, is_output=False) for number in range(5)]
    put_row = ResponseRow("a", None, b"", created_s=0.0)
    database.submit(lambda c: response_rows.put(c, put_row, rows, 0)).result()
    wish = PageWish(4, False, None, most_bytes=29)
    assert paged(database, wish) == (["i0", "i1"], True)
    assert paged(database, wish._replace(most_bytes=3)) == (["i0"], True)
    assert paged(database, wish._replace(most_bytes=3, after="i3")) == (["i4"], False)
