"""What real models wrote, as the package `canitoolcall` has recorded it, through our parser.

The package has the outputs, the tools that were offered and the parse that is right, and checks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult

from api.http.draft import Draft, settled
from runtime.types import Chunk, Finished, Tool, Usage
from runtime.worker.output import harmony
from runtime.worker.output.dialect import Dialect, ReasoningBlock
from runtime.worker.output.families import FAMILIES, speaking
from runtime.worker.output.parser import OutputParser
from runtime.worker.output.tools import RequestTools

PIECES = (4, 1, 30)
"""Characters of text in one token, in three ways to cut it; marks are one token each."""

_DEEPSEEK = {"V3-": "v3", "V3.1": "v31", "V3.2": "v32", "V4-": "v4", "V4.1": "v41"}
_ROWS = {
    "qwen3-hermes": "json_tools",
    "qwen3-xml": "qwen3_coder",
    "glm": "glm47",
    "mistral": "mistral",
    "gemma4": "gemma4",
}
_THINK: dict[str, tuple[str, str]] = {
    "gemma4": ("<|channel>thought", "<channel|>"),
    "llama": ("", ""),
}
_XTML = "<|open|>{}<|sep|>", "<|close|>{}<|sep|>"
_KNOWN = load_families()

Case = Fixture
VERSION = "0.1.1"

POLICIES: dict[str, str] = dict.fromkeys(
    """
    deepseek/v3-truncated-mid-arguments deepseek/v31-truncated-mid-arguments
    deepseek/vllm-v3-malformed-missing-brace gpt-oss/harmony-truncated-in-arguments
    kimi/k26-truncated-inside-arguments llama/l3-truncated-inside-parameters
    mistral/v13think-truncated-in-arguments qwen3-hermes/bug-sglang-30480-truncated-mid-arguments
    qwen3-hermes/vllm-invalid-json-missing-brace
    qwen3-hermes/truncated-mid-arguments-no-thinking
    qwen3-hermes/truncated-mid-arguments-thinking qwen3-hermes/truncated-second-parallel-call
    """.split(),
    "streamed",
) | {
    "gpt-oss/llamacpp-builtin-python-recipient": "unknown tool",
    "gemma4/sglang-text-before-call": "blanks",
}
"""Where we differ from the package, and which policy in docs/tool-calls.md says why."""


def cases() -> list[Case]:
    """All recorded outputs."""
    return load_fixtures()


def dialect_of(case: Case) -> Dialect:
    """How the model of this output writes."""
    model, family = case.models[0], case.family
    if family == "gpt-oss":
        return harmony.dialect()
    if family == "deepseek":
        version = max((v for v in _DEEPSEEK if v in model), key=len)
        name = f"deepseek_{_DEEPSEEK[version]}"
    elif family == "llama":
        name = "llama4" if "Llama-4" in model else "llama3"
    elif family == "kimi":
        name = "kimi_k3" if "K3" in model else "kimi_k2"
    else:
        name = _ROWS[family]
    think_start, think_end = _THINK.get(family, ("<think>", "</think>"))
    if family == "mistral" and "2506" not in model:
        think_start, think_end = "[THINK]", "[/THINK]"
    plain = Dialect(think_start=think_start, think_end=think_end)
    if name == "kimi_k3":
        opens, closes = _XTML
        dropped = opens.format("response"), closes.format("response"), closes.format("message")
        plain = Dialect(
            think_start=opens.format("think"), think_end=closes.format("think"), dropped=dropped
        )
    return speaking(FAMILIES[name], plain)


def problems(case: Case) -> list[str]:
    """The checks of the package that fail for this output; nothing where all hold."""
    family = _KNOWN[case.family]
    streams = {f"many:{num}": _parsed(case, num, is_streamed=True) for num in PIECES}
    streams["token"] = streams.pop(f"many:{PIECES[0]}")
    rows = run_checks(case, family, Observation(nonstream=whole(case), streams=streams))
    if case_status(rows).value == "pass":
        return []
    return [
        f"{row.check} {row.strategy}: {row.detail}" for row in rows if row.status.value != "pass"
    ]


def whole(case: Case) -> ParseResult:
    """What an answer that is not streamed says."""
    return _parsed(case, PIECES[0], is_streamed=False)


def _parsed(case: Case, num_characters: int, *, is_streamed: bool) -> ParseResult:
    parser = OutputParser(dialect_of(case), index=0, tools=_tools(case), reasoning=_reasoning(case))
    chunks: list[Chunk] = []
    for piece in _pieces(case, num_characters):
        chunks += parser.feed(piece)
    chunks += parser.finish(is_cut=case.truncated)
    reason = parser.reason("length" if case.truncated else "stop")
    usage = Usage(num_prompt_tokens=0)
    chunks.append(Finished(index=0, reason=reason, usage=usage, notes=parser.notes))
    draft = Draft()
    for chunk in chunks if is_streamed else settled(chunks):
        draft.add(chunk)
    return ParseResult(
        content=draft.text or None,
        reasoning_content=draft.reasoning or None,
        tool_calls=tuple(ParsedToolCall(call.name, call.arguments) for call in draft.calls),
    )


def _tools(case: Case) -> RequestTools:
    functions: list[dict[str, Any]] = [tool["function"] for tool in case.tools]
    return RequestTools.of(
        tuple(
            Tool(name=one["name"], parameters=json.dumps(one.get("parameters") or {}))
            for one in functions
        )
    )


def _reasoning(case: Case) -> ReasoningBlock:
    opening = case.generation_prompt
    if opening is None:
        reference = _KNOWN[case.family].reference_for(case.models[0])
        opening = (reference.default_generation_prompt if reference else None) or ""
    opening, spoken = opening.rstrip(), dialect_of(case)
    if spoken.think_start and opening.endswith(spoken.think_start):
        return "open"
    is_closed = spoken.think_end and opening.endswith((spoken.think_end, *spoken.dropped[:1]))
    return "closed" if is_closed else "unsaid"


def _pieces(case: Case, num_characters: int) -> Iterator[str]:
    marks = sorted(_KNOWN[case.family].markers, key=len, reverse=True)
    pattern = "|".join(map(re.escape, marks))
    for part in re.split(f"({pattern})", case.raw_output):
        if part in marks:
            yield part
            continue
        yield from (part[i : i + num_characters] for i in range(0, len(part), num_characters))
