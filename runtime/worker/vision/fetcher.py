"""Pictures that requests only name, fetched beside the intake, so that nobody else waits for them.

The server has let through only what may be fetched at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from runtime.errors import InvalidRequest
from runtime.prompt.past import with_images
from runtime.types import ChatPrompt, GenerateRequest, Image
from runtime.worker.vision.fetch import PUBLIC, FetchPolicy, fetch
from runtime.worker.vision.fetched import Fetched

_NUM_THREADS = 4


def names_pictures(request: GenerateRequest) -> bool:
    """Some of its pictures are still elsewhere."""
    prompt = request.prompt
    return isinstance(prompt, ChatPrompt) and any(
        image.url is not None for message in prompt.messages for image in message.images
    )


class Fetcher:
    """`give` takes a request that has all its pictures, `refuse` one of which cannot be had.

    Both are called on a thread of the fetcher's.
    """

    def __init__(
        self,
        give: Callable[[GenerateRequest], None],
        refuse: Callable[[str, InvalidRequest], None],
        policy: FetchPolicy = PUBLIC,
        fetched: Fetched | None = None,
    ) -> None:
        self._give = give
        self._refuse = refuse
        self._policy = policy
        self._fetched = fetched or Fetched()
        self._wanted: set[str] = set()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fetcher")

    def take(self, request: GenerateRequest) -> None:
        """Fetch what a request names, and give it back."""
        with self._lock:
            self._wanted.add(request.request_id)
        self._threads.submit(self._complete, request)

    def drop(self, request_id: str) -> None:
        """Nobody wants this one any more."""
        with self._lock:
            self._wanted.discard(request_id)

    def forget(self, deletion: int) -> None:
        """Keep nothing of what was fetched, nor is for who came before this deletion."""
        self._fetched.clear(deletion)

    def _complete(self, request: GenerateRequest) -> None:
        whole: GenerateRequest | None = None
        refusal = InvalidRequest("The images cannot be fetched.", "messages")
        try:
            whole = self._with_pictures(request)
        except InvalidRequest as error:
            refusal = error
        finally:
            # Whatever went wrong, somebody waits for an answer.
            self._answer(request.request_id, whole, refusal)

    def _answer(
        self, request_id: str, whole: GenerateRequest | None, refusal: InvalidRequest
    ) -> None:
        with self._lock:
            if request_id not in self._wanted:
                return
            self._wanted.remove(request_id)
        if whole is not None:
            self._give(whole)
        else:
            self._refuse(request_id, refusal)

    def _with_pictures(self, request: GenerateRequest) -> GenerateRequest:
        prompt = request.prompt
        assert isinstance(prompt, ChatPrompt)
        ignored: list[str] = []
        messages = with_images(
            prompt.messages, lambda image: self._with_data(image, request), ignored
        )
        prompt = msgspec.structs.replace(prompt, messages=messages)
        told = (*request.ignored, *ignored)
        return msgspec.structs.replace(request, prompt=prompt, ignored=told)

    def _with_data(self, image: Image, request: GenerateRequest) -> Image:
        if image.url is None or request.request_id not in self._wanted:
            return image
        tenant, came_after = request.cache.tenant, request.cache.after_deletion
        data = self._fetched.get(tenant, image.url)
        if data is None:
            data = fetch(image.url, image.field, self._policy)
            self._fetched.put(tenant, image.url, data, came_after)
        return msgspec.structs.replace(image, data=data, url=None)
