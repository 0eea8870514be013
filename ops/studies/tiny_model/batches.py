"""Token batches for training: dialogues encoded, filled up to a length and padded."""

from __future__ import annotations

import random
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ops.studies.tiny_model.filler import library_text, synthetic
from ops.studies.tiny_model.generate import Dialogue, DialogueMaker, Fill, render
from ops.studies.tiny_model.values import Values

Ids = np.ndarray[tuple[int], np.dtype[np.uint16]]
LENGTHS = (384, 1024, 3072, 8192, 12288)
# Shares of the tokens per length, from the given part of the run on.
CURRICULUM: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0.00, (0.85, 0.15, 0.00, 0.00, 0.00)),
    (0.12, (0.30, 0.50, 0.20, 0.00, 0.00)),
    (0.30, (0.15, 0.30, 0.40, 0.15, 0.00)),
    (0.50, (0.15, 0.20, 0.25, 0.30, 0.10)),
)


class Pool:
    """Encoded filler, cut anywhere at line starts."""

    def __init__(self, ids: Ids, newline_ids: frozenset[int], blank: int) -> None:
        self.ids = ids
        self.starts = np.flatnonzero(np.isin(ids, list(newline_ids))) + 1
        self.blank = blank

    def take(self, rng: random.Random, count: int) -> list[int]:
        """`count` token ids from several places."""
        out: list[int] = []
        while len(out) < count:
            start = int(self.starts[rng.randrange(len(self.starts))])
            length = min(
                count - len(out), int(rng.choice((60, 150, 400, 1200)) * (0.5 + rng.random()))
            )
            out += self.ids[start : start + length].tolist()
            if count - len(out) > 1:
                out.append(self.blank)
        return out[:count]


class Encoder:
    """Turns dialogues into token ids and the places where the model is to learn."""

    def __init__(self, tokenizer: Tokenizer, pool_ids: Ids) -> None:
        self.tokenizer = tokenizer
        self.encode = lru_cache(maxsize=50_000)(self._encode)
        vocab = tokenizer.get_vocab()
        newlines = frozenset(index for token, index in vocab.items() if set(token) == {"Ċ"})
        self.pool = Pool(pool_ids, newlines, self._encode("\n\n")[0])

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def dialogue(
        self, rng: random.Random, dialogue: Dialogue, size: int
    ) -> tuple[list[int], list[bool]]:
        """Ids and learn flags, with filler up to `size` tokens where the dialogue has room."""
        pieces: list[list[int] | Fill] = []
        flags: list[bool] = []
        text, learn = "", False
        for part, learned in [*render(dialogue), (Fill(0.0), False)]:
            if isinstance(part, str) and learned == learn:
                text += part
                continue
            if text:
                pieces.append(self.encode(text) if len(text) < 200 else self._encode(text))
                flags.append(learn)
            text, learn = (part, learned) if isinstance(part, str) else ("", False)
            if isinstance(part, Fill) and part.weight:
                pieces.append(part)
                flags.append(learned)
        room = size - sum(len(piece) for piece in pieces if not isinstance(piece, Fill))
        total = sum(piece.weight for piece in pieces if isinstance(piece, Fill)) or 1.0
        ids: list[int] = []
        learns: list[bool] = []
        for piece, flag in zip(pieces, flags, strict=True):
            is_fill = isinstance(piece, Fill)
            share = max(3, int(room * piece.weight / total)) if is_fill else 0
            taken = self.pool.take(rng, share) if is_fill else piece
            ids += taken
            learns += [flag] * len(taken)
        return ids[:size], learns[:size]


def length_index(rng: random.Random, progress: float) -> int:
    """Which of `LENGTHS` the next batch has at this part of the run (0 to 1)."""
    shares = next(shares for start, shares in reversed(CURRICULUM) if progress >= start)
    return rng.choices(range(len(LENGTHS)), shares)[0]


def batch(
    encoder: Encoder, maker: DialogueMaker, length: int, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids [rows, length] (uint16, padded with 0) and learn flags (bool) of one batch."""
    ids = np.zeros((rows, length), np.uint16)
    learn = np.zeros((rows, length), np.bool_)
    for row in range(rows):
        size = int(length * maker.rng.uniform(0.75, 1.0)) if length > 400 else length
        flat, flags = encoder.dialogue(maker.rng, maker.make(size), size)
        ids[row, : len(flat)] = flat
        learn[row, : len(flat)] = flags
    return ids, learn


def build_pool(tokenizer: Tokenizer, seed: int, held_out: bool, passages: int) -> Ids:
    """Library source and made-up passages of one side of the split, encoded and shuffled."""
    rng = random.Random(seed)
    values = Values(rng, held_out)
    texts = [synthetic(rng, values) for _ in range(passages)]
    for text in library_text(held_out):
        blocks = text.split("\n\n")
        texts += ["\n\n".join(blocks[start : start + 6]) for start in range(0, len(blocks), 6)]
    rng.shuffle(texts)
    encoded = tokenizer.encode_batch([text + "\n\n" for text in texts], add_special_tokens=False)
    return np.concatenate([np.asarray(item.ids, np.uint16) for item in encoded])


def main() -> None:
    """Encode the filler: `python -m ops.studies.tiny_model.batches MODEL_DIR OUT.npz`."""
    tokenizer = Tokenizer.from_file(str(Path(sys.argv[1]) / "tokenizer.json"))
    train = build_pool(tokenizer, 1, held_out=False, passages=30_000)
    held_out = build_pool(tokenizer, 2, held_out=True, passages=4_000)
    np.savez_compressed(sys.argv[2], train=train, held_out=held_out)
    print(f"{len(train)} tokens to train with, {len(held_out)} held out")


if __name__ == "__main__":
    main()
