"""The pictures of requests on their way in: fetched, decoded, cut up as the model wants them.

Belongs to the intake thread. From here on a message's image holds its digest in place of its bytes,
so that whatever compares, moves or hashes messages tells pictures apart without decoding them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from weakref import WeakSet

import msgspec

from runtime.errors import InvalidRequest
from runtime.kv.media import Medium
from runtime.types import ChatPrompt, Image, Message
from runtime.worker.vision import pictures
from runtime.worker.vision.images import ImagePreparer, Prepared, PromptImage

MAX_IMAGES = 256
MAX_PREPARED_BYTES = 256 << 20
"""What is prepared beyond this, over all requests, is made again when its turn comes."""

_MAX_KNOWN = 4096
_DIGEST_BYTES = 32


class PillowImageLoader:
    """Looks at pictures for one model, each of them once."""

    def __init__(self, sight: ImagePreparer) -> None:
        self._sight = sight
        self._known: OrderedDict[bytes, Medium] = OrderedDict()
        self._waiting: WeakSet[PromptImage] = WeakSet()

    def hang(self, prompt: ChatPrompt) -> tuple[ChatPrompt, Mapping[bytes, PromptImage]]:
        """The prompt with digests for images, and the pictures by their digests.

        Raises:
            InvalidRequest: one cannot be read, or there are too many.
        """
        prompt_images: dict[bytes, PromptImage] = {}
        num_images = sum(len(message.images) for message in prompt.messages)
        if not num_images:
            return prompt, prompt_images
        if num_images > MAX_IMAGES:
            text = f"The messages hold {num_images} images, at most {MAX_IMAGES} are read."
            raise InvalidRequest(text, "messages")
        messages = tuple(self._hung(message, prompt_images) for message in prompt.messages)
        return msgspec.structs.replace(prompt, messages=messages), prompt_images

    def _hung(self, message: Message, prompt_images: dict[bytes, PromptImage]) -> Message:
        if not message.images:
            return message
        images: list[Image] = []
        for image in message.images:
            prompt_image = self._shot(image)
            prompt_images[prompt_image.medium.digest] = prompt_image
            images.append(msgspec.structs.replace(image, data=prompt_image.medium.digest, url=None))
        return msgspec.structs.replace(message, images=tuple(images))

    def _shot(self, image: Image) -> PromptImage:
        wish = f"{image.max_side}".encode()
        key = blake2b(image.data, digest_size=_DIGEST_BYTES, key=wish).digest()
        medium = self._known.pop(key, None)
        prepared: Prepared | None = None
        if medium is None:
            picture = pictures.decode(image.data, image.field, image.max_side)
            prepared = self._prepared(picture, image.field)
            medium = self._medium(picture.digest, prepared)
        self._known[key] = medium
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
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
            message = f"{field} has {width} x {height} pixels, which this model refuses: {error}"
            raise InvalidRequest(message, field) from error

    def _medium(self, pixels: bytes, prepared: Prepared) -> Medium:
        """Other settings, or another grid, make other tokens of the same pixels."""
        shape = f"{prepared.num_tokens} {prepared.grid}".encode()
        content = pixels + self._sight.settings + shape
        digest = blake2b(content, digest_size=_DIGEST_BYTES).digest()
        return Medium(digest, prepared.num_tokens, prepared.grid)

    def _num_waiting_bytes(self) -> int:
        held = (prompt_image.prepared for prompt_image in tuple(self._waiting))
        return sum(prepared.nbytes for prepared in held if prepared is not None)
