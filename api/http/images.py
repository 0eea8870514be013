"""Pictures in messages, whatever protocol they came in. Nothing is decoded here but base64."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from api.http.refusal import refuse
from runtime.config.settings import Settings
from runtime.errors import InvalidRequest
from runtime.models.vision_files import BLIND_TYPES
from runtime.types import MAX_IMAGE_BYTES, Image, Message, ModelSpec

MAX_REMOTE = 4
LOW_DETAIL_SIDE = 512
"""What OpenAI makes of an image whose detail is low."""

_DETAILS = {"auto": None, "high": None, "original": None, "low": LOW_DETAIL_SIDE}
_BEGINNINGS = {
    "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/jpeg": (b"\xff\xd8\xff",),
    "image/webp": (b"RIFF",),
    "image/gif": (b"GIF87a", b"GIF89a"),
    "image/bmp": (b"BM",),
}
_OTHER_NAMES = {"image/jpg": "image/jpeg", "image/x-ms-bmp": "image/bmp"}
_UNTOLD = frozenset({"", "application/octet-stream"})


def image_of(url: str, at: int, field: str, detail: str | None = None) -> Image:
    """The picture at a `data:` or `https:` address; `at` is its place in the text.

    Raises:
        InvalidRequest: the address is of another kind, or its data is damaged or not what it says.
    """
    max_side = _max_side(detail, field)
    scheme, _, rest = url.strip().partition(":")
    kind = scheme.lower()
    if kind == "https":
        return Image(at=at, field=field, url=url, max_side=max_side)
    if kind != "data":
        shown = f"{kind}:" if kind in ("http", "file", "ftp") else "unknown"
        refuse(field, f"is an image at an address of the kind {shown}; send a data: URL.")
    return Image(at=at, field=field, data=_data_of(rest, field), max_side=max_side)


def check_images(messages: Sequence[Message], spec: ModelSpec, settings: Settings) -> None:
    """Refuse pictures that this model cannot see, or that this server will not have.

    Raises:
        InvalidRequest: `param` names the first one that is too much.
    """
    remote = 0
    images = [image for message in messages for image in message.images]
    for image in images:
        if not spec.sees:
            why = BLIND_TYPES.get(spec.model_type)
            is_blind = f"cannot be shown one: {why}" if why else "reads text only: leave it out"
            refuse(image.field, f"is an image, and {spec.id} {is_blind}.")
        if image.url is not None:
            remote += 1
            _check_remote(image, remote, settings)
    if len(images) <= settings.max_new_images:
        return
    new = [image for message in _new(messages) for image in message.images]
    if len(new) > settings.max_new_images:
        most = f"at most {settings.max_new_images} are read at a time (max_new_images)"
        field = new[settings.max_new_images].field
        refuse(field, f"is one image too many since the last answer: {most}.")


def _new(messages: Sequence[Message]) -> Sequence[Message]:
    """What was said since the assistant's last turn."""
    answers = [number for number, one in enumerate(messages) if one.role == "assistant"]
    return messages[answers[-1] + 1 :] if answers else messages


def _check_remote(image: Image, number: int, settings: Settings) -> None:
    if not settings.allow_remote_images:
        refuse(
            image.field,
            "is an image elsewhere, and this server fetches none (allow_remote_images): send the "
            "image itself, in base64.",
        )
    if number > MAX_REMOTE:
        refuse(
            image.field,
            f"is one image elsewhere too many: at most {MAX_REMOTE} are fetched for a request. "
            "Send the images themselves, in base64.",
        )


def _max_side(detail: str | None, field: str) -> int | None:
    if detail is None:
        return None
    if detail not in _DETAILS:
        refuse(f"{field}.detail", f"must be one of {', '.join(_DETAILS)}.")
    return _DETAILS[detail]


def _data_of(rest: str, field: str) -> bytes:
    """The bytes in a `data:` URL, without its scheme."""
    kind, comma, encoded = rest.partition(",")
    media_type, *options = (part.strip() for part in kind.lower().split(";"))
    if not comma or options[-1:] != ["base64"]:
        refuse(field, "must hold its image in base64: data:image/png;base64,…")
    encoded = "".join(encoded.split())  # some encoders break lines, and some do not pad
    encoded += "=" * (-len(encoded) % 4)
    if len(encoded) * 3 // 4 > MAX_IMAGE_BYTES + 2:
        refuse(field, f"has more than {MAX_IMAGE_BYTES} bytes, which is the most. Shrink it.")
    try:
        data = base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise InvalidRequest(f"{field} is not valid base64: {error}.", field) from error
    _check_kind(media_type, data, field)
    return data


def _check_kind(media_type: str, data: bytes, field: str) -> None:
    """Whether the bytes may be what their media type says; where it says nothing, they may."""
    wanted = _OTHER_NAMES.get(media_type, media_type)
    if wanted in _UNTOLD:
        return
    if wanted not in _BEGINNINGS:
        known = ", ".join(_BEGINNINGS)
        refuse(field, f"is of the media type {media_type[:64]!r}: send one of {known}.")
    found = next((kind for kind, starts in _BEGINNINGS.items() if data.startswith(starts)), None)
    if found not in (None, wanted):
        refuse(field, f"is said to be {media_type}, but its bytes are {found}.")
