"""How the intake thread begins and how its refusals are told."""

from __future__ import annotations

import importlib
import sys
import traceback
from dataclasses import replace

from runtime.errors import (
    ContextTooLong,
    MemoryTaken,
    NeedsTooMuchMemory,
    RequestRejected,
    SummaryWanted,
)
from runtime.wire import Rejected
from runtime.worker.input.compose import Composer
from runtime.worker.input.intake import Intake
from runtime.worker.input.preparer import Bench
from runtime.worker.model import LoadedModel
from runtime.worker.output.constraint import Constrainer
from runtime.worker.output.grammar import Grammars
from runtime.worker.vision.images import ImageLoader


def intake_of(model: LoadedModel, composer: Composer, bench: Bench) -> Intake:
    """The intake of one model, with an image loader if it sees."""
    grammars = Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids, bench)
    constrainer = Constrainer(model.dialect, model.tokenizer, grammars)
    intake = Intake(composer, model.vocab_size, constrainer)
    if model.vision_model is None or model.vision_model.image_processor is None:
        return replace(intake, blindness=model.blindness)
    # Only here, so that workers of other models never import Pillow.
    module = importlib.import_module("runtime.worker.vision.image_loader")
    loader: ImageLoader = module.PillowImageLoader(model.vision_model.image_processor)
    return replace(intake, image_loader=loader, is_whole=model.vision_model.is_whole)


def rejected(request_id: str, error: RequestRejected) -> Rejected:
    """A refusal, as the server is told of it."""
    num_tokens, context, num_bytes, limit_bytes = 0, 0, 0, 0
    is_least, is_rest = False, False
    if isinstance(error, ContextTooLong):
        num_tokens, context = error.num_tokens, error.context
        is_least, is_rest = error.is_least, error.is_rest
    if isinstance(error, NeedsTooMuchMemory | MemoryTaken):
        num_bytes, limit_bytes = error.num_bytes, error.limit_bytes
    return Rejected(
        request_id=request_id,
        code=error.code,
        message=error.message,
        param=error.param,
        num_tokens=num_tokens,
        is_least=is_least,
        is_rest=is_rest,
        first=error.first if isinstance(error, SummaryWanted) else 0,
        context=context,
        num_bytes=num_bytes,
        limit_bytes=limit_bytes,
    )


def print_without_text(error: Exception) -> None:
    """Where it was raised: its message may quote the prompt, and what is printed is kept."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    print(f"{frames}{type(error).__name__}", file=sys.stderr, flush=True)  # noqa: T201
