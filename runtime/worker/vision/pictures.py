"""Pictures on their way in: what a client sent becomes plain RGB pixels, or a refusal.

Pillow reads hostile files here, so everything is bounded before anything is decoded.
"""

from __future__ import annotations

import hashlib
import io
import struct
import warnings
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageOps, UnidentifiedImageError

from runtime.errors import UnusableImage
from runtime.types import MAX_IMAGE_BYTES

MAX_PIXELS = 50_000_000
MAX_SIDE = 16_384
MIN_SIDE = 2
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})
_WHITE = (255, 255, 255)
_LIES = (IndexError, KeyError, TypeError, AttributeError, ArithmeticError, MemoryError)
"""What Pillow's parsers let through when a file lies about itself."""
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, struct.error, *_LIES)


class Picture(NamedTuple):
    """`pixels` is RGB, uint8 [height, width, 3]; the digest is of the pixels and their shape."""

    pixels: NDArray[np.uint8]
    digest: bytes

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        height, width, _ = self.pixels.shape
        return width, height


def decode(data: bytes, field: str, max_side: int | None = None) -> Picture:
    """The picture in these bytes: turned as its camera said, transparency on white.

    One with a longer side than `max_side` is shrunk to that.

    Raises:
        UnusableImage: it is too large, damaged, animated, of another format, or deeper than
            8 bits; `param` is the field.
    """
    if not data:
        _refuse(field, "is empty: send the bytes of an image.")
    if len(data) > MAX_IMAGE_BYTES:
        _refuse(field, f"has {len(data)} bytes, at most {MAX_IMAGE_BYTES} are read. Shrink it.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of metadata that no pixel depends on
            warnings.simplefilter("error", Pillow.DecompressionBombWarning)
            pixels = _pixels(data, field, max_side)
    except UnusableImage:
        raise
    except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning):
        _refuse(field, f"has more than {MAX_PIXELS} pixels. Shrink it.")
    except UnidentifiedImageError:
        _refuse(field, f"is no image that is known here: send {', '.join(_FORMATS)}.")
    except (OSError, ValueError, SyntaxError, EOFError):
        _refuse(field, "is damaged or cut off: its pixels cannot be read.")
    except _LIES:
        _refuse(field, "is damaged: its structure cannot be read.")
    shape = b"%d %d\0" % pixels.shape[:2]
    return Picture(pixels, hashlib.blake2b(shape + pixels.tobytes(), digest_size=32).digest())


def _pixels(data: bytes, field: str, max_side: int | None) -> NDArray[np.uint8]:
    with Pillow.open(io.BytesIO(data), formats=_FORMATS) as image:
        _check(image, field)
        image.load()
        upright = _upright(image)
    flat = _flattened(upright)
    if max_side is not None and max(flat.size) > max_side:
        width, height = (max(MIN_SIDE, max_side * n // max(flat.size)) for n in flat.size)
        flat = flat.resize((width, height))
    return np.asarray(flat, dtype=np.uint8)


def _upright(image: Pillow.Image) -> Pillow.Image:
    """Turned as its camera said; as it is where nobody can read what that said."""
    try:
        return ImageOps.exif_transpose(image)
    except _UNREADABLE:
        return image


def _check(image: Pillow.Image, field: str) -> None:
    """Refuse by what the header says, before a pixel is decoded."""
    width, height = image.size
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        _refuse(
            field,
            f"has {width} x {height} pixels, at most {MAX_PIXELS} and {MAX_SIDE} on a side are "
            "read. Shrink it.",
        )
    if min(width, height) < MIN_SIDE:
        _refuse(field, f"has {width} x {height} pixels, which is too small to be seen.")
    # Photographs of many phones hold a second picture, for depth or light: the first is meant.
    if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
        _refuse(field, "is animated: send one of its frames.")
    if image.mode not in _MODES:
        _refuse(field, f"has pixels of mode {image.mode!r}: convert it to 8 bits per channel.")


def _flattened(image: Pillow.Image) -> Pillow.Image:
    """RGB, with white where it is transparent."""
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        layered = image.convert("RGBA")
        flat = Pillow.new("RGB", layered.size, _WHITE)
        flat.paste(layered, mask=layered.getchannel("A"))
        return flat
    return image.convert("RGB")


def _refuse(field: str, problem: str) -> NoReturn:
    raise UnusableImage(field, problem)
