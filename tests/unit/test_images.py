"""Images in messages: what is taken up, and what is refused before anything is decoded."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api.agents.convert import with_history
from api.http.images import LOW_DETAIL_SIDE, MAX_REMOTE, image_of, shown_images
from runtime.config.settings import Settings
from runtime.errors import InvalidRequest
from runtime.types import MAX_IMAGE_BYTES, ChatPrompt, GenerateRequest, Image, Message, ModelSpec
from tests.tiny_vlms import encoded, picture

FIELD = "messages[0].content[1]"
PNG = encoded(picture(1))
SETTINGS = Settings(home=Path("/nowhere"))
FETCHING = msgspec.structs.replace(SETTINGS, allow_remote_images=True)
BLIND = ModelSpec(id="m", path="/m", context=99, model_type="x", nbytes=1, created_s=1)
SEEING = msgspec.structs.replace(BLIND, capabilities=("completion", "vision"))


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def refused(url: str, detail: str | None = None) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequest) as caught:
        image_of(url, 0, FIELD, detail)
    assert caught.value.message.startswith(FIELD)
    return caught.value.param, caught.value.message


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (PNG, "image/png"),
        (PNG, "IMAGE/PNG"),
        (PNG, "application/octet-stream"),
        (PNG, ""),
        (encoded(picture(1), "JPEG"), "image/jpeg"),
        (encoded(picture(1), "JPEG"), "image/jpg"),
        (encoded(picture(1), "WEBP"), "image/webp"),
        (encoded(picture(1), "GIF"), "image/gif"),
        (encoded(picture(1), "BMP"), "image/bmp"),
        (b"what no decoder knows", "image/png"),
        (PNG, "image/jpeg"),
        (encoded(picture(1), "JPEG"), "image/png"),
        (PNG, "application/pdf"),
    ],
)
def test_the_bytes_of_an_image_are_taken_as_they_are(data: bytes, media_type: str):
    image = image_of(data_url(data, media_type), 7, FIELD)
    assert image == Image(at=7, field=FIELD, data=data)


def test_an_address_is_read_however_its_encoder_broke_it():
    lines = base64.encodebytes(PNG).decode()
    encoded_once = lines.replace("\n", "")
    for url in (
        f"data:image/png;base64,{lines}",
        f"data:image/png; base64, {lines}".replace("\n", "\r\n"),
        f" DATA:IMAGE/PNG;charset=utf-8;BASE64,{encoded_once.rstrip('=')}\n",
    ):
        assert image_of(url, 7, FIELD) == Image(at=7, field=FIELD, data=PNG)


@pytest.mark.parametrize("num_more", [0, 1, 2, 3, 786_432])
def test_a_long_image_is_decoded_in_steps_without_a_difference(num_more: int):
    data = PNG + bytes(range(256)) * 3072 + bytes(num_more)  # longer than one step
    assert image_of(data_url(data), 7, FIELD) == Image(at=7, field=FIELD, data=data)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (data_url(b"%PDF-1.7", "application/pdf"), "send one of image/png"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png,AAAA", "base64"),
        ("data:image/png;base64", "base64"),
        ("data:image/png;base64,%%%", "not valid base64"),
        ("data:image/png;base64,AA==AAAA", "not valid base64"),
        (f"data:image/png;base64,{'A' * ((1 << 20) - 1)}=AAAA", "not valid base64"),
        ("http://example.org/a.png", "http:"),
        ("file:///etc/passwd", "file:"),
        ("/etc/passwd", "unknown"),
        ("gopher://example.org/x", "unknown"),
    ],
)
def test_an_image_that_is_not_what_it_says_is_refused_by_its_part(url: str, said: str):
    param, message = refused(url)
    assert param == FIELD
    assert said in message


def test_an_image_with_too_many_bytes_is_refused_before_it_is_decoded():
    most = "A" * (MAX_IMAGE_BYTES // 3 * 4 + 8)
    param, message = refused(f"data:image/png;base64,{most}")
    assert param == FIELD
    assert str(MAX_IMAGE_BYTES) in message


def test_low_detail_is_a_smaller_image_and_an_unknown_one_is_refused():
    url = data_url(PNG)
    assert image_of(url, 0, FIELD, "low").max_side == LOW_DETAIL_SIDE
    assert {image_of(url, 0, FIELD, one).max_side for one in (None, "auto", "high")} == {None}
    assert refused(url, "sharp")[0] == f"{FIELD}.detail"


def message(*numbers: int, role: Any = "user", url: str | None = None) -> Message:
    images = (Image(at=0, field=f"part {n}", data=b"" if url else PNG, url=url) for n in numbers)
    return Message(role=role, text="look", images=tuple(images))


def problem(messages: list[Message], spec: ModelSpec, settings: Settings) -> InvalidRequest | None:
    try:
        shown_images(messages, spec, settings, [])
    except InvalidRequest as error:
        return error
    return None


def test_a_model_that_reads_text_only_is_shown_no_image():
    error = problem([message(0)], BLIND, SETTINGS)
    assert error is not None
    assert error.param == "part 0"
    assert "reads text only" in error.message
    assert problem([message()], BLIND, SETTINGS) is None


def test_only_so_many_images_may_be_new_input_but_a_history_and_results_may_hold_more():
    assert problem([message(0, 1, 2, 3)], SEEING, SETTINGS) is None
    error = problem([message(0, 1), message(2, 3, 4, 5, 6)], SEEING, SETTINGS)
    assert error is not None
    assert error.param == "part 6"
    assert problem([message(0, 1), message(2, 3, 4, 5, 6, role="tool")], SEEING, SETTINGS) is None
    said = Message(role="assistant", text="yes")
    turns = [message(0, 1, 2, 3), said, message(4, 5), said, message(6, 7, 8, 9)]
    assert problem(turns, SEEING, SETTINGS) is None
    wide = msgspec.structs.replace(SETTINGS, max_new_images=9)
    assert problem([message(*range(9))], SEEING, wide) is None


def test_images_elsewhere_are_fetched_only_where_that_is_allowed_and_only_a_few():
    url = "https://example.org/a.png"
    error = problem([message(0, url=url)], SEEING, SETTINGS)
    assert error is not None
    assert "allow_remote_images" in error.message
    assert problem([message(0, url=url)], SEEING, FETCHING) is None
    said = Message(role="assistant", text="yes")
    turns = [message(0, 1, 2, url=url), said, message(3, 4, url=url)]
    error = problem(turns, SEEING, FETCHING)
    assert error is not None
    assert error.param == f"part {MAX_REMOTE}"


def test_images_of_an_agents_history_are_named_by_where_they_are_in_it():
    prompt = ChatPrompt(messages=(message(5),))
    request = GenerateRequest(request_id="r", model="m", prompt=prompt)
    history = [message(0), Message(role="assistant", text="ok"), message(1, 2)]
    whole, new = with_history(request, "be kind", history)
    assert isinstance(whole.prompt, ChatPrompt)
    found = [image.field for one in whole.prompt.messages for image in one.images]
    assert found == [
        "history[0].images[0]",
        "history[2].images[0]",
        "history[2].images[1]",
        "part 5",
    ]
    assert new == prompt.messages
