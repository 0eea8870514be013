"""`POST /v1/completions`: the older API, which continues text or token ids as they are."""

from __future__ import annotations

from collections.abc import Sequence

from litestar import Response, post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from api.http.body import HttpRequest
from api.http.cache_header import cache_header
from api.http.caller import asker_of
from api.http.errors import documented
from api.http.gate import Gate
from api.http.hearth_info import hearth_of
from api.http.sse import EventStream, open_stream, whole
from api.observe.record import Tally
from api.openai.convert import completion_to_generate
from api.openai.frame import (
    DONE,
    END,
    FINGERPRINT,
    CompletionEnvelope,
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
from runtime.errors import HearthError
from runtime.types import (
    Chunk,
    Finished,
    FinishReason,
    GenerateRequest,
    PromptLogprobs,
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
    frame = CompletionEnvelope("cmpl", data.model or spec.id)
    caller = asker_of(request)
    requests = await request.apart(
        lambda: completion_to_generate(data, frame.id, spec, gate.settings, caller)
    )
    drafts = _drafts_of(data, requests)
    unused = await request.unused_fields(CompletionRequest)
    answer = gate.submit(request.scope, requests)
    answer.tally.ignored += unused
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
        self, frame: CompletionEnvelope, tally: Tally, drafts: Sequence[_Draft], *, has_usage: bool
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
            self._event(index) for chunk in chunks for index in _add(self._drafts, chunk)
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
    """What was written of a choice, one of so many of its prompt, since it was last taken."""

    def __init__(self, beginning: str, num_beside: int) -> None:
        self.num_beside = num_beside
        self.texts: list[str] = [beginning] if beginning else []
        self.finish_reason: FinishReason | None = None
        self._logprobs = CompletionLogprobs()
        self._offset = len(beginning)

    def echo(self, chunk: PromptLogprobs) -> None:
        """A piece of the prompt."""
        self.texts.append(chunk.text)
        for token, offset, entry in zip(chunk.tokens, chunk.offsets, chunk.logprobs, strict=True):
            self._score(token, offset, entry)
        self._offset += len(chunk.text)

    def say(self, chunk: TextDelta | ReasoningDelta) -> None:
        """A piece of the answer."""
        self.texts.append(chunk.text)
        for entry in chunk.logprobs:
            self._score(entry.chosen.token, self._offset, entry)
            self._offset += len(entry.chosen.token)

    def take(self, index: int) -> CompletionChoice:
        """What was written, which is then forgotten."""
        logprobs, self._logprobs = self._logprobs, CompletionLogprobs()
        text = "".join(self.texts)
        self.texts.clear()
        return CompletionChoice(
            index, text, logprobs if logprobs.tokens else None, self.finish_reason
        )

    def _score(self, token: str, offset: int, entry: TokenLogprobs | None) -> None:
        lists = self._logprobs
        lists.tokens.append(token)
        lists.token_logprobs.append(entry.chosen.logprob if entry is not None else None)
        lists.top_logprobs.append(_alternatives(entry) if entry is not None else None)
        lists.text_offset.append(offset)


def _alternatives(entry: TokenLogprobs) -> dict[str, float]:
    """The most likely tokens and the chosen one; of two with the same text the likelier counts."""
    ranked = sorted((*entry.top, entry.chosen), key=lambda token: token.logprob)
    return {token.token: token.logprob for token in ranked}


def _add(drafts: Sequence[_Draft], chunk: Chunk) -> Sequence[int]:
    """Write a chunk into the drafts that it is of; their numbers."""
    match chunk:
        case PromptLogprobs():
            numbers = range(chunk.index, chunk.index + drafts[chunk.index].num_beside)
            for number in numbers:
                drafts[number].echo(chunk)
            return numbers
        case TextDelta() | ReasoningDelta():
            drafts[chunk.index].say(chunk)
        case Finished():
            drafts[chunk.index].finish_reason = "length" if chunk.reason == "length" else "stop"
        case _:
            return ()
    return (chunk.index,)


def _drafts_of(data: CompletionRequest, requests: Sequence[GenerateRequest]) -> list[_Draft]:
    """Empty ones; a prompt that is to be echoed is in them, or the worker tells it with scores."""
    return [
        _Draft(
            request.prompt.text
            if data.echo and not request.scores_prompt and isinstance(request.prompt, TextPrompt)
            else "",
            request.num_choices,
        )
        for request in requests
        for _ in range(request.num_choices)
    ]
