"""Parts of messages that hold damaged, lying or misshapen images, the same for the same seed."""

from __future__ import annotations

import random
import struct
from typing import Any

from tests.image_requests import b64, chat, image_block, message, ollama, response, url_of
from tests.tiny_vlms import encoded, picture

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
SAMPLES = {kind: encoded(picture(7, 28, 28), kind) for kind in KINDS}
_TYPES = (*(f"image/{kind.lower()}" for kind in KINDS), "image/jpg", "image/tiff", "text/plain", "")
_LIES = (0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFF, 0x10000)
_ODD: tuple[Any, ...] = (None, "", 0, -1, 1.5, True, [], {}, [[]], "x" * 3000, {"url": None}, "§")
_URLS = (
    *("file:///etc/passwd", "http://localhost/x", "https://127.0.0.1/x.png", "data:", "data:,"),
    *("data:image/png;base64", "data:image/png;base64,%", "data:;base64,", "//x", "javascript:1"),
    *("data:image/png;charset=utf-8;base64,iVBORw0KGgo=", "https://", "https://[::1", "\0"),
)


def damaged(chance: random.Random) -> bytes:
    """The bytes of an image file with up to a dozen of them changed, moved, missing or lying."""
    data = bytearray(SAMPLES[chance.choice(KINDS)])
    for _ in range(chance.choice((0, 1, 1, 2, 4, 12))):
        at = chance.randrange(len(data))
        match chance.randrange(6):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                del data[at : at + chance.randint(1, 60)]
            case 2:
                data[at:at] = chance.randbytes(chance.randint(1, 60))
            case 3:
                data[at : at + 4] = struct.pack(chance.choice("<>") + "I", chance.choice(_LIES))
            case 4:
                del data[at:]
            case _:
                data[at:at] = SAMPLES[chance.choice(KINDS)][: chance.randint(1, 200)]
        data = data or bytearray(b"\0")
    return bytes(data)


def misshapen(value: Any, chance: random.Random) -> Any:
    """A JSON value with one thing in it removed, doubled or of another kind."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(sorted(value))
        match chance.randrange(4):
            case 0:
                return {name: one for name, one in value.items() if name != key}
            case 1:
                return value | {f"{key}x": value[key]}
            case _:
                return value | {key: misshapen(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        return [*value[:at], misshapen(value[at], chance), *value[at + chance.randrange(2) :]]
    return chance.choice((*_ODD, *_URLS))


def requests(seed: int) -> tuple[str, dict[str, Any]]:
    """Where to send which body."""
    chance = random.Random(seed)
    data, media_type = damaged(chance), "application/octet-stream"
    if chance.random() < 0.3:
        media_type = chance.choice(_TYPES)
    part: Any = {"type": "image_url", "image_url": {"url": url_of(data, media_type)}}
    block: Any = image_block(data, media_type)
    given: Any = {"type": "input_image", "image_url": url_of(data, media_type), "detail": "low"}
    plain: Any = b64(data)
    if chance.random() < 0.3:
        part, block, given, plain = (misshapen(one, chance) for one in (part, block, given, plain))
    match chance.randrange(4):
        case 0:
            return chat(part, max_tokens=1)
        case 1:
            return response(given, max_output_tokens=1)
        case 2:
            return message(block, max_tokens=1)
        case _:
            return ollama(plain)
