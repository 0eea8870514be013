"""Trains hearth-tiny.

`python -m ops.studies.tiny_model.train --pool pool.npz --out DIR --minutes 9`
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ops.studies.tiny_model import trials
from ops.studies.tiny_model.batches import LENGTHS, Encoder, batch, length_index
from ops.studies.tiny_model.generate import DialogueMaker
from ops.studies.tiny_model.model import Decoder, Shape, initialise, load, save

Pair = tuple[Tensor, Tensor]


class Batches(IterableDataset[Pair]):
    """Endless batches; each worker draws from its own random source."""

    def __init__(self, options: argparse.Namespace, progress: Tensor) -> None:
        self.options = options
        self.progress = progress

    def __iter__(self) -> Iterator[Pair]:
        torch.set_num_threads(1)
        info = get_worker_info()
        rng = random.Random(self.options.seed * 1000 + (info.id if info else 0))
        encoder = Encoder(load_tokenizer(self.options), np.load(self.options.pool)["train"])
        maker = DialogueMaker(rng)
        while True:
            length = LENGTHS[length_index(rng, float(self.progress))]
            ids, learn = batch(encoder, maker, length, max(1, self.options.tokens // length))
            yield torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(learn)


def load_tokenizer(options: argparse.Namespace) -> Tokenizer:
    return Tokenizer.from_file(str(options.tokenizer))


def loss_of(
    model: Decoder, forward: Callable[[Tensor], Tensor], ids: Tensor, learn: Tensor, aside: float
) -> Tensor:
    """Mean loss where the model is to speak, plus `aside` times that of a sample of the rest."""
    targets, wanted = ids[:, 1:], learn[:, 1:]
    others = ~wanted & (targets != 0) & (torch.rand(targets.shape, device=ids.device) < 0.04)
    hidden = forward(ids[:, :-1])
    spoken = cross_entropy(model.logits(hidden[wanted]).float(), targets[wanted])
    rest = cross_entropy(model.logits(hidden[others]).float(), targets[others])
    return spoken + aside * rest


@torch.no_grad()
def share_exact(model: Decoder, encoder: Encoder, made: list[trials.Trial], device: str) -> float:
    """Share of trials that greedy decoding would get right, token by token."""
    right = 0
    for trial in made:
        for message in trial.dialogue.messages[: trial.first]:
            message.learn = False
        ids, learn = encoder.dialogue(random.Random(0), trial.dialogue, 1 << 20)
        tokens = torch.tensor([ids], device=device)
        wanted = torch.tensor([learn], device=device)[:, 1:]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            guess = model.logits(model(tokens[:, :-1])[wanted]).argmax(-1)
        right += bool((guess == tokens[:, 1:][wanted]).all())
    return right / len(made)


def check(
    model: Decoder, encoder: Encoder, passages: trials.Passages, tries: int, device: str
) -> str:
    """A line of held-out figures."""
    parts: list[str] = []
    for distance in (100, 500, 2000, 8000, 12000):
        rng = random.Random(distance)
        made = [trials.recall(rng, passages, distance, index % 4 == 3) for index in range(tries)]
        parts.append(f"recall@{distance} {share_exact(model, encoder, made, device):.2f}")
    rng = random.Random(5)
    made = [
        trials.tool(rng, passages, rng.choice((0, 300)), index % 4 == 3) for index in range(tries)
    ]
    parts.append(f"tool {share_exact(model, encoder, made, device):.2f}")
    made = [trials.talk(rng, index % 3 == 0, index % 4 == 3) for index in range(tries)]
    parts.append(f"talk {share_exact(model, encoder, made, device):.2f}")
    return " ".join(parts)


def optimiser(model: Decoder, options: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.dim() == 2 and "embed" not in name else rest).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": 0.05},
        {"params": rest, "weight_decay": 0.0},
    ]
    fused = options.device == "cuda"
    return torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.97), fused=fused)


def batches(options: argparse.Namespace, progress: Tensor) -> Iterator[Pair]:
    """Batches made ahead by worker processes, which read `progress`."""
    loader = DataLoader(
        Batches(options, progress),
        batch_size=None,
        num_workers=options.workers,
        prefetch_factor=2 if options.workers else None,
        pin_memory=options.device == "cuda",
    )
    return iter(loader)


class Training:
    """The loop, its clock and its figures."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tokenizer = load_tokenizer(options)
        self.model = Decoder(Shape())
        if options.resume:
            load(self.model, options.resume)
        else:
            initialise(self.model, self.tokenizer.get_vocab())
        self.model.to(options.device)
        is_cuda = options.device == "cuda"
        # One graph for all lengths: a fixed shape gains a twentieth and costs ten seconds each.
        self.forward = torch.compile(self.model, dynamic=True) if is_cuda else self.model
        self.adam = optimiser(self.model, options)
        self.held_out = Encoder(self.tokenizer, np.load(options.pool)["held_out"])
        self.passages = trials.Passages(self.tokenizer, 7)
        self.step = 0
        self.seen = 0
        self.total = torch.zeros((), device=options.device)

    def run(self) -> None:
        """Train for `options.minutes`; the curriculum and the rate follow the clock."""
        options = self.options
        progress = torch.full((), float(options.start)).share_memory_()
        source = batches(options, progress)
        began = checked = time.monotonic()
        while (spent := time.monotonic() - began) < options.minutes * 60:
            part = spent / (options.minutes * 60)
            progress.fill_(options.start + (1 - options.start) * part)
            rate = self.advance(next(source), part, aside=0.1 if progress < 0.3 else 0.03)
            if self.step % options.report == 0:
                self.report(spent, rate)
            if time.monotonic() - checked > options.check_s:
                self.check(40)
                checked = time.monotonic()
        print(f"{self.step} steps, {self.seen / 1e6:.0f}M tokens, {spent:.0f} s")
        self.check(options.tries)

    def advance(self, made: Pair, part: float, aside: float) -> float:
        """One step at this part of the run; the learning rate it took."""
        options = self.options
        cosine = 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * part))
        rate = options.rate * min(1.0, (self.step + 1) / options.warmup) * cosine
        for group in self.adam.param_groups:
            group["lr"] = rate
        ids, learn = (item.to(options.device, non_blocking=True) for item in made)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            loss = loss_of(self.model, self.forward, ids.long(), learn, aside)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.step += 1
        self.seen += ids.numel()
        self.total += loss.detach()
        return rate

    def report(self, spent: float, rate: float) -> None:
        """Print the mean loss since the last report."""
        loss = float(self.total) / self.options.report
        speed = self.seen / spent / 1e6
        print(
            f"{spent:6.1f}s step {self.step} loss {loss:.4f} rate {rate:.1e} {speed:.2f}M tokens/s",
            flush=True,
        )
        self.total.zero_()

    def check(self, tries: int) -> None:
        """Save, and print held-out figures."""
        save(self.model, self.options.out)
        line = check(self.model, self.held_out, self.passages, tries, self.options.device)
        print("   ", line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", type=Path, required=True)
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("runtime/embedded/hearth-tiny/tokenizer.json")
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="model.safetensors to start from")
    parser.add_argument(
        "--start", type=float, default=0.0, help="part of the curriculum to start at"
    )
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=98_304, help="tokens per batch")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--report", type=int, default=100)
    parser.add_argument("--check-s", type=float, default=90.0)
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    Training(options).run()


if __name__ == "__main__":
    main()
