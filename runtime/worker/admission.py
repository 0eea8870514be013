"""How the intake thread begins and how its refusals are told."""

from __future__ import annotations

import importlib
import sys
import traceback
from dataclasses import replace

from runtime.errors import ContextTooLong, MemoryTaken, NeedsTooMuchMemory, RequestRejected
from runtime.wire import Rejected
from runtime.worker.album import Gallery
from runtime.worker.compose import Composer
from runtime.worker.constraint import Constrainer
from runtime.worker.grammars import Grammars
from runtime.worker.intake import Intake
from runtime.worker.model import LoadedModel
from runtime.worker.workbench import Bench


def intake_of(model: LoadedModel, composer: Composer, bench: Bench) -> Intake:
    """The intake of one model, with a gallery if it sees."""
    grammars = Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids, bench)
    constrainer = Constrainer(model.dialect, model.tokenizer, grammars)
    intake = Intake(composer, model.dialect, model.vocab_size, constrainer)
    if model.eyes is None or model.eyes.lens is None:
        return replace(intake, blindness=model.blindness)
    # Only here, so that workers of other models never import Pillow.
    module = importlib.import_module("runtime.worker.gallery")
    gallery: Gallery = module.PictureGallery(model.eyes.lens)
    return replace(intake, gallery=gallery, is_whole=model.eyes.is_whole)


def rejected(request_id: str, error: RequestRejected) -> Rejected:
    """A refusal, as the server is told of it."""
    num_tokens, context, is_least, num_bytes, limit_bytes = 0, 0, False, 0, 0
    if isinstance(error, ContextTooLong):
        num_tokens, context, is_least = error.num_tokens, error.context, error.is_least
    if isinstance(error, NeedsTooMuchMemory | MemoryTaken):
        num_bytes, limit_bytes = error.num_bytes, error.limit_bytes
    return Rejected(
        request_id=request_id,
        code=error.code,
        message=error.message,
        param=error.param,
        num_tokens=num_tokens,
        is_least=is_least,
        context=context,
        num_bytes=num_bytes,
        limit_bytes=limit_bytes,
    )


def print_without_text(error: Exception) -> None:
    """Where it was raised: its message may quote the prompt, and what is printed is kept."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    print(f"{frames}{type(error).__name__}", file=sys.stderr, flush=True)  # noqa: T201
