"""Pictures as clients send them: what is seen, what is refused, and that nothing gets through."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image as Pillow

from runtime.errors import InvalidRequest
from runtime.worker.vision.pictures import MAX_IMAGE_BYTES, MAX_SIDE, decode

FIELD = "messages[0].content[1]"


def drawn(width: int = 12, height: int = 8, mode: str = "RGB", seed: int = 1) -> Pillow.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Pillow.fromarray(noise, "RGBA").convert(mode)


def file_of(image: Pillow.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def digest(data: bytes) -> bytes:
    return decode(data, FIELD).digest


def refusal(data: bytes) -> str:
    with pytest.raises(InvalidRequest) as caught:
        decode(data, FIELD)
    assert caught.value.param == FIELD
    assert caught.value.message.startswith(FIELD)
    return caught.value.message


def test_pixels_are_those_that_were_drawn():
    image = drawn()
    picture = decode(file_of(image), FIELD)
    assert picture.size == (12, 8)
    assert picture.pixels.dtype == np.uint8
    assert np.array_equal(picture.pixels, np.asarray(image))


@pytest.mark.parametrize(("form", "options"), [("WEBP", {"lossless": True}), ("BMP", {})])
def test_the_same_pixels_are_the_same_picture_in_any_file(form: str, options: dict[str, object]):
    image = drawn()
    assert (
        decode(file_of(image, form, **options), FIELD).digest
        == decode(file_of(image), FIELD).digest
    )


def test_other_pixels_and_another_shape_are_other_pictures():
    assert (
        decode(file_of(drawn(seed=1)), FIELD).digest != decode(file_of(drawn(seed=2)), FIELD).digest
    )
    tall, wide = (Pillow.new("RGB", size, (9, 9, 9)) for size in ((4, 16), (16, 4)))
    assert digest(file_of(tall)) != digest(file_of(wide))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_every_usual_kind_of_pixel_is_seen_as_rgb(mode: str):
    assert decode(file_of(drawn(mode=mode)), FIELD).pixels.shape == (8, 12, 3)


def test_print_colours_are_seen_as_rgb():
    assert decode(file_of(drawn(mode="CMYK"), "JPEG"), FIELD).pixels.shape == (8, 12, 3)


def test_what_is_transparent_is_white():
    clear = Pillow.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert (decode(file_of(clear), FIELD).pixels == 255).all()


@pytest.mark.parametrize(
    ("size", "shown"), [((12, 8), (12, 8)), ((64, 32), (16, 8)), ((320, 3), (16, 2))]
)
def test_what_is_larger_than_wanted_is_shrunk(size: tuple[int, int], shown: tuple[int, int]):
    assert decode(file_of(drawn(*size)), FIELD, 16).size == shown


def test_a_photograph_is_turned_the_way_it_was_taken():
    image = drawn(12, 8)
    exif = Pillow.Exif()
    exif[0x0112] = 6
    assert decode(file_of(image, "JPEG", exif=exif), FIELD).size == (8, 12)


def test_a_photograph_with_a_second_picture_in_it_is_the_first():
    """As many phones write them, the second being its depth or light."""
    image, depth = drawn(seed=1), drawn(seed=2)
    both = file_of(image, "MPO", save_all=True, append_images=[depth])
    assert digest(both) == digest(file_of(image, "JPEG"))


def test_what_a_camera_said_that_nobody_can_read_changes_no_pixel():
    image = drawn()
    garbled = b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\1" * 30
    assert digest(file_of(image, "JPEG", exif=garbled)) == digest(file_of(image, "JPEG"))


def test_an_animation_is_refused():
    frames = [drawn(seed=n) for n in range(3)]
    moving = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert "animated" in refusal(moving)
    assert "animated" in refusal(
        file_of(frames[0], "WEBP", save_all=True, append_images=frames[1:])
    )


def test_deep_pixels_are_refused():
    deep = Pillow.fromarray(np.full((4, 4), 40_000, dtype=np.uint16))
    assert "8 bits" in refusal(file_of(deep))


@pytest.mark.parametrize(
    "data", [b"", b"GIF89a", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7"]
)
def test_what_is_no_image_is_refused(data: bytes):
    refusal(data)


def test_formats_that_are_not_listed_are_refused():
    assert "PNG, JPEG" in refusal(file_of(drawn(), "TIFF"))


def test_a_file_that_is_cut_off_is_refused_at_every_length():
    whole = file_of(drawn(), "JPEG")
    for length in range(0, len(whole) - 2, 7):
        refusal(whole[:length])


def png_claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header promises that many pixels."""

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b""))
    framed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


@pytest.mark.parametrize("size", [(100_000, 100_000), (MAX_SIDE + 1, 10), (10_000, 10_000)])
def test_a_bomb_is_refused_by_its_header(size: tuple[int, int]):
    assert "Shrink it" in refusal(png_claiming(*size))


def test_a_file_that_is_too_long_is_refused_unread():
    assert str(MAX_IMAGE_BYTES) in refusal(b"\x89PNG" + bytes(MAX_IMAGE_BYTES))


def test_a_picture_too_small_to_be_seen_is_refused():
    assert "too small" in refusal(file_of(Pillow.new("RGB", (1, 40))))


SAMPLES = [file_of(drawn(), form) for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]


def survive(seed: int) -> None:
    """A sample with some bytes changed, moved or missing is seen or refused, nothing else."""
    chance = random.Random(seed)
    data = bytearray(chance.choice(SAMPLES))
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(data))
        match chance.randrange(4):
            case 0:
                data[at] = chance.randrange(256)
            case 1:
                del data[at : at + chance.randint(1, 40)]
            case 2:
                data[at:at] = chance.randbytes(chance.randint(1, 40))
            case _:
                data[at : at + 4] = struct.pack(
                    ">I", chance.choice([0, 2**31 - 1, 2**32 - 1, 65535])
                )
        data = data or bytearray(b"\0")
    with contextlib.suppress(InvalidRequest):
        assert decode(bytes(data), FIELD).pixels.shape[2] == 3


def test_damaged_files_are_seen_or_refused():
    for seed in range(600):
        survive(seed)


@pytest.mark.soak
def test_many_damaged_files_are_seen_or_refused():
    for seed in range(600, 20_000):
        survive(seed)
