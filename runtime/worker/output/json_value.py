"""One JSON value, read character by character: what of it is certain may be said at once."""

from __future__ import annotations

_BLANK = " \t\n\r"
_LITERALS = ("true", "false", "null")
_ESCAPED = '"\\/bfnrtu'
_HEX = "0123456789abcdefABCDEF"
_DIGITS = "0123456789"
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class _NotJson(ValueError):
    """The text is no JSON from here on."""


class JsonObject:
    r"""Reads a JSON object, or what else `opens` allows to begin, and says it on.

    What JSON forbids in a string but models write is said as it is meant: a control character
    escaped, and a backslash that escapes nothing, as in `\d`, as one itself.
    """

    def __init__(self, opens: str = "{") -> None:
        self._opens = opens
        self.is_done = False
        self.is_broken = False
        self.is_repaired = False
        self._stack: list[str] = []
        self._expects = "object"
        self._token = ""
        self._in_string = False
        self._escape = ""

    @property
    def in_string(self) -> bool:
        """The text so far ends inside a string."""
        return self._in_string

    def feed(self, text: str) -> tuple[str, str]:
        """What of `text` belongs to the object, made valid, and the rest: what follows the
        object, or what made it `is_broken`.
        """
        said: list[str] = []
        for i, character in enumerate(text):
            if self.is_done:
                return "".join(said), text[i:]
            try:
                said.append(self._take(character))
            except _NotJson:
                self.is_broken = True
                return "".join(said), text[i:]
        return "".join(said), ""

    def _take(self, character: str) -> str:
        if self._in_string:
            return self._take_in_string(character)
        if self._token:
            if character not in f"{_BLANK},:]}}":
                self._token += character
                self._check_token()
                return character
            self._end_token()
        if character not in _BLANK:
            self._take_mark(character)
        return character

    def _take_in_string(self, character: str) -> str:
        if self._escape:
            return self._take_escaped(character)
        if character == "\\":
            self._escape = "\\"
            return ""
        if character == '"':
            self._in_string = False
            self._expects = ":" if self._expects in ("key", "first key") else ","
        elif character < " ":
            self.is_repaired = True
            return _CONTROL.get(character, f"\\u{ord(character):04x}")
        return character

    def _take_escaped(self, character: str) -> str:
        held = self._escape + character
        is_unicode = held[1] == "u"
        if (is_unicode and held[2:].strip(_HEX)) or (not is_unicode and held[1] not in _ESCAPED):
            self._escape = ""
            self.is_repaired = True
            return "\\" + held[:-1] + self._take_in_string(character)
        is_whole = len(held) == 6 or not is_unicode
        self._escape = "" if is_whole else held
        return held if is_whole else ""

    def _take_mark(self, character: str) -> None:
        expects = self._expects
        if expects == "object" and character in self._opens:
            self._begin_value(character)
        elif expects in ("key", "first key") and character == '"':
            self._in_string = True
        elif expects == ":" and character == ":":
            self._expects = "value"
        elif expects == "," and character == ",":
            self._expects = "key" if self._stack[-1] == "{" else "value"
        elif self._closes(character):
            self._stack.pop()
            self._expects = ","
            self.is_done = not self._stack
        elif expects in ("value", "first value"):
            self._begin_value(character)
        else:
            raise _NotJson

    def _begin_value(self, character: str) -> None:
        if character == '"':
            self._in_string = True
        elif character == "{":
            self._open("{", "first key")
        elif character == "[":
            self._open("[", "first value")
        else:
            self._token = character
            self._check_token()

    def _open(self, bracket: str, expects: str) -> None:
        self._stack.append(bracket)
        self._expects = expects

    def _closes(self, character: str) -> bool:
        bracket, empty = ("{", "first key") if character == "}" else ("[", "first value")
        return character in "}]" and self._expects in (",", empty) and self._stack[-1:] == [bracket]

    def _check_token(self) -> None:
        token = self._token
        if any(literal.startswith(token) for literal in _LITERALS) or _may_be_number(token):
            return
        raise _NotJson

    def _end_token(self) -> None:
        if self._token not in _LITERALS and not _is_number(self._token):
            raise _NotJson
        self._token = ""
        self._expects = ","


def _may_be_number(token: str) -> bool:
    """Whether it is the beginning of a JSON number."""
    return any(_is_number(token + rest) for rest in ("", "0", ".0", "e0"))


def _is_number(token: str) -> bool:
    body = token.removeprefix("-")
    mantissa, mark, exponent = body.replace("E", "e").partition("e")
    if mark and not _is_digits(exponent[1:] if exponent[:1] in ("+", "-") else exponent):
        return False
    whole, dot, fraction = mantissa.partition(".")
    if dot and not _is_digits(fraction):
        return False
    return _is_digits(whole) and (whole == "0" or whole[0] != "0")


def _is_digits(text: str) -> bool:
    return bool(text) and all(character in _DIGITS for character in text)
