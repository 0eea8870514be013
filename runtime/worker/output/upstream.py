"""The dialect that mlx-lm finds a tokenizer to speak.

Knows mlx-lm's `TokenizerWrapper`: its marks, its tool parser, its response format.
"""

from __future__ import annotations

from typing import Any

from runtime.worker.output import harmony
from runtime.worker.output.dialect import HEADER, START, Dialect, Edges, ToolCallParser


def dialect_of(tokenizer: Any) -> Dialect:
    """How the model of this tokenizer writes."""
    if tokenizer.tool_parser is None and harmony.is_spoken_by(tokenizer.get_vocab()):
        return harmony.dialect()
    edges = _edges(tokenizer)
    return Dialect(
        think_start=tokenizer.think_start or "",
        think_end=tokenizer.think_end or "",
        tool_start=tokenizer.tool_call_start or "",
        tool_end=tokenizer.tool_call_end or "",
        parse_tool_call=tokenizer.tool_parser,
        name=_parser_name(tokenizer.tool_parser),
        dropped=tuple(tokenizer.structural_markers),
        edges=edges,
        initial=HEADER if edges and tokenizer.response_initial_state == HEADER else START,
    )


def _edges(tokenizer: Any) -> Edges:
    declared: dict[str, list[tuple[str, str]]] = tokenizer.response_transitions
    return {state: tuple(edges) for state, edges in declared.items()}


def _parser_name(parse: ToolCallParser | None) -> str:
    return "" if parse is None else parse.__module__.rpartition(".")[2]
