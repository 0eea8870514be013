"""What waits for a model and then runs in it: a client's request, or the wish to have it loaded."""

from __future__ import annotations

import asyncio
from hashlib import blake2b

import msgspec

from runtime.errors import HearthError
from runtime.supervisor.generation import Generation
from runtime.types import GenerateRequest, ModelSpec, Priority


class LoadRequest:
    """Somebody wants a model loaded and asks it nothing. It belongs to the event loop."""

    def __init__(self) -> None:
        self._outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def granted(self) -> None:
        """Wait until the model is loaded.

        Raises:
            HearthError: it will not be.
        """
        await asyncio.shield(self._outcome)

    def grant(self) -> None:
        """The model is loaded."""
        if not self._outcome.done():
            self._outcome.set_result(None)

    def fail(self, error: HearthError) -> None:
        """The model is not going to be loaded."""
        if not self._outcome.done():
            self._outcome.set_exception(error)
            self._outcome.exception()  # nobody may be waiting


class QueuedRequest:
    """One entry of the queue. Times are of one monotonic clock."""

    __slots__ = (
        "_digest",
        "generation",
        "job",
        "max_wait_s",
        "model",
        "name",
        "num_requeues",
        "priority",
        "request_id",
        "since_s",
        "spec",
        "until_s",
        "yields",
    )

    def __init__(
        self,
        spec: ModelSpec,
        job: Generation | LoadRequest,
        *,
        request_id: str,
        priority: Priority,
        since_s: float,
        until_s: float,
    ) -> None:
        self.spec = spec
        self.model = spec.engine
        """The name that its model's process goes by."""
        self.name = spec.id
        """The name that it asks."""
        self.job = job
        self.generation = job if isinstance(job, Generation) else None
        """The request; None for a wish."""
        self.request_id = request_id
        self.priority: Priority = priority
        self.since_s = since_s
        self.until_s = until_s
        self.max_wait_s = until_s - since_s
        self.num_requeues = 0
        self.yields = False
        """It only warms the cache: it loads no model, keeps none, and stands in nobody's way."""
        self._digest = b""

    @property
    def idle_until_s(self) -> float:
        """It waits until then at the latest for a time when nobody else is served."""
        return self.since_s + (self.generation.request.idle_s if self.generation else 0.0)

    @property
    def tenant(self) -> str:
        """Whose it is; a wish is the operator's."""
        return self.generation.request.cache.tenant if self.generation is not None else ""

    @property
    def is_use(self) -> bool:
        """Its model is kept for a while afterwards; by counting only if it says so."""
        if self.yields or self.generation is None:
            return False
        request = self.generation.request
        return request.work != "count" or request.keep_alive_s is not None

    @property
    def has_spoken(self) -> bool:
        """The client was told something that cannot be taken back."""
        return self.generation is not None and self.generation.has_spoken

    def fail(self, error: HearthError) -> None:
        """It is not going to be served."""
        self.job.fail(error)

    def wait_again(self, now_s: float) -> None:
        """Its worker was lost: it may wait for another one as long as it might for the first."""
        self.num_requeues += 1
        self.until_s = now_s + self.max_wait_s

    def digest(self) -> bytes:
        """What stands for the request's content, 16 bytes."""
        if not self._digest and self.generation is not None:
            self._digest = content_digest(self.generation.request)
        return self._digest


def content_digest(request: GenerateRequest) -> bytes:
    """16 bytes that stand for what is asked, whoever asks it and when."""
    asked = msgspec.structs.replace(
        request,
        request_id="",
        deadline_s=0.0,
        idle_s=0.0,
        client="",
        priority=None,
        keep_alive_s=None,
    )
    return blake2b(msgspec.msgpack.encode(asked), digest_size=16).digest()
