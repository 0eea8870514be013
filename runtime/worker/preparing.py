"""What a worker does for a model before there is memory for its weights.

A spare worker is told which model is likely to be loaded next. It reads all of that model but the
weights, and has a process of its sandbox ready that knows the tokenizer and has rendered once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from runtime.models.folder import BrokenModel
from runtime.types import ModelSpec
from runtime.worker.input.preparer import PromptPreparer
from runtime.worker.input.sandbox import Sandbox
from runtime.worker.input.template import inner_tokenizer
from runtime.worker.model import OpenedModel

_ERRORS = (BrokenModel, OSError, ValueError, RuntimeError, LookupError, TypeError, ImportError)
"""What upstream raises of a model that cannot be loaded."""


class Prepared(NamedTuple):
    """All of a model but its weights, and soon what takes its requests in."""

    model: OpenedModel
    preparer: Future[PromptPreparer]


class Preparation:
    """At most one model that is prepared. It belongs to the mlx thread."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._prepared: Prepared | None = None

    def prepare(self, spec: ModelSpec) -> None:
        """Prepare this one instead of the one before; what fails is told when it is loaded."""
        self.drop()
        with suppress(*_ERRORS):
            self._prepared = self._open(spec)

    def take(self, spec: ModelSpec, split: Callable[[Any], object] | None = None) -> Prepared:
        """A model that was prepared, if its files are still the same, or is now.

        With a `split` it is one rank's share. Raises as `model.load`.
        """
        prepared = self._prepared
        if prepared is not None and split is None and prepared.model.is_still(spec):
            self._prepared = None
            return prepared
        self.drop()
        return self._open(spec, split)

    def drop(self) -> None:
        """Nothing of it is wanted."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.model.close()

    def _open(self, spec: ModelSpec, split: Callable[[Any], object] | None = None) -> Prepared:
        model = OpenedModel(spec, split)
        return Prepared(model, model.beside(partial(self._equip, model.vocab_size)))

    def _equip(self, vocab_size: int, tokenizer: Any) -> PromptPreparer:
        """Have requests taken in by processes that know the model's tokenizer only."""
        eos_token_ids: list[int] = list(tokenizer.eos_token_ids)
        preparer = PromptPreparer(inner_tokenizer(tokenizer), vocab_size, eos_token_ids)
        self._sandbox.equip(preparer)
        self._sandbox.rehearse()
        return preparer
