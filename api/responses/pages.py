"""Lists of items, a page at a time."""

from __future__ import annotations

from typing import Literal

import msgspec

from api.http.refusal import refuse
from api.openai.response_schemas import ItemHead
from api.responses.output import ItemList

Order = Literal["asc", "desc"]


def page_of(items: list[msgspec.Raw], limit: int, order: Order, after: str | None) -> ItemList:
    """So many of the items, behind the one with the id `after`.

    Raises:
        InvalidRequest: no item has that id.
    """
    raws = items if order == "asc" else items[::-1]
    ids = [msgspec.json.decode(raw, type=ItemHead).id for raw in raws]
    if after is not None and after not in ids:
        refuse("after", f"is {after[:64]!r}, and no item here has that id.")
    start = ids.index(after) + 1 if after is not None else 0
    page = ids[start : start + limit]
    return ItemList(
        data=raws[start : start + limit],
        first_id=page[0] if page else None,
        last_id=page[-1] if page else None,
        has_more=start + limit < len(ids),
    )
