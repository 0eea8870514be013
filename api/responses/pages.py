"""Lists of items, a page at a time."""

from __future__ import annotations

from typing import Literal

import msgspec

from api.http.refusal import refuse
from api.responses.output import ItemList
from store.history.response_rows import ItemPage

Order = Literal["asc", "desc"]


def list_of(page: ItemPage | None, after: str | None = None) -> ItemList:
    """The page as it is told.

    Raises:
        InvalidRequest: there is none, as no item has the id `after`.
    """
    if page is None:
        refuse("after", f"is {(after or '')[:64]!r}, and no item here has that id.")
    ids = [row.id for row in page.items]
    return ItemList(
        data=[msgspec.Raw(row.body) for row in page.items],
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
        has_more=page.has_more,
    )
