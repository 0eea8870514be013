"""Random values to be recalled or copied, split into training and held-out by a hash."""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import Callable

from ops.studies.tiny_model import words

HELD_OUT_SHARE = 10
IPV4 = ((1, 255), (0, 255), (0, 255), (1, 254))
PREFIXES = ("tok", "sk", "key", "id", "req", "usr")
SMALL_AND_DIGITS = string.ascii_lowercase + string.digits


def is_held_out(value: str) -> bool:
    """Whether `value` is reserved for the evaluation (a tenth of all strings)."""
    return zlib.crc32(value.encode()) % HELD_OUT_SHARE == 0


def _letters(rng: random.Random, alphabet: str, low: int, high: int) -> str:
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(low, high)))


def _word(rng: random.Random) -> str:
    word = words.made_up(rng, 2, 4) if rng.random() < 0.7 else words.common(rng)
    return rng.choice((word, word, word, word.capitalize(), word.upper()))


def _hyphenated(rng: random.Random) -> str:
    joiner = rng.choice("---_.")
    parts = [
        words.made_up(rng, 1, 3) if rng.random() < 0.6 else words.common(rng)
        for _ in range(rng.choice((1, 1, 2, 2, 3)))
    ]
    if len(parts) == 1 or rng.random() < 0.5:
        parts.append(_letters(rng, string.digits, 1, 6))
    value = joiner.join(parts)
    return rng.choice((value, value, value.upper(), value.title()))


def _digits(rng: random.Random) -> str:
    value = _letters(rng, string.digits, 2, 8)
    return (
        value
        if rng.random() < 0.85
        else rng.choice("123456789") + value + rng.choice((".5", ".25", "%", "00"))
    )


def _name(rng: random.Random) -> str:
    first = rng.choice(words.NAMES) if rng.random() < 0.6 else words.made_up(rng, 2, 3).capitalize()
    if rng.random() < 0.6:
        return first
    last = (
        rng.choice(words.SURNAMES) if rng.random() < 0.5 else words.made_up(rng, 2, 3).capitalize()
    )
    return f"{first} {last}"


def _hex(rng: random.Random) -> str:
    shape = rng.random()
    digits = "0123456789abcdef"
    if shape < 0.7:
        value = _letters(rng, digits, 6, 12)
    elif shape < 0.85:
        value = "-".join(_letters(rng, digits, n, n) for n in (8, 4, 4, 4, 12))
    else:
        value = "0x" + _letters(rng, digits, 4, 8)
    return value.upper() if rng.random() < 0.15 else value


def _stem(rng: random.Random) -> str:
    stem = rng.choice((words.common, words.common, words.made_up))(rng)
    if rng.random() < 0.35:
        stem += rng.choice("_-") + rng.choice(
            (words.common(rng), _letters(rng, string.digits, 1, 3))
        )
    return stem


def _path(rng: random.Random) -> str:
    suffix = rng.choice(
        "py py md txt json toml yaml rs ts tsx c h go log csv html sh cfg ini png sql".split()
    )
    name = f"{_stem(rng)}.{suffix}"
    depth = rng.choice((0, 0, 1, 1, 2, 3))
    root = (
        rng.choice(("", "", "", "/", "./", "/home/", "/tmp/", "/etc/", "~/", "src/", "tests/"))
        if depth
        else ""
    )
    return root + "".join(f"{_stem(rng)}/" for _ in range(depth)) + name


def _mixed(rng: random.Random) -> str:
    groups = [
        _letters(rng, string.ascii_uppercase + string.digits, 2, 5)
        for _ in range(rng.choice((1, 2, 2, 3)))
    ]
    value = rng.choice("--_:").join(groups)
    return (
        value if rng.random() < 0.7 else _letters(rng, string.ascii_letters + string.digits, 5, 10)
    )


def _phrase(rng: random.Random) -> str:
    picked = [
        rng.choice((words.common, words.common, words.common, words.made_up))(rng)
        for _ in range(rng.randint(2, 4))
    ]
    value = " ".join(picked)
    return value.capitalize() if rng.random() < 0.2 else value


def _technical(rng: random.Random) -> str:
    stem, number = _stem(rng), rng.randint(1, 65535)
    return rng.choice(
        (
            ".".join(str(rng.randint(*span)) for span in IPV4),
            f"{stem}@{words.made_up(rng)}.{rng.choice(('com', 'org', 'net', 'io', 'dev'))}",
            f"https://{words.made_up(rng)}.{rng.choice(('com', 'org', 'io'))}/{stem}",
            f"{rng.randint(1990, 2060)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}",
            f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}",
            f"v{rng.randint(0, 30)}.{rng.randint(0, 40)}.{rng.randint(0, 99)}",
            f"{words.made_up(rng)}.{words.common(rng)}.local:{number}",
            f"localhost:{number}",
            f"{rng.choice(PREFIXES)}{rng.choice('_-')}{_letters(rng, SMALL_AND_DIGITS, 6, 14)}",
            f"{stem.upper()}#{number}",
        )
    )


def _unicode(rng: random.Random) -> str:
    shape = rng.random()
    if shape < 0.5:
        letters = "áàâäãåçéèêëíñóôöøúüßžščřłğş"
        word = list(words.made_up(rng, 2, 3))
        word[rng.randrange(len(word))] = rng.choice(letters)
        return "".join(word).capitalize()
    if shape < 0.75:
        return "".join(chr(rng.randint(0x4E00, 0x9FA0)) for _ in range(rng.randint(2, 4)))
    return (
        _word(rng)
        + " "
        + chr(rng.choice((0x1F300, 0x1F400, 0x1F600, 0x1F680)) + rng.randint(0, 60))
    )


MAKERS: dict[str, Callable[[random.Random], str]] = {
    "word": _word,
    "hyphenated": _hyphenated,
    "digits": _digits,
    "name": _name,
    "hex": _hex,
    "path": _path,
    "mixed": _mixed,
    "phrase": _phrase,
    "technical": _technical,
    "unicode": _unicode,
    "city": lambda rng: (
        rng.choice(words.CITIES) if rng.random() < 0.7 else words.made_up(rng).capitalize()
    ),
    "color": lambda rng: (
        rng.choice(words.COLORS)
        if rng.random() < 0.6
        else f"{rng.choice(words.ADJECTIVES)} {words.common(rng)}"
    ),
    "integer": lambda rng: str(rng.randint(2, 10 ** rng.randint(2, 6))),
}
MIX = (
    ["word"] * 5
    + ["hyphenated"] * 6
    + ["digits"] * 5
    + ["name"] * 3
    + ["hex"] * 3
    + ["path"] * 3
    + ["mixed"] * 3
    + ["phrase"] * 2
    + ["technical"] * 3
    + ["unicode"]
)


class Values:
    """Draws values of one side of the split: training, or held out for the evaluation."""

    def __init__(self, rng: random.Random, held_out: bool) -> None:
        self.rng = rng
        self.held_out = held_out

    def draw(self, kind: str = "any") -> str:
        """A value of `kind` (a key of `MAKERS`, or "any") on this side of the split."""
        while True:
            value = MAKERS[self.rng.choice(MIX) if kind == "any" else kind](self.rng)
            if is_held_out(value) == self.held_out:
                return value
