"""How each family of models writes tool calls: one row for each, which reading and forcing share.

`find` tells by its template and vocabulary which of them a model belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from runtime.prompt.call_marks import family_named
from runtime.prompt.tools_as_text import CallForm
from runtime.worker.output import harmony
from runtime.worker.output.braced_calls import Braces, read_braced
from runtime.worker.output.dialect import Dialect
from runtime.worker.output.joined import Notation
from runtime.worker.output.json_calls import Headed, Objects, read_headed, read_objects
from runtime.worker.output.python_calls import Calls, read_python
from runtime.worker.output.scan import Reading, Scan
from runtime.worker.output.tagged_calls import Tag, Tags, read_tagged
from runtime.worker.output.tools import RequestTools

Form = Objects | Headed | Tags | Calls | Braces

_READERS: Mapping[type, Callable[[Scan, Any, RequestTools], Reading]] = {
    Objects: read_objects,
    Headed: read_headed,
    Tags: read_tagged,
    Calls: read_python,
    Braces: read_braced,
}


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a call is written after its opening mark. `{name}` and `{key}` are filled in, the
    model counts `{n}` itself, and `{is_text}` is `true` for a text and else `false`.

    Without `argument` the arguments are one JSON object; else each is opened by it and closed by
    `argument_end`. Those of a `row` are in its notation.
    """

    opening: str
    closing: str
    argument: str = ""
    argument_end: str = ""
    row: Notation | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """A way to write calls, in sections between `start` and `end`.

    `bare` are marks that may open a section in place of `start`; `first` are the characters that
    do so as the first of an answer. `keeps_blanks` says that blanks before a section are text even
    where no text follows it, and `ends_thoughts` that it may begin in thoughts that are not closed.
    `dropped` are marks that say nothing. Which models are of it, runtime/prompt/call_marks.py says.
    """

    name: str
    start: str
    end: str
    form: Form
    syntax: CallSyntax | None = None
    bare: tuple[str, ...] = ()
    first: str = ""
    keeps_blanks: bool = False
    ends_thoughts: bool = True
    dropped: tuple[str, ...] = ()

    @property
    def streams(self) -> bool:
        """Arguments are said while they are written."""
        return isinstance(self.form, Headed) or (
            isinstance(self.form, Objects) and not self.form.is_list
        )

    @property
    def inner_marks(self) -> tuple[str, ...]:
        """Marks of tags or brackets that stand within sections only, or end them."""
        inner = (self.form.head_end, *self.form.call_ends) if isinstance(self.form, Headed) else ()
        starts = {self.start, *self.bare}
        return tuple(
            mark
            for mark in (self.end, *inner)
            if mark.startswith(("<", "[")) and mark not in starts
        )

    def read(self, scan: Scan, tools: RequestTools) -> Reading:
        """The calls of a section whose opening mark, if it has any, is the text's beginning."""
        return _READERS[type(self.form)](scan, self.form, tools)


def _tags(start: str, end: str, syntax: CallSyntax, **more: Any) -> Tags:
    """The marks to read by, found in how a call is written."""
    before, _, after = syntax.opening.partition("{name}")
    key_before, _, key_after = syntax.argument.partition("{key}")
    between = re.fullmatch(r"(<[^<]+>)\s*(<[^<]+>)", key_after)
    return Tags(
        start=start,
        end=end,
        call=Tag(before.strip(), _mark_in(after)),
        argument=Tag(key_before.strip(), between[1] if between else _mark_in(key_after)),
        value=between[2] if between else "",
        value_end=syntax.argument_end.strip(),
        call_end=syntax.closing.strip().removesuffix(end).strip(),
        **more,
    )


def _mark_in(text: str) -> str:
    """What ends a tag, behind its attributes."""
    return text.rpartition('"')[2].strip()


def _tagged(name: str, start: str, end: str, syntax: CallSyntax, **more: Any) -> Family:
    of_tags = {key: more.pop(key) for key in ("trims", "cdata") if key in more}
    is_forced = more.pop("is_forced", True)
    form = _tags(start, end, syntax, **of_tags)
    return Family(name, start, end, form, syntax if is_forced else None, **more)


def _invoked(name: str, mark: str, section: str, **more: Any) -> Family:
    """DeepSeek's notation since V3.2, whose marks differ, and the section's name."""
    syntax = CallSyntax(
        f'\n<{mark}invoke name="{{name}}">\n',
        f"</{mark}invoke>\n</{mark}{section}>",
        f'<{mark}parameter name="{{key}}" string="{{is_text}}">',
        f"</{mark}parameter>\n",
    )
    return _tagged(name, f"<{mark}{section}>", f"</{mark}{section}>", syntax, **more)


def _listed(
    name: str, start: str, end: str, *, keys: str = "name arguments", **more: Any
) -> Family:
    """A list of objects."""
    called, arguments = keys.split()
    form = Objects(start, end, (called,), (arguments, "arguments", "parameters"), is_list=True)
    opening = f'[{{{{"{called}": {{name_json}}, "{arguments}": '
    return Family(name, start, end, form, CallSyntax(opening, f"}}]{end}"), **more)


