"""`POST /v1/completions`: the older API, which continues text or token ids as they are."""

from __future__ import annotations

from collections.abc import Sequence

from litestar import Response, post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from api.body import HttpRequest
from api.cache_header import cache_header
from api.deps import Gate
from api.errors import documented
from api.hearth_info import hearth_of
from api.lineage import asker_of
from api.openai.convert import completion_to_generate
from api.openai.frame import (
    DONE,
    END,
    FINGERPRINT,
    Frame,
    comment,
    encode,
    error_event,
    hearth_field,
    usage_event,
    usage_of,
)
from api.openai.schemas import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from api.record import Tally
from api.sse import EventStream, open_stream, whole
from runtime.errors import HearthError
from runtime.types import (
    Chunk,
    Finished,
    FinishReason,
    GenerateRequest,
    ReasoningDelta,
    TextDelta,
    TextPrompt,
    TokenLogprobs,
)


@post(
    ["/v1/completions", "/completions"],
    status_code=200,
    tags=["OpenAI"],
    responses=documented(Completion),
)
async def completions(
    data: JSONBody[CompletionRequest], request: HttpRequest, gate: NamedDependency[Gate]
) -> Response[Completion] | EventStream:
    """Continue one or several prompts; with `stream`, as server-sent events."""
    spec = gate.spec(data.model)
    frame = Frame("cmpl", data.model or spec.id)
    requests = completion_to_generate(data, frame.id, spec, gate.settings, asker_of(request))
    drafts = [_Draft(text) for text in _beginnings(requests, has_echo=bool(data.echo))]
    answer = gate.submit(request.scope, requests)
    if data.stream:
        has_usage = data.stream_options is not None and bool(data.stream_options.include_usage)
        stream = CompletionStream(frame, answer.tally, drafts, has_usage=has_usage)
        return await open_stream(request, answer, stream, gate.settings.keep_alive_s)
    await whole(request, answer, lambda chunk: _add(drafts, chunk))
    return Response(
        Completion(
            id=frame.id,
            created=frame.created,
            model=frame.model,
            choices=[draft.take(index) for index, draft in enumerate(drafts)],
            usage=usage_of(answer.tally),
            system_fingerprint=FINGERPRINT,
            hearth=hearth_of(answer.tally),
        ),
        headers=cache_header(answer.tally.least_cached),
    )


class CompletionStream:
    """An answer as a stream of `text_completion` events."""

    def __init__(
        self, frame: Frame, tally: Tally, drafts: Sequence[_Draft], *, has_usage: bool
    ) -> None:
        self._head, self._tail = frame.around("text_completion", has_usage=has_usage)
        self._tally = tally
        self._drafts = drafts
        self._has_usage = has_usage

    def opening(self) -> bytes:
        """The prompts, where they are to be echoed."""
        return b"".join(self._event(i) for i, draft in enumerate(self._drafts) if draft.texts)

    def chunks(self, chunks: Sequence[Chunk]) -> bytes:
        """One event for each piece of text."""
        return b"".join(
            self._event(index)
            for chunk in chunks
            if (index := _add(self._drafts, chunk)) is not None
        )

    def sign_of_life(self, phase: str) -> bytes:
        """A comment."""
        return comment(phase)

    def failure(self, error: HearthError) -> bytes:
        """An error event."""
        return error_event(error)

    def closing(self) -> bytes:
        """The usage, when it was asked for, and [DONE]."""
        return usage_event(self._head, self._tally) + DONE if self._has_usage else DONE

    def _event(self, index: int) -> bytes:
        choice = self._drafts[index].take(index)
        extra = hearth_field(self._tally) if choice.finish_reason is not None else b""
        return self._head + encode(choice) + self._tail + extra + END


class _Draft:
    """What was written of a choice since it was last taken."""

    def __init__(self, beginning: str) -> None:
        self.texts: list[str] = [beginning] if beginning else []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self._offset = len(beginning)

    def take(self, index: int) -> CompletionChoice:
        """What was written, which is then forgotten."""
        choice = CompletionChoice(
            index, "".join(self.texts), self._taken_logprobs(), self.finish_reason
        )
        self.texts.clear()
        return choice

    def _taken_logprobs(self) -> CompletionLogprobs | None:
        if not self.logprobs:
            return None
        entries, self.logprobs = self.logprobs, []
        offsets: list[int] = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry.chosen.token)
        return CompletionLogprobs(
            tokens=[entry.chosen.token for entry in entries],
            token_logprobs=[entry.chosen.logprob for entry in entries],
            top_logprobs=[_alternatives(entry) for entry in entries],
            text_offset=offsets,
        )


def _alternatives(entry: TokenLogprobs) -> dict[str, float]:
    """The most likely tokens and the chosen one; of two with the same text the likelier counts."""
    ranked = sorted((*entry.top, entry.chosen), key=lambda token: token.logprob)
    return {token.token: token.logprob for token in ranked}


def _add(drafts: Sequence[_Draft], chunk: Chunk) -> int | None:
    """Write a chunk into its draft; the draft's number, None when there is nothing to write."""
    match chunk:
        case TextDelta() | ReasoningDelta():
            drafts[chunk.index].texts.append(chunk.text)
            drafts[chunk.index].logprobs += chunk.logprobs
        case Finished():
            drafts[chunk.index].finish_reason = "length" if chunk.reason == "length" else "stop"
        case _:
            return None
    return chunk.index


def _beginnings(requests: Sequence[GenerateRequest], *, has_echo: bool) -> list[str]:
    """What each choice begins with: its prompt where that is to be echoed, otherwise nothing."""
    return [
        request.prompt.text if has_echo and isinstance(request.prompt, TextPrompt) else ""
        for request in requests
        for _ in range(request.num_choices)
    ]
