"""Compaction, purely: how a summary of a conversation is asked for, and how it is read afterwards.

The request for it is the conversation with one message more, so that all of it is known already.
"""

from __future__ import annotations

import msgspec

from runtime.types import Breakpoint, ChatPrompt, GenerateRequest, Message, ToolChoice

REQUEST = (
    "Stop here and write a summary of this conversation for whoever goes on with the task. They "
    "will read your summary and the messages of the user, and nothing else of what was said or "
    "done. Say what the user wants and every constraint that was given; what was done, found out "
    "and decided, and why; the files, commands, names and values that matter, exactly; what "
    "failed; and what is to be done next. Call no tools. Answer with the summary only."
)
INTRODUCTION = (
    "The conversation so far was replaced by this summary of it. Go on from there, and do not do "
    "again what it says is done:\n\n"
)


_MAX_TOKENS = 8192
_MAX_SHARE = 4
"""Of the context: a summary that takes more of it makes no room."""


def summary_message(summary: str) -> Message:
    """What the model reads in place of what was summed up."""
    return Message(role="user", text=INTRODUCTION + summary)


def with_summary_begun(request: GenerateRequest, said: str) -> GenerateRequest:
    """The request, whose last message is a summary, with as much of that as is `said` so far.

    A breakpoint is before its last word: how that is tokenized may depend on what comes next.
    """
    prompt = request.prompt
    assert isinstance(prompt, ChatPrompt)
    text = (INTRODUCTION + said.lstrip()).rstrip()
    end = Breakpoint(at=len(text) - len(text.split()[-1]), keep_s=0.0)
    last = msgspec.structs.replace(prompt.messages[-1], text=text, breakpoints=(end,))
    prompt = msgspec.structs.replace(prompt, messages=(*prompt.messages[:-1], last))
    return msgspec.structs.replace(request, prompt=prompt)


def summary_request(
    request: GenerateRequest, context: int, instructions: str | None = None
) -> GenerateRequest:
    """The request that has the conversation of this one summed up, in the client's words if any.

    It is no longer than the client says, else than a quarter of the `context` in tokens. What the
    client wants of the form of its answers is not meant for a summary: neither stop strings nor a
    constraint hold, and no tool may be called, though all of them are shown.
    """
    prompt = request.prompt
    assert isinstance(prompt, ChatPrompt)
    asked = Message(role="user", text=instructions or REQUEST)
    prompt = msgspec.structs.replace(
        prompt,
        messages=(*prompt.messages, asked),
        tool_choice=ToolChoice(mode="none"),
        continues_last=False,
    )
    return msgspec.structs.replace(
        request,
        prompt=prompt,
        work="generate",
        constraint=None,
        stop=(),
        top_logprobs=None,
        max_tokens=request.max_tokens or min(_MAX_TOKENS, max(1, context // _MAX_SHARE)),
    )
