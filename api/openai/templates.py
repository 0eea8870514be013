"""`chat_template_kwargs`: what a client hands to the model's template by itself."""

from __future__ import annotations

import msgspec

from api.http.refusal import refuse
from api.openai.fields import Raws
from runtime.types import OWN_KWARGS


def template_kwargs(kwargs: Raws) -> str:
    """The arguments as one JSON object.

    Raises:
        InvalidRequest: one of them is not the client's to set.
    """
    for name in sorted(OWN_KWARGS & kwargs.keys()):
        refuse(f"chat_template_kwargs.{name}", "cannot be set by a request: leave it out.")
    return msgspec.json.encode(kwargs).decode(errors="replace")


def goes_on(
    continue_final_message: bool | None,
    add_generation_prompt: bool | None,
    *,
    is_over: bool = False,
) -> bool:
    """Whether a last message of the assistant's is gone on with, by the switches of a request.

    Without them it is, unless it says itself that it `is_over`.
    """
    if continue_final_message is not None:
        return continue_final_message
    return add_generation_prompt is not True and not is_over
