"""What a model is asked besides answering: to count, tokenize, detokenize, embed.

Belongs to the mlx thread. Errands keep no KV and wait for nobody; one is done per engine step.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx

from runtime.errors import InvalidRequest
from runtime.types import Chunk, Embedding, Failed, Finished, Pooling, TextDelta, Tokens
from runtime.worker.input.template import Template
from runtime.worker.model import LoadedModel
from runtime.worker.sequence import SequenceGroup
from runtime.worker.taint import raise_if_tainted

ERRANDS = frozenset({"count", "tokenize", "detokenize", "embed", "explain"})
_SLICE = 512


class AuxiliaryRequests:
    """Those that wait, in the order in which they came."""

    def __init__(self, model: LoadedModel, template: Template) -> None:
        self._model = model
        self._template = template
        self.waiting: deque[SequenceGroup] = deque()

    @property
    def next_ids(self) -> tuple[str, ...]:
        """The request that `run_next()` does something for."""
        return (self.waiting[0].request.request_id,)

    def add(self, group: SequenceGroup) -> None:
        self.waiting.append(group)

    def drop(self, request_id: str) -> None:
        """Forget one that nobody waits for any more."""
        kept = (one for one in self.waiting if one.request.request_id != request_id)
        self.waiting = deque(kept)

    def run_next(self) -> list[tuple[str, Chunk]]:
        """Do the oldest; its request's id with each chunk, the last of which ends it.

        Raises:
            EngineTainted: the device failed.
        """
        group = self.waiting.popleft()
        try:
            chunks = self._run(group)
        except (RuntimeError, ValueError, InvalidRequest) as error:
            raise_if_tainted(error)
            code = error.code if isinstance(error, InvalidRequest) else "model_error"
            chunks = [Failed(code=code, message=str(error))]
        return [(group.request.request_id, chunk) for chunk in chunks]

    def _run(self, group: SequenceGroup) -> list[Chunk]:
        said = self._answer(group)
        return [*said, *(Finished(one.index, "stop", one.usage) for one in group.sequences)]

    def _answer(self, group: SequenceGroup) -> list[Chunk]:
        match group.request.work:
            case "tokenize":
                return [Tokens(index=0, token_ids=tuple(group.token_ids))]
            case "detokenize":
                return [TextDelta(index=0, text=self._template.text_of(group.token_ids))]
            case "explain":
                return [group.explained] if group.explained is not None else []
            case "embed":
                return [Embedding(index=0, values=self._embed(group.token_ids))]
            case _:
                return []

    def _embed(self, token_ids: list[int]) -> bytes:
        """Little-endian float32, of length 1 where the model says that its vectors are."""
        pooling = self._model.spec.pooling
        inner = self._model.inner
        if pooling is None or inner is None:
            message = f"The model {self._model.spec.id} gives no embeddings."
            raise InvalidRequest(message, "model")
        with mx.stream(self._model.stream):
            vector = _pooled(inner, token_ids, self._model.new_kv(), pooling)
            if pooling.is_normalised:
                vector = vector / mx.maximum(mx.linalg.norm(vector), 1e-12)
            mx.eval(vector)
        return bytes(memoryview(cast("bytes", vector)))


def _pooled(
    inner: Callable[..., mx.array], token_ids: list[int], kv: list[Any], pooling: Pooling
) -> mx.array:
    """One float32 vector [dim] for all tokens: the mean of their hidden states, or the last one."""
    total = mx.zeros((1,), dtype=mx.float32)
    last = total
    for start in range(0, len(token_ids), _SLICE):
        piece = mx.array(token_ids[start : start + _SLICE])[None]
        hidden = inner(piece, cache=kv)[0].astype(mx.float32)
        last = hidden[-1]
        total = total + hidden.sum(axis=0)
        mx.eval(total, last)
    return total / len(token_ids) if pooling.kind == "mean" else last
