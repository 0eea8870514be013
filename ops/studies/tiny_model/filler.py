"""Text between a fact and its question: code, prose, logs, JSON and noise."""

from __future__ import annotations

import json
import random
import string
import sysconfig
from collections.abc import Callable
from pathlib import Path

from ops.studies.tiny_model import words
from ops.studies.tiny_model.values import Values, is_held_out

SENTENCES = (
    "The {a} {n} stood near the {m}.|Every morning {p} walks from {c} to the {n}.|"
    "A {a} {n} is better than a {b} {m}.|"
    "{p} and {q} met at the {n} in {c}.|If the {n} is {a}, {v} the {m} first.|"
    "You must never {v} the {n} before the {m}.|"
    "Always {v} the {n} when the {m} is {a}.|The {n} of {p} is {a} and the {m} is {b}.|"
    "We {v} each {n} twice a day.|"
    "Nobody knows why the {a} {n} was moved to {c}.|"
    "When you {v} a {n}, report the {m}.|Prefer a {a} {n} over a {b} one.|"
    "The {n} number of {c} is {i}.|In {i} the {m} was sold to {p}.|"
    "Use at most {i} {n}s per {m}.|Keep the {n} {a}.|"
    "{p} said that the {n} is not ready.|"
    "Do not {v} the {m} unless the user asks for it.|"
    "The meeting about the {n} starts at {t}.|"
    "There are {i} {a} {n}s in the {m}.|It was a {a} day in {c}, and {p} felt {b}.|"
    "Then {q} opened the {n} and found a {m}."
).split("|")
RULES = (
    "# {T}|## {T}|- {s}|- {s}|- {s}|* {s}|1. {s}|{s} {s}|{s}|IMPORTANT: {s}|**{T}**: {s}|"
    "> {s}|<{n}>{s}</{n}>|`{v}_{n}`: {s}|| {n} | {m} | {i} |"
).split("|")


def sentence(rng: random.Random) -> str:
    """One English sentence from a template."""
    text = rng.choice(SENTENCES)
    picks = {
        "{a}": rng.choice(words.ADJECTIVES),
        "{b}": rng.choice(words.ADJECTIVES),
        "{n}": words.common(rng),
        "{m}": words.common(rng),
        "{p}": rng.choice(words.NAMES),
        "{q}": rng.choice(words.NAMES),
        "{c}": rng.choice(words.CITIES),
        "{v}": rng.choice(words.VERBS),
        "{i}": str(rng.randint(2, 9999)),
        "{t}": f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}",
    }
    for slot, word in picks.items():
        text = text.replace(slot, word)
    return text


def prose(rng: random.Random) -> str:
    return " ".join(sentence(rng) for _ in range(rng.randint(3, 9)))


def rules(rng: random.Random) -> str:
    lines: list[str] = []
    for _ in range(rng.randint(4, 14)):
        line = rng.choice(RULES).replace("{T}", f"{words.common(rng)} {words.common(rng)}".title())
        while "{s}" in line:
            line = line.replace("{s}", sentence(rng), 1)
        lines.append(
            line.replace("{n}", words.common(rng))
            .replace("{m}", words.common(rng))
            .replace("{v}", rng.choice(words.VERBS))
            .replace("{i}", str(rng.randint(0, 999)))
        )
    return "\n".join(lines)


def salad(rng: random.Random) -> str:
    make: Callable[[random.Random], str] = rng.choice((words.common, words.made_up))
    return " ".join(
        make(rng) + rng.choice(("", "", "", "", ",", ".")) for _ in range(rng.randint(10, 80))
    )


def log(rng: random.Random) -> str:
    return "\n".join(_log_line(rng) for _ in range(rng.randint(3, 15)))


def _log_line(rng: random.Random) -> str:
    date = f"{rng.randint(2020, 2032)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    time = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}:{rng.randint(0, 59):02d}Z"
    level = rng.choice(("INFO", "DEBUG", "WARNING", "ERROR"))
    place = f"{words.common(rng)}.{words.common(rng)}"
    event = f"{rng.choice(words.VERBS)} {words.common(rng)}"
    outcome = f"{rng.choice(('ok', 'failed', 'took', 'id'))}={rng.randint(0, 99999)}"
    return f"{date}T{time} {level} {place}: {event} {outcome}"


