"""Trains the byte-level BPE: `python -m ops.studies.tiny_model.tokenizer OUT_DIR`.

Words are merged first and a leading space last, so a word splits alike with and without a space
before it: copying a value from prose into quotes or JSON keeps its tokens.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ops.studies.tiny_model.filler import library_text, synthetic
from ops.studies.tiny_model.generate import DialogueMaker, render
from ops.studies.tiny_model.values import Values

SEED = 20
VOCAB_SIZE = 4096
WORD_VOCAB = 3300
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
RUNS = r"-{2,}|={2,}|#{2,}|\*{2,}|_{2,}|~{2,}|`{2,}|\.{2,}"
SPACES = r"\n+|[^\S\n]+(?= \S)|[^\S\n]+"
WORDS_ONLY = rf"[\p{{L}}\p{{M}}]+|\p{{N}}{{1,2}}|{RUNS}|[^\s\p{{L}}\p{{M}}\p{{N}}]|{SPACES}"
WITH_SPACE = rf" ?[\p{{L}}\p{{M}}]+| ?\p{{N}}{{1,2}}|{RUNS}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]|{SPACES}"
SPACED_PUNCTUATION = set("={(+|&[")


def corpus(seed: int) -> Iterator[str]:
    """Dialogues, made-up filler and the standard library's source (training side of the split)."""
    rng = random.Random(seed)
    maker = DialogueMaker(rng)
    for index in range(6000):
        dialogue = maker.make(300 if index % 2 else 1500)
        yield "".join(part for part, _ in render(dialogue) if isinstance(part, str))
    values = Values(rng, held_out=False)
    for _ in range(4000):
        yield synthetic(rng, values)
    library = library_text(held_out=False)
    yield from (text[:12000] for text in rng.sample(library, min(400, len(library))))


def _splitter(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def train_words(texts: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of words that carry no space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _splitter(WORDS_ONLY)
    trainer = trainers.BpeTrainer(
        vocab_size=WORD_VOCAB,
        special_tokens=[AddedToken(token, special=True) for token in CONTROL + MARKERS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def spaced_words(texts: list[str], vocab: dict[str, int], room: int) -> list[str]:
    """The `room` tokens most often found whole behind a space."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(re.findall(r"(?<= )[A-Za-z]+|(?<= )[^\sA-Za-z0-9]", text))
    fits = (
        word
        for word, _ in counts.most_common()
        if word in vocab and (word.isalpha() or word in SPACED_PUNCTUATION)
    )
    return [word for word, _ in zip(fits, range(room), strict=False)]


def build(texts: list[str]) -> Tokenizer:
    """The finished tokenizer."""
    vocab, merges = train_words(texts)
    space = "Ġ"
    for word in spaced_words(texts, vocab, VOCAB_SIZE - len(vocab)):
        merges.append((space, word))
        vocab[space + word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _splitter(WITH_SPACE)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in CONTROL]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return tokenizer


def save(tokenizer: Tokenizer, out: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32768,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "tool_parser_type": "json_tools",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    texts = list(corpus(SEED))
    tokenizer = build(texts)
    save(tokenizer, Path(sys.argv[1]))
    sample = texts[::50]
    ratio = sum(map(len, sample)) / sum(len(tokenizer.encode(text).ids) for text in sample)
    print(f"{tokenizer.get_vocab_size()} entries, {ratio:.2f} characters per token")


if __name__ == "__main__":
    main()
