"""What the checks share: one model, its server, mlx_lm beside it, and how much is asked."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
from tokenizers import Tokenizer

from ops.judge.compare import Divergence, Scored, divergence
from ops.judge.reference import Continued, Reference
from ops.judge.server import Said, Server
from ops.judge.texts import Material

OURS_AND_THEIRS = ("Hearth", "mlx_lm")


class Judged(NamedTuple):
    """A model that can be served."""

    name: str
    title: str
    folder: Path


class Amount(msgspec.Struct, frozen=True):
    """How much is asked."""

    num_prompts: int = 40
    longest: int = 6000
    num_tokens: int = 32
    num_schemas: int = 60
    num_turns: int = 12


class Bench:
    """One model on the bench."""

    def __init__(self, model: Judged, reference: Reference, calm: Server, amount: Amount) -> None:
        self.model = model
        self.reference = reference
        self.calm = calm
        """A server that is never interrupted."""
        self.amount = amount
        self.tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
        self.material = Material(self.tokenizer)


def beside(where: str, ours: Said, theirs: Continued) -> Divergence | None:
    """An answer beside mlx_lm's, which drops a blank at the very beginning of its text."""
    if ours.text == theirs.text and ours.finish == theirs.finish:
        return None
    told: list[Scored] = theirs.tokens[:-1] if theirs.finish == "stop" else theirs.tokens
    if ours.text == f" {theirs.text}" and told[0].token.startswith(" "):
        return Divergence(where, FIRST_BLANK, True)
    ends = [text.endswith(LOST) for text in (ours.text, theirs.text)]
    if all(ends) and ours.text.rstrip(LOST) in (whole := theirs.text.rstrip(LOST), f" {whole}"):
        return Divergence(where, CUT_CHARACTER, True)
    return divergence(where, ours.tokens, theirs.tokens, OURS_AND_THEIRS)


LOST = "\ufffd"
CUT_CHARACTER = (
    "equal but for the number of U+FFFD at the end, where it was cut inside of a character: "
    "Hearth has one for each byte, as the tokenizer's own decoder, and mlx_lm's stream one for all"
)
FIRST_BLANK = "equal but for the first blank, which the model wrote and mlx_lm's text has not"
