"""Texts that models are asked about: this repository's pages and code, and the world's scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

_ROOT = Path(__file__).parents[2]
_MOST_CHARACTERS = 200_000
SHORTEST = 30

WORLD = {
    "Japanese": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。何でも薄暗い"
    "じめじめした所でニャーニャー泣いていた事だけは記憶している。",
    "Chinese": "道可道，非常道。名可名，非常名。无名天地之始；有名万物之母。故常无，欲以观其妙。",
    "Korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "Arabic": "يولد جميع الناس أحراراً متساوين في الكرامة والحقوق.",
    "Hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतंत्रता और समानता प्राप्त है।",
    "emoji": "🎉🎊🥳👩‍👩‍👧‍👦🇯🇵🏳️‍🌈👍🏽🎉🎊🥳👩‍👩‍👧‍👦🇯🇵🏳️‍🌈👍🏽🎉🎊🥳👩‍👩‍👧‍👦🇯🇵🏳️‍🌈👍🏽",
    "symbols": "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β = ¬(¬α ∨ β), 𝔸 ⊆ 𝔹 ⟹ 𝔸 ∩ 𝔹 = 𝔸; ",
}


class Prompt(NamedTuple):
    """What is continued, text or messages, with about so many tokens."""

    kind: str
    length: int
    text: str = ""
    messages: Sequence[Mapping[str, object]] = ()


class Material:
    """Texts by kind, each as tokens of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        world = "\n".join(f"{n}. {text}" for n in range(60) for text in WORLD.values())
        texts = {
            "prose": _joined("docs/decisions/*.md"),
            "code": _joined("runtime/kv/*.py"),
            "scripts": world,
        }
        self._ids = {
            kind: tokenizer.encode(text, add_special_tokens=False).ids
            for kind, text in texts.items()
        }

    def piece(self, kind: str, length: int, number: int = 0) -> str:
        """Text of so many tokens; another for each number."""
        ids = self._ids[kind]
        start = number * 997 % max(len(ids) - length, 1)
        return self._tokenizer.decode(ids[start : start + length]).strip("\ufffd")


def _joined(pattern: str) -> str:
    texts = (path.read_text("utf-8") for path in sorted(_ROOT.glob(pattern)))
    return "\n".join(texts)[:_MOST_CHARACTERS]


def lengths(count: int, longest: int) -> list[int]:
    """From 30 tokens to the longest, each as many times the one before."""
    growth = (longest / SHORTEST) ** (1 / max(count - 1, 1))
    return [round(SHORTEST * growth**number) for number in range(count)]


def prompts(material: Material, count: int, longest: int) -> list[Prompt]:
    """Pages, code, scripts, questions and conversations, in turn."""
    return [_prompt(material, n, length) for n, length in enumerate(lengths(count, longest))]


def _prompt(material: Material, number: int, length: int) -> Prompt:
    kind = ("prose", "code", "scripts", "question", "conversation")[number % 5]
    if kind == "question":
        text = material.piece("prose", length, number)
        asked = f"{text}\n\nWhat does this text say, in one sentence?"
        return Prompt(kind, length, messages=[{"role": "user", "content": asked}])
    if kind == "conversation":
        third = material.piece("code", length // 3, number)
        words = material.piece("prose", length // 3, number + 1)
        turns = [
            ("user", f"What is this?\n{third}"),
            ("assistant", words),
            ("user", f"And this?\n{material.piece('scripts', length // 3, number)}"),
        ]
        messages = [{"role": role, "content": text} for role, text in turns]
        return Prompt(kind, length, messages=messages)
    return Prompt(kind, length, text=material.piece(kind, length, number))