_GLM = CallSyntax("{name}", "</tool_call>", "<arg_key>{key}</arg_key><arg_value>", "</arg_value>")
_QWEN = CallSyntax(
    "\n<function={name}>\n",
    "</function>\n</tool_call>",
    "<parameter={key}>\n",
    "\n</parameter>\n",
)
_OBJECT = '{{"name": {name_json}, "arguments": '
_V3 = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

_ROWS = (
    _invoked("deepseek_v41", "｜DSML｜ ", "calls"),
    _invoked("deepseek_v4", "｜DSML｜", "tool_calls"),
    _invoked("gigachat35", "｜GCML｜", "tool_calls"),
    _invoked("deepseek_v32", "｜DSML｜", "function_calls"),
    Family(
        "deepseek_v3",
        *_V3,
        Headed(
            _V3[:1],
            re.compile(r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\s<>]+)\s*"),
            "```json",
            ("```<｜tool▁call▁end｜>",),
            _V3[1],
        ),
        CallSyntax(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            f"\n```<｜tool▁call▁end｜>{_V3[1]}",
        ),
    ),
    Family(
        "deepseek_v31",
        *_V3,
        Headed(
            _V3[:1],
            re.compile(r"<｜tool▁call▁begin｜>(?P<name>[^\s<>]+)"),
            "<｜tool▁sep｜>",
            ("<｜tool▁call▁end｜>",),
            _V3[1],
        ),
        CallSyntax("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", f"<｜tool▁call▁end｜>{_V3[1]}"),
    ),
    _tagged(
        "minimax_m2",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        CallSyntax(
            '\n<invoke name="{name}">\n',
            "</invoke>\n</minimax:tool_call>",
            '<parameter name="{key}">',
            "</parameter>\n",
        ),
    ),
    _tagged(
        "seed_oss",
        "<seed:tool_call>",
        "</seed:tool_call>",
        CallSyntax(
            "\n<function={name}>\n",
            "</function>\n</seed:tool_call>",
            "<parameter={key}>",
            "</parameter>\n",
        ),
    ),
    Family(
        "gemma4",
        "<|tool_call>",
        "<tool_call|>",
        Braces("<|tool_call>", "<tool_call|>", '<|"|>'),
        CallSyntax(
            "call:{name}{{",
            "}<tool_call|>",
            row=Notation("{key}:", ",", '<|"|>', name=r"[\w.-]+"),
        ),
    ),
    Family(
        "function_gemma",
        "<start_function_call>",
        "<end_function_call>",
        Braces("<start_function_call>", "<end_function_call>", "<escape>"),
        CallSyntax(
            "call:{name}{{",
            "}<end_function_call>",
            row=Notation("{key}:", ",", "<escape>", text="[^}<]*", name=r"\w+", nests=False),
        ),
    ),
    _tagged(
        "longcat",
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        CallSyntax(
            "{name}\n",
            "</longcat_tool_call>",
            "<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>",
            "</longcat_arg_value>\n",
        ),
    ),
    _tagged("glm47", "<tool_call>", "</tool_call>", _GLM),
    _tagged("laguna", "<tool_call>", "</tool_call>", _GLM),
    Family(
        "olmo3",
        "<function_calls>",
        "</function_calls>",
        Calls("<function_calls>", "</function_calls>", is_list=False),
        CallSyntax("\n{name}(", ")\n</function_calls>", row=Notation("{key}=", ", ")),
    ),
    Family(
        "pythonic",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        Calls("<|tool_call_start|>", "<|tool_call_end|>"),
        CallSyntax("[{name}(", ")]<|tool_call_end|>", row=Notation("{key}=", ", ")),
    ),
    _tagged(
        "qwen3_coder",
        "<tool_call>",
        "</tool_call>",
        _QWEN,
        trims=True,
        bare=("<function=",),
    ),
    Family(
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        Headed(
            ("<|tool_calls_section_begin|>",),
            re.compile(
                r"(?:.*<\|tool_call_begin\|>)?\s*(?P<id>(?:functions\.)?(?P<name>[^:\s]+):\d+)\s*",
                re.DOTALL,
            ),
            "<|tool_call_argument_begin|>",
            ("<|tool_call_end|>",),
            "<|tool_calls_section_end|>",
        ),
        CallSyntax(
            "<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
        keeps_blanks=True,
    ),
    _tagged(
        "minicpm5",
        "<function name=",
        "</function>",
        CallSyntax('"{name}">', "</function>", '<param name="{key}">', "</param>"),
        cdata=True,
    ),
    Family(
        "mistral",
        "[TOOL_CALLS]",
        "",
        Headed(
            ("[TOOL_CALLS]",),
            re.compile(r"(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*(?P<id>[\w-]+)\s*)?"),
            "[ARGS]",
            head_marks=("[ARGS]", "[CALL_ID]"),
        ),
        CallSyntax("{name}[ARGS]", ""),
        keeps_blanks=True,
        ends_thoughts=False,
    ),
    _tagged(
        "muse_spark",
        "<atem:function_calls>",
        "</atem:function_calls>",
        CallSyntax(
            '\n<atem:invoke name="{name}">\n',
            "</atem:invoke>\n</atem:function_calls>",
            '<atem:parameter name="{key}">',
            "</atem:parameter>\n",
        ),
        is_forced=False,
    ),
    _listed(
        "command_r",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        keys="tool_name parameters",
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    _listed("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    _listed("tool_calls_list", "<tool_calls>", "</tool_calls>"),
    Family(
        "phi4_mini",
        "<|tool_call|>",
        "<|/tool_call|>",
        Objects("<|tool_call|>", "<|/tool_call|>"),
        CallSyntax(_OBJECT, "}<|/tool_call|>"),
    ),
    _listed("granite3", "<|tool_call|>", ""),
    _listed("functools", "functools", ""),
    Family(
        "gigachat3",
        "function call<|role_sep|>\n",
        "",
        Objects("function call<|role_sep|>\n"),
        CallSyntax(_OBJECT, "}"),
        dropped=("<|message_sep|>\n\n", "<|message_sep|>"),
    ),
    Family(
        "json_tools",
        "<tool_call>",
        "</tool_call>",
        Objects("<tool_call>", "</tool_call>"),
        CallSyntax("\n" + _OBJECT, "}\n</tool_call>"),
    ),
    Family(
        "llama4",
        "<|python_start|>",
        "<|python_end|>",
        Calls("<|python_start|>", "<|python_end|>"),
        CallSyntax("[{name}(", ")]<|python_end|>", row=Notation("{key}=", ", ")),
        first="[",
        keeps_blanks=True,
    ),
    Family(
        "llama3",
        "<|python_tag|>",
        "",
        Objects("<|python_tag|>", "", arguments=("parameters", "arguments"), is_strict=True),
        CallSyntax('{{"name": {name_json}, "parameters": ', "}"),
        first="{",
        keeps_blanks=True,
    ),
    Family(
        "kimi_k3",
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        _tags(
            "<|open|>tools<|sep|>",
            "<|close|>tools<|sep|>",
            CallSyntax(
                '<|open|>call tool="{name}" index="{n}"<|sep|>',
                "<|close|>call<|sep|><|close|>tools<|sep|>",
                '<|open|>argument key="{key}" type="{kind}"<|sep|>',
                "<|close|>argument<|sep|>",
            ),
            escapes=True,
            whole=(
                '<|open|>json type="object"<|sep|>',
                "<|close|>json<|sep|>",
            ),
        ),
        CallSyntax(
            '<|open|>call tool="{name}" index="1"<|sep|><|open|>json type="object"<|sep|>',
            "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        ),
        keeps_blanks=True,
    ),
    Family(
        harmony.NAME,
        harmony.CALL_START,
        harmony.CALL_END,
        Headed(
            (harmony.CALL_START, harmony.LATE_CALL_START, harmony.HIDDEN_CALL_START),
            re.compile(r"(?:functions\.)?(?P<name>[^\s<{]+).*", re.DOTALL),
            "<|message|>",
            (harmony.CALL_END, harmony.REASONING_END),
            is_single=True,
        ),
        CallSyntax("functions.{name} <|constrain|>json<|message|>", ""),
    ),
)
FAMILIES: Mapping[str, Family] = {row.name: row for row in _ROWS}
THINK_MARKS = (
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Marks of thoughts that mlx-lm does not look for."""

ANSWER_MARKS = ("<response>", "</response>")
"""Marks around the answers of ERNIE, which are one token each there."""


@cache
def family_of(name: str) -> Family | None:
    """The row of this name."""
    return FAMILIES.get(name)


def find(template: str, vocab: Collection[str]) -> Family | None:
    """The first family whose marks a template names, or else a vocabulary has."""
    name = family_named(template, vocab)
    return None if name is None else FAMILIES[name]


def call_form(name: str) -> CallForm | None:
    """How models of the family of this name write a call; None where arguments are not JSON."""
    row = family_of(name)
    if row is None or row.syntax is None or row.syntax.argument or row.syntax.row is not None:
        return None
    return CallForm(row.start + row.syntax.opening, row.syntax.closing)


def speaking(row: Family, dialect: Dialect) -> Dialect:
    """The dialect with this family's calls."""
    return replace(
        dialect,
        tool_start=row.start,
        tool_end=row.end,
        name=row.name,
        bare=row.bare,
        first=row.first,
        keeps_blanks=row.keeps_blanks,
        ends_thoughts=row.ends_thoughts,
        dropped=(*dialect.dropped, *row.dropped),
    )
