"""What waits for a model and then runs in it: a client's request, or the wish to have it loaded."""

from __future__ import annotations

import asyncio
from hashlib import blake2b

import msgspec

from runtime.errors import HearthError
from runtime.generation import Generation
from runtime.types import GenerateRequest, ModelSpec, Priority


class Wish:
    """Somebody wants a model loaded and asks it nothing. It belongs to the event loop."""

    def __init__(self) -> None:
        self.phase = "queued"
        self._outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def granted(self) -> None:
        """Wait until the model is loaded.

        Raises:
            HearthError: it will not be.
        """
        await asyncio.shield(self._outcome)

    def loading(self, phase: str) -> None:
        """It is being loaded, so far."""
        self.phase = phase

    def grant(self) -> None:
        """The model is loaded."""
        if not self._outcome.done():
            self._outcome.set_result(None)

    def fail(self, error: HearthError) -> None:
        """The model is not going to be loaded."""
        if not self._outcome.done():
            self._outcome.set_exception(error)
            self._outcome.exception()  # nobody may be waiting


class Call:
    """One entry of the queue. Times are of one monotonic clock."""

    __slots__ = (
        "_digest",
        "job",
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
        job: Generation | Wish,
        *,
        request_id: str,
        priority: Priority,
        since_s: float,
        until_s: float,
    ) -> None:
        self.spec = spec
        self.job = job
        self.request_id = request_id
        self.priority: Priority = priority
        self.since_s = since_s
        self.until_s = until_s
        self.num_requeues = 0
        self.yields = False
        """It only warms the cache: it loads no model, keeps none, and stands in nobody's way."""
        self._digest = b""

    @property
    def model(self) -> str:
        """The name that its model's process goes by."""
        return self.spec.engine

    @property
    def name(self) -> str:
        """The name that it asks."""
        return self.spec.id

    @property
    def generation(self) -> Generation | None:
        """The request; None for a wish."""
        return self.job if isinstance(self.job, Generation) else None

    @property
    def is_use(self) -> bool:
        """Its model is kept for a while afterwards; by counting only if it says so."""
        if self.yields or not isinstance(self.job, Generation):
            return False
        request = self.job.request
        return request.work != "count" or request.keep_alive_s is not None

    @property
    def has_spoken(self) -> bool:
        """The client was told something that cannot be taken back."""
        return isinstance(self.job, Generation) and self.job.has_spoken

    def grant(self) -> None:
        """The model is there, for a wish."""
        if isinstance(self.job, Wish):
            self.job.grant()

    def fail(self, error: HearthError) -> None:
        """It is not going to be served."""
        self.job.fail(error)

    def digest(self) -> bytes:
        """What stands for the request's content, 16 bytes."""
        if not self._digest and isinstance(self.job, Generation):
            self._digest = content_digest(self.job.request)
        return self._digest


def content_digest(request: GenerateRequest) -> bytes:
    """16 bytes that stand for what is asked, whoever asks it and when."""
    asked = msgspec.structs.replace(
        request, request_id="", deadline_s=0.0, client="", priority=None, keep_alive_s=None
    )
    return blake2b(msgspec.msgpack.encode(asked), digest_size=16).digest()
