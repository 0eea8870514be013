"""Filling in the middle: the marks by which models are told what stands before and behind it.

Each mark is a special token of the families that use it, as their own pages say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from runtime.errors import InvalidRequest

Part = Literal["before", "after"]

_FORMS: Sequence[Sequence[tuple[str, Part | None]]] = (
    # Qwen2.5-Coder, Qwen3-Coder, CodeGemma
    (("<|fim_prefix|>", "before"), ("<|fim_suffix|>", "after"), ("<|fim_middle|>", None)),
    # StarCoder, StarCoder2, Granite
    (("<fim_prefix>", "before"), ("<fim_suffix>", "after"), ("<fim_middle>", None)),
    # DeepSeek-Coder, DeepSeek-Coder-V2
    (("<｜fim▁begin｜>", "before"), ("<｜fim▁hole｜>", "after"), ("<｜fim▁end｜>", None)),
    # Seed-Coder
    (("<[fim-suffix]>", "after"), ("<[fim-prefix]>", "before"), ("<[fim-middle]>", None)),
    # Codestral
    (("[SUFFIX]", "after"), ("[PREFIX]", "before")),
)


def infilled(before: str, after: str, is_special: Callable[[str], bool]) -> str:
    """The prompt that is continued with what stands between two texts.

    Raises:
        InvalidRequest: the model has no marks for that, or none that are known here.
    """
    texts = {"before": before, "after": after, None: ""}
    for form in _FORMS:
        if all(is_special(mark) for mark, _ in form):
            return "".join(mark + texts[part] for mark, part in form)
    message = (
        "suffix needs a model that was trained to fill in the middle, and the vocabulary of this "
        "one has no marks for that: leave it out, or name a model for code."
    )
    raise InvalidRequest(message, "suffix")