def _tree(rng: random.Random, values: Values, depth: int) -> object:
    shape = rng.random()
    if depth and shape < 0.45:
        return {
            f"{words.common(rng)}_{words.common(rng)}"
            if rng.random() < 0.3
            else words.common(rng): _tree(rng, values, depth - 1)
            for _ in range(rng.randint(1, 5))
        }
    if depth and shape < 0.55:
        return [_tree(rng, values, depth - 1) for _ in range(rng.randint(1, 4))]
    return rng.choice(
        (values.draw(), rng.randint(0, 9999), True, None, words.common(rng), sentence(rng))
    )


def blob(rng: random.Random, values: Values) -> str:
    tree = {words.common(rng): _tree(rng, values, 3) for _ in range(rng.randint(2, 6))}
    return json.dumps(tree, indent=rng.choice((None, 2)), ensure_ascii=False)


def code(rng: random.Random) -> str:
    lines: list[str] = []
    for _ in range(rng.randint(1, 4)):
        name, arg, other = (
            f"{rng.choice(words.VERBS)}_{words.common(rng)}",
            words.common(rng),
            words.common(rng),
        )
        lines += rng.choice(
            (
                [
                    f"def {name}({arg}: int, {other}=None):",
                    f'    """{sentence(rng)}"""',
                    f"    if {arg} > {rng.randint(0, 99)}:",
                    f"        return {other}.{rng.choice(words.VERBS)}({arg})",
                    f"    return {arg} + {rng.randint(0, 999)}",
                ],
                [
                    f"function {name}({arg}, {other}) {{",
                    f"  const {other}2 = {arg}.{rng.choice(words.VERBS)}({rng.randint(0, 99)});",
                    f"  return {{ {arg}: {other}2 }};",
                    "}",
                ],
                [
                    f"$ {words.common(rng)} --{arg} {rng.randint(0, 99)} {other}.txt",
                    f"{sentence(rng)}",
                    f"{rng.randint(0, 99)} passed, {rng.randint(0, 9)} failed",
                ],
                [
                    f"@@ -{rng.randint(1, 500)},7 +{rng.randint(1, 500)},9 @@",
                    f"-    {arg} = {other}",
                    f"+    {arg} = {other}_{rng.randint(0, 9)}",
                    f"     {name}()",
                ],
            )
        )
    return "\n".join(lines)


def noise(rng: random.Random) -> str:
    shape = rng.random()
    if shape < 0.2:
        return "".join(
            rng.choice(string.ascii_letters + string.digits + "+/")
            for _ in range(rng.randint(40, 200))
        )
    if shape < 0.4:
        return " ".join(f"{rng.randint(0, 255):02x}" for _ in range(rng.randint(16, 96)))
    if shape < 0.6:
        return "".join(
            chr(rng.randint(0x4E00, 0x9FA0)) if rng.random() < 0.9 else "\uff0c"
            for _ in range(rng.randint(10, 60))
        )
    if shape < 0.75:
        return " ".join(
            chr(rng.randint(0x1F300, 0x1F64F)) + rng.choice(("", " " + words.common(rng)))
            for _ in range(rng.randint(5, 30))
        )
    low = rng.choice((0x0430, 0x05D0, 0x0627, 0x0915, 0x30A2, 0xAC00))
    return " ".join(
        "".join(chr(low + rng.randint(0, 24)) for _ in range(rng.randint(2, 8)))
        for _ in range(rng.randint(8, 40))
    )


def table(rng: random.Random, values: Values) -> str:
    head = [words.common(rng) for _ in range(rng.randint(2, 5))]
    joiner = rng.choice((",", " | ", "\t"))
    rows = [
        joiner.join(
            str(rng.randint(0, 9999)) if rng.random() < 0.5 else values.draw() for _ in head
        )
        for _ in range(rng.randint(3, 10))
    ]
    return "\n".join([joiner.join(head), *rows])


def synthetic(rng: random.Random, values: Values) -> str:
    """One passage of a random style, some 30 to 600 characters."""
    style = rng.random()
    if style < 0.12:
        return blob(rng, values)
    if style < 0.2:
        return table(rng, values)
    makers = (prose, prose, rules, rules, salad, log, code, noise)
    return rng.choice(makers)(rng)


def library_files(held_out: bool) -> list[Path]:
    """Source files of Python's standard library: a tenth, by name, is kept for the evaluation."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "lib2to3", "__pycache__", "encodings", "idle_test"}
    found = (path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
    return sorted(
        path for path in found if is_held_out(path.relative_to(root).as_posix()) == held_out
    )


def library_text(held_out: bool) -> list[str]:
    """Their contents, unreadable ones left out."""
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in library_files(held_out)]
    return [text.strip() for text in texts if len(text) > 500]
