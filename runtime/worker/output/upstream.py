"""The dialect that a tokenizer's own files make a model speak.

Knows mlx-lm's `TokenizerWrapper`: its marks, the name of its tool parser, its response format.
"""

from __future__ import annotations

from typing import Any

from runtime.worker.output import harmony
from runtime.worker.output.dialect import HEADER, START, Dialect, Edges, opening
from runtime.worker.output.families import ANSWER_MARKS, FAMILIES, THINK_MARKS, find, speaking


def dialect_of(tokenizer: Any) -> Dialect:
    """How the model of this tokenizer writes."""
    vocab = tokenizer.get_vocab()
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    row = FAMILIES.get(_parser_name(tokenizer.tool_parser)) or find(template, vocab)
    if row is not None and row.name == harmony.NAME:
        return harmony.dialect()
    edges = _edges(tokenizer)
    think = (tokenizer.think_start or "", tokenizer.think_end or "")
    if not all(think):
        think = next((marks for marks in THINK_MARKS if all(m in vocab for m in marks)), ("", ""))
    start, end = ANSWER_MARKS
    around = (start, f"\n{end}", end) if start in vocab and end in vocab else ()
    plain = Dialect(
        think_start=think[0],
        think_end=think[1],
        dropped=(*tokenizer.structural_markers, *around),
        edges=edges,
        initial=HEADER if edges and tokenizer.response_initial_state == HEADER else START,
    )
    return plain if row is None else speaking(row, plain)


def _edges(tokenizer: Any) -> Edges:
    declared: dict[str, list[tuple[str, str]]] = tokenizer.response_transitions
    return {
        state: tuple((mark, opening(mark) if to == _TOOL else to) for mark, to in edges)
        for state, edges in declared.items()
        if state != _TOOL
    }


_TOOL = "tool"


def _parser_name(parse: Any) -> str:
    return "" if parse is None else parse.__module__.rpartition(".")[2]
