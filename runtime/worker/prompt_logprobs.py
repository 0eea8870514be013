"""A prompt on its way back, with the log probabilities of its own tokens.

Pure: what the device found out comes in slices, as the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from runtime.types import PromptLogprobs, TokenLogprob, TokenLogprobs
from runtime.worker.output.detokenizer import Detokenizer

MAX_LOGITS = 1 << 25
"""Of one slice: each array of them takes 128 MiB, and a few are there at once."""

TokenText = Callable[[int], tuple[str, bytes]]
"""A token's text and bytes."""

_IMPOSSIBLE = -9999.0
"""OpenAI's own floor: JSON has no infinity."""


def with_text(token_id: int, logprob: float, token_text: TokenText) -> TokenLogprob:
    """A token's log probability, as clients are told of it."""
    text, raw = token_text(token_id)
    return TokenLogprob(token=text, token_bytes=raw, logprob=max(logprob, _IMPOSSIBLE))


class Tokenizer(Protocol):
    """What is used of `Template`."""

    def detokenizer(self, context: Sequence[int]) -> Detokenizer: ...

    def token_text(self, token_id: int) -> tuple[str, bytes]: ...


class Scored(Protocol):
    """What is used of `Score`."""

    @property
    def logprob(self) -> float: ...

    @property
    def top(self) -> list[tuple[int, float]]: ...


class Echo:
    """`text` is what the prompt was given as, if it was text; else its tokens say it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        token_ids: Sequence[int],
        text: str | None,
        *,
        num_top: int,
        vocab_size: int,
    ) -> None:
        self.num_top = num_top
        self.max_slice = max(1, MAX_LOGITS // vocab_size)
        """So many tokens may be scored at once."""
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self._text = text
        self._detokenizer = tokenizer.detokenizer(())
        self._num_told = 0
        self._num_characters = 0

    def next_slice(self, scores: Sequence[Scored]) -> PromptLogprobs:
        """The next tokens: all that have these scores, and before them the first one."""
        logprobs: list[TokenLogprobs | None] = [] if self._num_told else [None]
        start, end = self._num_told, self._num_told + len(logprobs) + len(scores)
        token_ids = self._token_ids[start:end]
        scored = zip(token_ids[len(logprobs) :], scores, strict=True)
        logprobs += [self._logprobs(token_id, score) for token_id, score in scored]
        begin, offsets, said = self._num_characters, list[int](), list[str]()
        for token_id in token_ids:
            offsets.append(self._num_characters)
            said.append(self._detokenizer.add(token_id))
            self._num_characters += self._width(said[-1])
        self._num_told = end
        if end == len(self._token_ids):
            said.append(self._detokenizer.finish())
            self._num_characters += len(said[-1])
            if self._text is not None:
                self._num_characters = len(self._text)
        whole = "".join(said) if self._text is None else self._text[begin : self._num_characters]
        tokens = [self._tokenizer.token_text(token_id)[0] for token_id in token_ids]
        return PromptLogprobs(
            index=0,
            text=whole,
            tokens=tuple(tokens),
            offsets=tuple(offsets),
            logprobs=tuple(logprobs),
        )

    def _width(self, piece: str) -> int:
        """Characters of the prompt that a token says: none where its tokenizer put it in front."""
        if self._text is None:
            return len(piece)
        rest = len(self._text) - self._num_characters
        if self._num_characters or self._text.startswith(piece):
            return min(len(piece), rest)
        bare = piece.lstrip(" ")
        return len(bare) if self._text.startswith(bare) else 0

    def _logprobs(self, token_id: int, score: Scored) -> TokenLogprobs:
        token_text = self._tokenizer.token_text
        top = tuple(with_text(other, logprob, token_text) for other, logprob in score.top)
        return TokenLogprobs(chosen=with_text(token_id, score.logprob, token_text), top=top)
