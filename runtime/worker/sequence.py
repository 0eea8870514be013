"""Worker-side state of a request: a `SequenceGroup` shares one prompt among its `Sequence`s."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import structs

from runtime.kv.cursor import CacheCursor
from runtime.prompt.healing import AnswerRecord, Cut
from runtime.types import (
    CacheUse,
    Chunk,
    Explained,
    GenerateRequest,
    PromptChange,
    SaidChoice,
    TokenLogprobs,
    Usage,
)
from runtime.worker.prompt_logprobs import Echo
from runtime.worker.vision.images import ImageBatch
from store.turns import Turn

if TYPE_CHECKING:
    from runtime.worker.output.detokenizer import Detokenizer
    from runtime.worker.output.guide import Guide, GuidePlan
    from runtime.worker.output.parser import OutputParser


class Noted(Protocol):
    """An answer that is written down, so that it is known when a client gives it back changed."""

    @property
    def spoken(self) -> AnswerRecord: ...

    def end(self, output_ids: list[int], cut: Cut | None, *, is_whole: bool) -> Turn | None: ...


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of a request: what was generated and what turns it into chunks."""

    group: SequenceGroup
    index: int
    output: OutputParser
    detokenizer: Detokenizer
    output_token_ids: list[int] = field(default_factory=list[int])
    answer: Noted | None = None
    prompt_changes: tuple[PromptChange, ...] = ()
    ignored: tuple[str, ...] = ()
    plan: GuidePlan | None = None
    guide: Guide | None = None
    num_failures: int = 0
    num_reasoning_tokens: int = 0
    num_proposed_tokens: int = 0
    """Guessed by speculation and computed; those of them that were said are accepted."""
    num_accepted_tokens: int = 0
    is_finished: bool = False
    ignores_eos: bool | None = None
    """Decided elsewhere; None means by its request."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def usage(self) -> Usage:
        """What it cost up to now."""
        group = self.group
        started_s = group.decode_started_s
        return Usage(
            num_prompt_tokens=group.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_reasoning_tokens=self.num_reasoning_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_rejected_tokens=self.num_proposed_tokens - self.num_accepted_tokens,
            prefill_ms=group.prefill_s * 1000,
            decode_ms=(time.perf_counter() - started_s) * 1000 if started_s else 0.0,
            cache=_of_prompt(group.cursor.told_use, group.num_prompt_tokens),
            prompt_changes=self.prompt_changes,
            ignored=self.ignored,
        )

    @property
    def ends_at_eos(self) -> bool:
        """The end token ends it: a request that ignores it cannot ignore the end of a grammar."""
        if self.ignores_eos is not None:
            return not self.ignores_eos
        decides = self.plan is not None and self.plan.decides_end
        return decides or not self.group.request.ignore_eos

    @property
    def gave_up(self) -> tuple[str, ...]:
        """The remark that its grammar could not be followed any further; from then on only the end
        token may come.
        """
        return (self.guide.gave_up,) if self.guide is not None and self.guide.gave_up else ()

    def hear(self, token_id: int, logprobs: TokenLogprobs | None) -> list[Chunk]:
        """The chunks that one more token completes; it is none that ends the sequence."""
        self.output_token_ids.append(token_id)
        if self.output.is_reasoning:
            self.num_reasoning_tokens += 1
        return self.output.feed(self.detokenizer.add(token_id), logprobs)

    def take_up(self, said: SaidChoice) -> None:
        """Stand where a worker stood that was lost: all of this has been delivered."""
        self.is_finished = said.is_finished
        if said.is_finished:
            return
        self.output.give_call_ids(said.call_ids)
        for number, token_id in enumerate(said.token_ids):
            chunks = self.hear(token_id, said.logprobs[number] if said.logprobs else None)
            if self.answer is not None:
                for chunk in chunks:
                    self.answer.spoken.add(chunk)

    def regrouped(
        self, lengthened: Callable[[CacheCursor, list[int]], CacheCursor]
    ) -> SequenceGroup:
        """Put it into a group of its own that prefills its prompt and its output so far."""
        old = self.group
        prompt, said = slice(old.num_prompt_tokens), self.output_token_ids
        token_ids = [*old.token_ids[prompt], *said]
        self.group = SequenceGroup(
            request=old.request,
            token_ids=token_ids,
            num_prompt_tokens=old.num_prompt_tokens,
            max_tokens=old.max_tokens,
            deadline_s=old.deadline_s,
            cursor=lengthened(old.cursor, [*old.cursor.token_ids[prompt], *said]),
            image_batch=old.image_batch,
            prediction=old.prediction,
            sequences=[self],
            prefill_s=old.prefill_s,
        )
        return self.group


@dataclass(eq=False, slots=True)
class SequenceGroup:
    """One prompt on its way to decode, and the sequences that continue it.

    `token_ids` is all that must be in the KV before the next token can be chosen; its last token
    is left to the decoder, and pictures are placeholders among them. `kv` holds the layer caches
    of `token_ids[:num_computed_tokens]`. With an `echo` the prompt is told as it is computed.
    """

    request: GenerateRequest
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    deadline_s: float
    cursor: CacheCursor = field(default_factory=CacheCursor)
    image_batch: ImageBatch = field(default_factory=ImageBatch)
    sequences: list[Sequence] = field(default_factory=list[Sequence])
    kv: list[Any] | None = None
    num_computed_tokens: int = 0
    prefill_s: float = 0.0
    num_at_hand: int = 0
    """Tokens of it in memory when that changed last: others may have computed them meanwhile."""
    looked_s: float = 0.0
    """What pictures of the next slice took up to now."""
    decode_started_s: float = 0.0
    echo: Echo | None = None
    prediction: tuple[int, ...] = ()
    """Tokens of the answer that the client expects."""
    explained: Explained | None = None
    prompt_digest: bytes = b""

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens to compute before decode, of which `num_computed_tokens` are done."""
        return len(self.token_ids) - 1

    @property
    def num_remaining_tokens(self) -> int:
        return self.num_prefill_tokens - self.num_computed_tokens

    @property
    def num_lacking_tokens(self) -> int:
        """Tokens to compute, as far as is known: what is kept of them is taken up first."""
        num_known = max(self.cursor.use.num_tokens, self.num_at_hand)
        return self.num_prefill_tokens - max(self.num_computed_tokens, num_known)

    @property
    def is_waiting(self) -> bool:
        """Its KV is being read from disk."""
        return self.cursor.is_waiting

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)


def _of_prompt(use: CacheUse, num_prompt_tokens: int) -> CacheUse:
    """What was reused of a prompt: of an answer that is taken up again the cache may know more."""
    return structs.replace(
        use,
        num_tokens=min(use.num_tokens, num_prompt_tokens),
        num_durable=min(use.num_durable, num_prompt_tokens),
    )
