"""A client that knows nothing of how KV is kept: it asks over HTTP and reads the answers.

Prompts are token ids and greedy answers have log probabilities, so two answers can be compared
token by token. Files are bytes, in which tokens are looked for in the forms that tokens may have.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from tokenizers import Tokenizer

from tests.running_server import COMPLETIONS, RunningServer

BLOCK = 16
"""Tokens in a block; the least that the setting allows."""
NUM_SAID = 6
"""Tokens of an answer."""
WINDOW = 6
"""So many tokens in a row are never the same by chance."""
MAX_TOKEN = 1 << 12
TOLERANCE = 1e-4
"""How far log probabilities may be apart: prompts are computed in other slices after a reuse."""
SETTINGS = f"block_size = {BLOCK}\nprefill_slice = {BLOCK}\n"
"""Computing in small slices takes longer than reading, so whatever can be reused is."""
PLAIN = "kv_disk = false\nhot_bytes = 1\nprewarm = false\n"
"""A server that reuses nothing."""
TOO_SLOW = "slower_than_prefill"


class Answer(NamedTuple):
    """What was said, and what the server says of its cache: `num_cached` of the prompt's tokens
    were reused, of which the first `num_durable` are on disk.
    """

    token_ids: list[int]
    logprobs: list[float]
    best: list[list[float]]
    num_prompt: int
    num_cached: int
    num_durable: int
    reason: str | None


class Vocabulary:
    """The tokens of a tiny model. Answers have only those that are told apart by their text."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.size: int = self.tokenizer.get_vocab_size()
        texts = [self.tokenizer.decode([number]) for number in range(self.size)]
        times = Counter(texts)
        self.known = {text: number for number, text in enumerate(texts) if times[text] == 1}
        self.unclear = {str(one): -100 for one in set(range(self.size)) - set(self.known.values())}

    def fresh(self, chance: random.Random, num_tokens: int) -> list[int]:
        """Tokens that were never said in this order."""
        return chance.choices(range(10, self.size), k=num_tokens)

    def body(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """A request whose answer has log probabilities, and a token for each of its texts."""
        return {
            "prompt": list(prompt),
            "temperature": 0,
            "max_tokens": NUM_SAID,
            "logprobs": 3,
            "logit_bias": self.unclear,
            "ignore_eos": True,
            **fields,
        }

    def answer(self, said: Any) -> Answer:
        """The answer in the JSON that a server gave."""
        usage, logprobs = said["usage"], said["choices"][0]["logprobs"]
        cache = said["hearth"]["cache"]
        return Answer(
            token_ids=[self.known[one] for one in logprobs["tokens"]],
            logprobs=logprobs["token_logprobs"],
            best=[sorted((one or {}).values())[-3:] for one in logprobs["top_logprobs"]],
            num_prompt=usage["prompt_tokens"],
            num_cached=usage["prompt_tokens_details"]["cached_tokens"],
            num_durable=cache["durable_tokens"],
            reason=cache["reason"],
        )

    def ask(
        self, server: RunningServer, prompt: Sequence[int], key: str = "", **fields: Any
    ) -> Answer:
        """The answer to a prompt; with the key of a tenant, where there is one."""
        headers = {"x-api-key": key} if key else {}
        body = self.body(prompt, **fields)
        response = server.request("POST", COMPLETIONS, json=body, headers=headers)
        assert response.status_code == 200, response.text
        return self.answer(response.json())


def check_same(tried: Answer, plain: Answer, within: float = TOLERANCE) -> None:
    """An answer is that of a server that computes everything; where two tokens are as likely, what
    follows may differ.
    """
    assert plain.num_cached == 0, plain
    assert tried.num_prompt == plain.num_prompt
    for place, (one, other) in enumerate(zip(tried.token_ids, plain.token_ids, strict=True)):
        pairs = [*zip(tried.best[place], plain.best[place], strict=True)]
        apart = max((abs(a - b) for a, b in pairs), default=0.0)
        assert apart <= within, f"token {place}: {tried} / {plain}"
        gap = abs(tried.logprobs[place] - plain.logprobs[place])
        assert gap <= within * (1 if one == other else 2), f"token {place}: {tried} / {plain}"
        if one != other:
            return


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def whole(num_tokens: int) -> int:
    """So many of these tokens are in whole blocks."""
    return num_tokens // BLOCK * BLOCK


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def windows(piece: Sequence[int]) -> set[tuple[int, ...]]:
    """Every few tokens in a row."""
    return {tuple(piece[at : at + WINDOW]) for at in range(len(piece) - WINDOW + 1)}


class Sightings:
    """Which tokens lie in which files, whatever the files are: as numbers of any usual size."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, int, int], frozenset[tuple[int, ...]]] = {}

    def of(self, path: Path) -> frozenset[tuple[int, ...]]:
        """Every few numbers in a row that may be tokens; nothing of a file that has left."""
        try:
            about = path.stat()
            key = (str(path), about.st_ino, about.st_size, about.st_mtime_ns)
            if key not in self._seen:
                self._seen[key] = frozenset(_small_numbers(path.read_bytes()))
        except FileNotFoundError:
            return frozenset()
        return self._seen[key]

    def holding(
        self, folder: Path, pieces: Iterable[Sequence[int]]
    ) -> dict[tuple[int, ...], list[Path]]:
        """Which files of a folder have something of which of these pieces."""
        wanted = [(tuple(piece), windows(piece)) for piece in pieces]
        found: dict[tuple[int, ...], list[Path]] = {}
        for path in files_in(folder) if wanted else ():
            there = self.of(path)
            for piece, its in wanted:
                if not its.isdisjoint(there):
                    found.setdefault(piece, []).append(path)
        return found


def _small_numbers(data: bytes) -> Iterator[tuple[int, ...]]:
    """Windows of numbers that a token may be, at any place of a file."""
    for size in (2, 4, 8):
        for start in range(size):
            end = start + (len(data) - start) // size * size
            numbers = np.frombuffer(data[start:end], dtype=f"<u{size}")
            fits = (numbers > 0) & (numbers < MAX_TOKEN)
            if len(fits) < WINDOW:
                continue
            places = np.flatnonzero(sliding_window_view(fits, WINDOW).all(axis=1))
            for at in places.tolist():
                yield tuple(numbers[at : at + WINDOW].tolist())


def kill(server: RunningServer) -> None:
    """As `kill -9` does."""
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
