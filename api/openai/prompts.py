"""The `prompt` of a completion request: text or token ids, one of them or a list."""

from __future__ import annotations

from collections.abc import Sequence

from api.http.refusal import refuse
from runtime.types import Prompt, TextPrompt, TokenPrompt

PromptField = str | list[str | int | list[int]]


def listed_prompts(prompt: PromptField, *, needs_text: bool, field: str = "prompt") -> list[Prompt]:
    """The prompts of one request, in their order; `field` is where they stand in it.

    Raises:
        InvalidRequest: an entry cannot be served; `param` is its path.
    """
    if isinstance(prompt, str):
        prompts: list[Prompt] = [_text_prompt(prompt, field)]
    elif prompt and all(isinstance(entry, int) for entry in prompt):
        prompts = [_token_prompt(prompt, field)]
    else:
        prompts = [_listed_prompt(entry, f"{field}[{i}]") for i, entry in enumerate(prompt)]
    if not prompts:
        refuse(field, "must not be empty: send text or token ids.")
    if needs_text and any(isinstance(entry, TokenPrompt) for entry in prompts):
        refuse("echo", "needs the prompt as text, or `logprobs` with it: send one of them.")
    return prompts


def _listed_prompt(entry: str | int | list[int], path: str) -> Prompt:
    if isinstance(entry, str):
        return _text_prompt(entry, path)
    if isinstance(entry, int):
        refuse(path, "is a number: a list of prompts holds only texts or lists of token ids.")
    return _token_prompt(entry, path)


def _text_prompt(text: str, path: str) -> TextPrompt:
    if not text:
        refuse(path, "must not be empty: send text to continue.")
    return TextPrompt(text=text)


def _token_prompt(entries: Sequence[str | int | list[int]], path: str) -> TokenPrompt:
    token_ids = tuple(entry for entry in entries if isinstance(entry, int))
    if not token_ids:
        refuse(path, "must not be empty: send token ids to continue.")
    if min(token_ids) < 0 or max(token_ids) >= 2**31:
        refuse(path, "holds a number that is not a token id.")
    return TokenPrompt(token_ids=token_ids)
