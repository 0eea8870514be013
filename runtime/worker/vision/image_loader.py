"""The pictures of requests on their way in: fetched, decoded, cut up as the model wants them.

Belongs to the intake thread. From here on a message's image holds its digest in place of its bytes,
so that whatever compares, moves or hashes messages tells pictures apart without decoding them.
One that cannot be shown, and is not the newest input, is lost: see `runtime/prompt/past.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from weakref import WeakSet

import msgspec

from runtime.errors import UnusableImage
from runtime.kv.media import Medium
from runtime.prompt.past import with_images
from runtime.types import ChatPrompt, Image, Message
from runtime.worker.vision import pictures
from runtime.worker.vision.images import ImagePreparer, Prepared, PromptImage

MAX_IMAGES = 256
"""The oldest of more are lost, many at a time: whatever is lost changes the prompt behind it."""
_NUM_LOST = 128
MAX_PREPARED_BYTES = 256 << 20
"""What is prepared beyond this, over all requests, is made again when its turn comes."""

_MAX_KNOWN = 4096
_DIGEST_BYTES = 32


class PillowImageLoader:
    """Looks at pictures for one model, each of them once."""

    def __init__(self, sight: ImagePreparer) -> None:
        self._sight = sight
        self._known: OrderedDict[bytes, Medium | str] = OrderedDict()
        """What is known of an image, or why it cannot be shown."""
        self._waiting: WeakSet[PromptImage] = WeakSet()

    def hang(
        self, prompt: ChatPrompt, ignored: list[str] | None = None
    ) -> tuple[ChatPrompt, Mapping[bytes, PromptImage]]:
        """The prompt with digests for images, and the pictures by their digests; why some are lost
        is added to `ignored`.

        Raises:
            UnusableImage: one of the newest input cannot be shown.
        """
        told: list[str] = [] if ignored is None else ignored
        prompt_images: dict[bytes, PromptImage] = {}

        def show(image: Image) -> Image:
            shot = self._shot(image)
            prompt_images[shot.medium.digest] = shot
            return msgspec.structs.replace(image, data=shot.medium.digest, url=None)

        messages = with_images(_without_oldest(prompt.messages, told), show, told)
        return msgspec.structs.replace(prompt, messages=messages), prompt_images

    def _shot(self, image: Image) -> PromptImage:
        wish = f"{image.max_side}".encode()
        key = blake2b(image.data, digest_size=_DIGEST_BYTES, key=wish).digest()
        medium = self._known.pop(key, None)
        prepared: Prepared | None = None
        if medium is None:
            try:
                picture = pictures.decode(image.data, image.field, image.max_side)
                prepared = self._prepared(picture, image.field)
                medium = self._medium(picture.digest, prepared)
            except UnusableImage as error:
                medium = error.problem
        self._known[key] = medium
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        if isinstance(medium, str):
            raise UnusableImage(image.field, medium)
        prompt_image = PromptImage(medium, lambda: self._again(image))
        if prepared is not None and self._num_waiting_bytes() < MAX_PREPARED_BYTES:
            prompt_image.prepared = prepared
            self._waiting.add(prompt_image)
        return prompt_image

    def _again(self, image: Image) -> Prepared:
        picture = pictures.decode(image.data, image.field, image.max_side)
        return self._sight.prepare(picture.pixels)

    def _prepared(self, picture: pictures.Picture, field: str) -> Prepared:
        try:
            return self._sight.prepare(picture.pixels)
        except ValueError as error:
            width, height = picture.size
            problem = f"has {width} x {height} pixels, which this model refuses: {error}"
            raise UnusableImage(field, problem) from error

    def _medium(self, pixels: bytes, prepared: Prepared) -> Medium:
        """Other settings, or another grid, make other tokens of the same pixels."""
        shape = f"{prepared.num_tokens} {prepared.grid}".encode()
        content = pixels + self._sight.settings + shape
        digest = blake2b(content, digest_size=_DIGEST_BYTES).digest()
        return Medium(digest, prepared.num_tokens, prepared.grid)

    def _num_waiting_bytes(self) -> int:
        held = (prompt_image.prepared for prompt_image in tuple(self._waiting))
        return sum(prepared.nbytes for prepared in held if prepared is not None)


def _without_oldest(messages: Sequence[Message], ignored: list[str]) -> Sequence[Message]:
    """The messages, the oldest of too many images lost."""
    num_images = sum(not image.is_lost for message in messages for image in message.images)
    if num_images <= MAX_IMAGES:
        return messages
    num_lost = -(-(num_images - MAX_IMAGES) // _NUM_LOST) * _NUM_LOST
    ignored.append(f"messages (of {num_images} images the first {num_lost} are not shown)")
    numbers = iter(range(num_images))

    def without(message: Message) -> Message:
        images = (
            image if image.is_lost or next(numbers) >= num_lost else image.lost()
            for image in message.images
        )
        return msgspec.structs.replace(message, images=tuple(images))

    return [without(message) for message in messages]
