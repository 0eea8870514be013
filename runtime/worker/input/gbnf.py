"""Grammars in llama.cpp's notation, GBNF, as ones in llguidance's dialect of Lark. Pure."""

from __future__ import annotations

import re

from llguidance import grammar_from

MARK = "gbnf:"
"""Begins a grammar that is still to be rewritten; llguidance's own are JSON."""

_PIECE = re.compile(
    r"""
      (?P<text> "(?:\\.|[^"\\\n])*" | \[(?:\\.|[^\]\\\n])*\] )  # a text or a set of characters
    | (?P<remark> \#[^\n]* )
    | (?P<start> (?<![\w-])start(?![\w-]) )
    | (?P<upto> \{[ \t]*(?=,) )                                 # {,3}
    | (?P<alternative> (?:[ \t]*\r?\n)+[ \t]*(?=\|) )           # a rule's next line
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:u([\da-fA-F]{4})|U([\da-fA-F]{8})|(.))", re.DOTALL)


def marked(grammar: str) -> str:
    """A grammar in GBNF, to be given to `readable` where its cost is bounded."""
    return MARK + grammar


def readable(grammar: str) -> str:
    """A grammar as llguidance reads it.

    Raises:
        ValueError: it is no GBNF; the message says where, or why.
    """
    if not grammar.startswith(MARK):
        return grammar
    try:
        return grammar_from("gbnf", _PIECE.sub(_plain, grammar.removeprefix(MARK)))
    except ValueError as error:
        cause = error.__context__ or error
        said = "it is nested too deeply" if isinstance(cause, RecursionError) else str(cause)
        raise ValueError(said) from error


def _plain(piece: re.Match[str]) -> str:
    """A piece in those words of GBNF that llguidance's conversion knows."""
    match piece.lastgroup:
        case "text":
            return _ESCAPE.sub(_character, piece[0])
        case "start":  # Lark's name for what GBNF calls root
            return "start-"
        case "upto":
            return "{0"
        case "alternative":
            return " "
        case _:
            return piece[0]


def _character(escape: re.Match[str]) -> str:
    """A character by its number as itself, where it cannot be taken for a sign."""
    short, long, one = escape.groups()
    if one is not None:
        return r"\x2D" if one == "-" else escape[0]
    code = int(short or long, 16)
    if code < 0x80:
        return rf"\x{code:02X}"
    return chr(code) if code <= 0x10FFFF and not 0xD800 <= code < 0xE000 else escape[0]
