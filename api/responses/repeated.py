"""What a response repeats of its request is bounded: each event that has it is encoded at once."""

from __future__ import annotations

import msgspec

from api.http.refusal import refuse
from api.openai.fields import Raws
from api.openai.response_schemas import ResponseRequest

MAX_REPEATED_BYTES = 4 << 20
MAX_PAIRS, MAX_NAME, MAX_VALUE = 16, 64, 512
"""What OpenAI takes as metadata: so many pairs, characters of a name and of a value."""

_MOST_WRITTEN = 12 * MAX_VALUE + 2
"""Bytes of JSON that a value may have if each of its characters is escaped in two halves."""
_REMEDIES = {
    "instructions": "send the rest as a message of the developer, in input",
    "tools": "leave some out, or make their descriptions shorter",
}


def check_repeated(data: ResponseRequest) -> None:
    """Refuse a request of which a response would repeat too much. It takes a while.

    Raises:
        InvalidRequest: `param` is the largest field.
    """
    check_metadata(data.metadata)
    fields = msgspec.structs.asdict(data)
    unrepeated = ("input", "metadata", "extra_body", "chat_template_kwargs")
    sizes = {
        name: len(msgspec.json.encode(value))
        for name, value in fields.items()
        if value is not None and name not in unrepeated
    }
    if sum(sizes.values()) > MAX_REPEATED_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        refuse(
            largest,
            f"has {sizes[largest]} bytes: what a response repeats of its request has at most "
            f"{MAX_REPEATED_BYTES} in all. Make it shorter: "
            f"{_REMEDIES.get(largest, 'it is no place for so much')}.",
        )


def check_metadata(metadata: Raws | None) -> None:
    """Refuse more metadata than OpenAI takes. Raises InvalidRequest."""
    given = metadata or {}
    if len(given) > MAX_PAIRS:
        refuse("metadata", f"has {len(given)} pairs, at most {MAX_PAIRS} are kept: send fewer.")
    for name, value in given.items():
        if len(name) > MAX_NAME:
            most = f"at most {MAX_NAME} are kept: make it shorter"
            refuse("metadata", f"has a name of {len(name)} characters ({name[:32]}…), {most}.")
        if _length(value) > MAX_VALUE:
            most = f"has more than {MAX_VALUE} characters, no more are kept: make it shorter"
            refuse(f"metadata.{name}", f"{most}.")


def _length(value: msgspec.Raw) -> int:
    """Characters of a text, or of what is written where it is none."""
    if len(value) > _MOST_WRITTEN:
        return len(value)
    read: object = msgspec.json.decode(value)
    return len(read) if isinstance(read, str) else len(value)
