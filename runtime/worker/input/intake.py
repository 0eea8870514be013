"""Intake: a request becomes a `SequenceGroup`, or is refused, on a thread of its own.

Rendering and tokenizing a long prompt takes long enough to be felt by running streams; here it
does not. No mlx call may be made on this thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NoReturn

import msgspec

from runtime.errors import MAX_CONTEXT, ContextTooLong, InvalidRequest, PromptChanged, UnusableImage
from runtime.kv.cursor import CacheCursor
from runtime.kv.deletions import Recognised
from runtime.kv.media import highest, model_ids
from runtime.prompt.healing import Lineage
from runtime.prompt.past import UNSEEN_IMAGES, with_images, without_lost_images
from runtime.prompt.thinking import EFFORT, budget_of, expects_thoughts, is_heeded
from runtime.types import (
    ChatPrompt,
    GenerateRequest,
    Image,
    Prompt,
    PromptChange,
    SaidAnswer,
    TextPrompt,
)
from runtime.worker.input.compose import Composed, Composer
from runtime.worker.input.explain import explain
from runtime.worker.input.overflow import compose_within
from runtime.worker.input.turns import PendingTurn
from runtime.worker.output.constraint import Constrainer, Demands
from runtime.worker.output.parser import NO_TOOLS, Dialect, OutputParser, ReasoningBlock
from runtime.worker.output.tools import RequestTools
from runtime.worker.prompt_logprobs import Echo
from runtime.worker.running_time import running_s
from runtime.worker.sequence import Sequence, SequenceGroup
from runtime.worker.vision.images import ImageBatch, ImageLoader, PromptImage
from store.keyed_names import Asker
from store.turns import NOTHING_SAID, Said, unpack_row
from store.types import class_of


@dataclass(frozen=True, slots=True)
class Intake:
    """What a request is checked against. `context` is in tokens.

    Without an `image_loader` the model reads text only, and `blindness` may say why; with
    `is_whole` no picture may be divided. What a client predicts is of use if it `speculates`.
    """

    composer: Composer
    vocab_size: int
    constrainer: Constrainer
    image_loader: ImageLoader | None = None
    is_whole: bool = False
    blindness: str = ""
    speculates: bool = False

    @property
    def context(self) -> int:
        return self.composer.context

    @property
    def spoken(self) -> Dialect:
        """How the model writes its answer to a chat."""
        return self.composer.template.spoken(self.composer.dialect)

    def admit(self, request: GenerateRequest) -> SequenceGroup:
        """The request, ready for prefill.

        Raises:
            ContextTooLong: the prompt leaves no room for an answer.
            InvalidRequest: the prompt is empty, the template refuses it, or ids are out of range.
            PromptChanged: it is not read as it was when its answer began.
        """
        composer = self.composer.asked_by(request)
        if composer is not self.composer:
            try:
                return replace(self, composer=composer).admit(request)
            except ContextTooLong as error:
                raise _naming_max_context(error, request) from error
        if request.said is not None:
            asker = Asker(request.model, request.cache.session_id)
            known = Recognised(asker, request.cache.after_deletion)
            composer.turns.lend(unpack_row(request.said.turns), known)
        ignored = list(request.ignored)
        composed, prompt_images = self._compose(request, ignored)
        if request.written_by is not None:
            composed = composed.up_to_last_keep()
        request = _as_read(request, composed)
        token_ids = self._model_ids(composed)
        self._check(request, composed, token_ids)
        packed = composed.packed or array("I", composed.token_ids)
        composed = composed._replace(packed=packed)
        block = self._reasoning_block(request.prompt, composed)
        demands = self._demands(request, composed, block)
        room = self.context - len(token_ids)
        group = SequenceGroup(
            request=request,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            max_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
            deadline_s=running_s() + request.deadline_s,
            cursor=self._cursor(request, composed),
            image_batch=ImageBatch(
                spans=composed.media,
                prompt_images=tuple(prompt_images[span.digest] for span in composed.media),
                is_whole=self.is_whole,
            ),
            echo=self._echo(request, token_ids),
            prediction=self._prediction(request),
            explained=explain(self.composer, composed) if request.work == "explain" else None,
            prompt_digest=blake2b(packed, digest_size=16).digest(),
        )
        group.sequences = [
            self._sequence(group, i, composed, block) for i in range(request.num_choices)
        ]
        ignored += self._ignored(request.prompt, block)
        if request.prediction and not (self.speculates and request.speculates):
            ignored.append("prediction")
        for sequence in group.sequences:
            sequence.ignored = tuple(ignored)
            sequence.plan = demands.plan
            sequence.output.remark((*composed.notes, *demands.notes))
        if request.said is not None:
            _take_up(group, request.said)
        return group

    def _prediction(self, request: GenerateRequest) -> tuple[int, ...]:
        if not (request.prediction and self.speculates and request.speculates):
            return ()
        return tuple(self.composer.template.predicted_ids(request.prediction))

    def _ignored(self, prompt: Prompt, block: ReasoningBlock) -> tuple[str, ...]:
        """The fields of thinking, where nothing of it has an effect."""
        if not isinstance(prompt, ChatPrompt):
            return ()
        responds, has_block = self.composer.template.probe.responds, bool(self.spoken.think_end)
        wish, is_open = prompt.thinking, block == "open"
        is_used = is_heeded(wish, responds, has_block=has_block, is_open=is_open)
        return () if is_used else wish.fields

    def _demands(
        self, request: GenerateRequest, composed: Composed, block: ReasoningBlock
    ) -> Demands:
        if request.work != "generate":
            return Demands()
        budget = None
        if isinstance(request.prompt, ChatPrompt):
            thinking = request.prompt.thinking
            budget = thinking.budget_tokens
            if budget is None and thinking.effort is not None:
                has_switch = EFFORT in self.composer.template.probe.responds
                budget = None if has_switch else budget_of(thinking.effort)
        begun = composed.beginning.text if composed.beginning is not None else ""
        return self.constrainer.speaking(self.spoken).demands(request, block, budget, begun)

    def _compose(
        self, request: GenerateRequest, ignored: list[str]
    ) -> tuple[Composed, Mapping[bytes, PromptImage]]:
        template, prompt = self.composer.template, request.prompt
        if isinstance(prompt, ChatPrompt):
            prompt_images: Mapping[bytes, PromptImage] = {}
            if self.image_loader is not None:
                prompt, prompt_images = self.image_loader.hang(prompt, ignored)
            else:
                prompt = _unseen(prompt, self.blindness, ignored)
            prompt, num_lost = without_lost_images(prompt)
            media = {digest: prompt_image.medium for digest, prompt_image in prompt_images.items()}
            composed = compose_within(self.composer, request, prompt, media)
            if num_lost:
                change = PromptChange(rule=UNSEEN_IMAGES, num_places=num_lost)
                composed = composed._replace(changes=(*composed.changes, change))
            return composed, prompt_images
        if isinstance(prompt, TextPrompt):
            least = template.num_tokens_at_least(prompt.text + prompt.suffix, self.context)
            if least > self.context:
                raise ContextTooLong(least, self.context, "prompt", is_least=True)
        return Composed(template.token_ids(prompt)), {}

    def _model_ids(self, composed: Composed) -> list[int]:
        """What the model is given: placeholders where pictures are."""
        markup = self.composer.template.markup
        if markup is None or not composed.media:
            return composed.token_ids
        if composed.media[-1].end == len(composed.token_ids):
            raise InvalidRequest("The prompt ends with an image: let text follow it.", "messages")
        return model_ids(composed.token_ids, markup.placeholder)

    def _cursor(self, request: GenerateRequest, composed: Composed) -> CacheCursor:
        wish = request.cache
        lineage = composed.lineage
        cursor = CacheCursor(
            token_ids=composed.packed,
            tenant=wish.tenant,
            mode=wish.mode,
            asker=Asker(request.model, wish.session_id),
            after_deletion=wish.after_deletion,
            said=said_by(lineage) if lineage is not None else NOTHING_SAID,
            num_said=lineage.start if lineage is not None else 0,
            prefix_end=composed.prefix_end,
            boundaries=composed.boundaries,
            passing=composed.passing,
            keeps=composed.keeps,
            pause_s=wish.pause_s,
            is_last=wish.is_last and wish.session_id is not None,
            media=composed.media,
        )
        if wish.mode == "breakpoints":
            end = max((at for at, _ in composed.keeps), default=0)
            cursor.mode, cursor.prefix_end = ("prefix", end) if end else ("off", 0)
        if wish.keep_s is not None:
            cursor.keeps = (*cursor.keeps, (len(composed.token_ids), wish.keep_s))
        if wish.ttl_s is not None:
            cursor.ttl_s, cursor.ttl_class = wish.ttl_s, class_of(wish.ttl_s)
        if request.scores_prompt:
            # KV that is taken up says nothing of how likely its tokens were.
            cursor.limit, cursor.reason = 0, "scored"
        elif wish.mode != "off":
            cursor.reason = composed.reason
        return cursor

    def _echo(self, request: GenerateRequest, token_ids: list[int]) -> Echo | None:
        if not request.scores_prompt:
            return None
        prompt = request.prompt
        return Echo(
            self.composer.template,
            token_ids,
            prompt.text if isinstance(prompt, TextPrompt) else None,
            num_top=request.top_logprobs or 0,
            vocab_size=self.vocab_size,
        )

    def _check(self, request: GenerateRequest, composed: Composed, token_ids: list[int]) -> None:
        field = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
        if not token_ids:
            message = "The prompt is empty: it has no tokens."
            raise InvalidRequest(message, field)
        context = min(self.context, (request.max_prompt_tokens or self.context) + 1)
        if len(token_ids) >= context:
            raise ContextTooLong(len(token_ids), context, field)
        of_vocabulary = token_ids if composed.media else composed.packed or token_ids
        if highest(of_vocabulary) >= self.vocab_size or (
            of_vocabulary is token_ids and min(token_ids) < 0
        ):
            raise InvalidRequest(f"Token ids must be in 0..{self.vocab_size - 1}.", field)
        for token_id, _ in request.sampling.logit_bias:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"Token id {token_id} is not in 0..{self.vocab_size - 1}.", "logit_bias"
                )

    def _sequence(
        self, group: SequenceGroup, index: int, composed: Composed, block: ReasoningBlock
    ) -> Sequence:
        template = self.composer.template
        prompt = group.request.prompt
        is_chat = isinstance(prompt, ChatPrompt)
        output = OutputParser(
            self.spoken if is_chat else Dialect(),
            index=index,
            stop=group.request.stop,
            tools=_callable_tools(prompt),
            reasoning=block,
            is_constrained=group.request.constraint is not None,
        )
        return Sequence(
            group=group,
            index=index,
            output=output,
            detokenizer=template.detokenizer(group.token_ids),
            answer=self._answer(group, composed),
            prompt_changes=composed.changes,
        )

    def _answer(self, group: SequenceGroup, composed: Composed) -> PendingTurn | None:
        """Where the answer is noted, unless it is not to be recognised."""
        composer = self.composer
        if composed.lineage is None or group.request.work != "generate":
            return None
        known = composer.turns, composed.lineage, composer.template
        return PendingTurn(*known, composed.packed, group.request.cache.after_deletion)

    def _reasoning_block(self, prompt: Prompt, composed: Composed) -> ReasoningBlock:
        """How the prompt leaves its thinking block."""
        if not isinstance(prompt, ChatPrompt):
            return "unsaid"
        if composed.beginning is not None:
            return "open" if composed.beginning.is_thinking else "begun"
        template = self.composer.template
        block = template.reasoning_block(composed.token_ids)
        if block != "unsaid":
            return block
        probe, wish = template.probe, prompt.thinking
        is_expected = bool(self.spoken.think_end) and expects_thoughts(
            wish, probe.responds, by_default=probe.thinks_by_default
        )
        return "expected" if is_expected else "unsaid"


def said_by(lineage: Lineage) -> Said:
    """What the head of a request keeps of its conversation before it is answered."""
    return Said(lineage.way, lineage.scope.beginning, lineage.summary)


def _as_read(request: GenerateRequest, composed: Composed) -> GenerateRequest:
    """The request with the tools that its prompt was composed with, and what may be called."""
    prompt, asked = request.prompt, composed.asked
    if asked is None or not isinstance(prompt, ChatPrompt) or asked.prompt.tools is prompt.tools:
        return request
    read = asked.prompt
    prompt = msgspec.structs.replace(prompt, tools=read.tools, tool_choice=read.tool_choice)
    return msgspec.structs.replace(request, prompt=prompt)


def _naming_max_context(error: ContextTooLong, request: GenerateRequest) -> ContextTooLong:
    """The error as one of the field `max_context`, if it was that field's number."""
    if error.context != request.max_context or error.context == request.context:
        return error
    return ContextTooLong(
        error.num_tokens,
        error.context,
        MAX_CONTEXT,
        is_least=error.is_least,
        is_rest=error.is_rest,
    )


def _unseen(prompt: ChatPrompt, why: str, ignored: list[str]) -> ChatPrompt:
    """The prompt for a model that sees nothing, perhaps for a reason."""
    is_blind = f"cannot be shown one: {why}" if why else "reads text only: leave it out"

    def show(image: Image) -> NoReturn:
        raise UnusableImage(image.field, f"is an image, and this model {is_blind}.")

    messages = with_images(prompt.messages, show, ignored)
    return msgspec.structs.replace(prompt, messages=messages)


def _callable_tools(prompt: Prompt) -> RequestTools:
    """The tools whose calls are calls; deferred ones among them, a message may have loaded them."""
    if not isinstance(prompt, ChatPrompt) or not prompt.tools:
        return NO_TOOLS
    return RequestTools.of(prompt.tools, prompt.tool_choice)


def _take_up(group: SequenceGroup, said: SaidAnswer) -> None:
    """Have every choice stand where it stood. Raises PromptChanged."""
    if said.prompt_digest != group.prompt_digest:
        raise PromptChanged
    for sequence, choice in zip(group.sequences, said.choices, strict=True):
        sequence.take_up(choice)
