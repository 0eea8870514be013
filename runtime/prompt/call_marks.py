"""By what it is told, before a model is loaded and then, which family's calls it writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple


class Marks(NamedTuple):
    """A model is of the family whose marks are all in its template, or else in its vocabulary."""

    template: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()


MARKS: Mapping[str, Marks] = {
    "deepseek_v41": Marks(("<｜DSML｜ calls>",)),
    "deepseek_v4": Marks(("<｜DSML｜tool_calls>",)),
    "gigachat35": Marks(("<｜GCML｜tool_calls>",)),
    "deepseek_v32": Marks(("｜DSML｜", "function_calls"), ("｜DSML｜",)),
    "deepseek_v3": Marks(("<｜tool▁calls▁begin｜>", "```json")),
    "deepseek_v31": Marks(("<｜tool▁calls▁begin｜>",)),
    "minimax_m2": Marks(("<minimax:tool_call>",)),
    "seed_oss": Marks(("<seed:tool_call>",)),
    "gemma4": Marks(("<|tool_call>", "<tool_call|>")),
    "function_gemma": Marks(("<start_function_call>",)),
    "longcat": Marks(("<longcat_tool_call>",)),
    "glm47": Marks(("<arg_key>",)),
    "olmo3": Marks(("<function_calls>", "pythonic")),
    "pythonic": Marks(("<|tool_call_start|>",), ("<|tool_call_start|>", "<|tool_call_end|>")),
    "qwen3_coder": Marks(("<tool_call>", "<function=")),
    "kimi_k2": Marks(("<|tool_calls_section_begin|>",)),
    "minicpm5": Marks(('<function name="', '<param name="')),
    "mistral": Marks(("[TOOL_CALLS]",)),
    "muse_spark": Marks(("<atem:function_calls>",)),
    "command_r": Marks(("<|START_ACTION|>",)),
    "nemotron": Marks(("<TOOLCALL>",)),
    "tool_calls_list": Marks(("<tool_calls>[",)),
    "phi4_mini": Marks(("<|tool_call|>", "<|/tool_call|>")),
    "granite3": Marks(("<|tool_call|>",)),
    "functools": Marks(("functools[",)),
    "gigachat3": Marks(("function call", "role_sep")),
    "json_tools": Marks(("<tool_call>", "arguments")),
    "llama4": Marks(("<|header_start|>",), ("<|python_start|>", "<|python_end|>")),
    "llama3": Marks(('"parameters": ', "ipython")),
    "kimi_k3": Marks(vocab=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")),
    "harmony": Marks(vocab=("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")),
}
"""Those of each family that has any; the first that fits counts."""


def family_named(template: str, vocab: Collection[str] = ()) -> str | None:
    """The family whose marks a template names, or else a vocabulary has."""
    for name, marks in MARKS.items():
        if marks.template and all(mark in template for mark in marks.template):
            return name
    for name, marks in MARKS.items():
        if marks.vocab and all(mark in vocab for mark in marks.vocab):
            return name
    return None
