"""A prompt that goes on from a summary, computed while the summary is written.

What precedes the summary is computed first, then one piece of it after the other, each by a prefill
that goes on from the last one: so what is left when the summary is complete is short.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import msgspec

from runtime.cache.deletion_log import Receipt
from runtime.config.settings import Settings
from runtime.errors import HearthError
from runtime.prompt.compaction import with_summary_begun
from runtime.supervisor.generation import Generation
from runtime.types import Chunk, Failed, Finished, GenerateRequest, TextDelta, TextWasReasoning

_MAX_OPEN = 8
_PIECE_CHARACTERS = 256
"""What a prefill costs besides its tokens (the prompt is tokenized) is to be worth it."""

Following = Callable[[], Awaitable[GenerateRequest]]
"""Makes the request that goes on from a summary, which is its last message, whatever it says."""


class GrowingPrompt:
    """`writer` writes the summary; `warm` begins a prefill, or says by None that it is no time.

    It belongs to the event loop. What fails ends it, and is nobody's error.
    """

    def __init__(
        self,
        writer: Generation,
        following: Following,
        warm: Callable[[GenerateRequest, Receipt | None], Generation | None],
    ) -> None:
        self._writer = writer
        self._following = following
        self._warm = warm
        self._said = ""
        self._generation: Generation | None = None
        self._wake = asyncio.Event()
        self.is_open = True

    @property
    def request(self) -> GenerateRequest:
        """That sums up the conversation."""
        return self._writer.request

    def hear(self, chunk: Chunk) -> None:
        """Take in what the writer says; with its end this ends, before anybody goes on from it."""
        match chunk:
            case Finished() | Failed():
                self.close()
                return
            case TextDelta(text=text):
                self._said += text
            case TextWasReasoning():
                self._said = ""
            case _:
                return
        self._wake.set()

    def close(self) -> None:
        """Compute no more of it; what is computed is kept as that of any other prompt."""
        self.is_open = False
        self._wake.set()
        if self._generation is not None:
            self._generation.abort()

    async def run(self) -> None:
        """Compute what there is of it, until it is closed or a prefill fails."""
        try:
            await self._writer.accepted()
            following = await self._following()
            num_computed, number = -_PIECE_CHARACTERS, 0
            while self.is_open:
                said = self._said
                if abs(len(said) - num_computed) >= _PIECE_CHARACTERS:
                    piece = self._piece(following, said, number)
                    if await self._is_computed(piece):
                        num_computed, number = len(said), number + 1
                        continue
                self._wake.clear()
                await self._wake.wait()
        except HearthError:
            pass
        finally:
            self.close()

    def _piece(self, following: GenerateRequest, said: str, number: int) -> GenerateRequest:
        writer = self._writer.request
        return msgspec.structs.replace(
            with_summary_begun(following, said),
            request_id=f"{writer.request_id}-ahead-{number}",
            work="prefill",
            priority="background",
            cache=msgspec.structs.replace(following.cache, tenant=writer.cache.tenant),
            written_by=writer.request_id,
        )

    async def _is_computed(self, piece: GenerateRequest) -> bool:
        """False when it is no time for it now. Raises HearthError when it failed or was ended."""
        self._generation = generation = self._warm(piece, self._writer.received)
        if generation is None:
            return False
        try:
            await generation.accepted()
            while chunks := await generation.next_chunks():
                if isinstance(failed := chunks[-1], Failed):
                    raise HearthError(failed.message)
        finally:
            self._generation = None
            generation.abort()
        return True


class GrowingPrompts:
    """Those that are open. `spawn` has their work done on the event loop."""

    def __init__(
        self,
        settings: Settings,
        warm: Callable[[GenerateRequest, Receipt | None], Generation | None],
        spawn: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        self._settings = settings
        self._warm = warm
        self._spawn = spawn
        self._open: list[GrowingPrompt] = []

    def begin(self, writer: Generation, following: Following) -> GrowingPrompt | None:
        """Compute what goes on from a summary while `writer` writes it; None where that is not
        wanted. Whoever asks for it closes it with the answer.
        """
        self._open = [one for one in self._open if one.is_open]
        is_off = not self._settings.prewarm or writer.request.cache.mode == "off"
        if is_off or len(self._open) >= _MAX_OPEN:
            return None
        growing = GrowingPrompt(writer, following, self._warm)
        self._open.append(growing)
        self._spawn(growing.run())
        return growing

    def forget(self, is_deleted: Callable[[GenerateRequest], bool]) -> None:
        """Close those of conversations that are deleted."""
        for one in self._open:
            if is_deleted(one.request):
                one.close()
