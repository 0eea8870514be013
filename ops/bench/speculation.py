"""Decoding with speculation over decoding without, in one process, round by round in turn.

`python -m ops.bench.speculation` needs a model's directory only, on whatever device mlx has, and
writes `speculation.json`. Each answer is known from a run without, so what is predicted of it can
be made as right or as wrong as a case wants, whatever the model says.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import msgspec

from api.bench.machine import Environment, environment
from runtime.embedded import HEARTH_TINY
from runtime.types import GenerateRequest, ModelSpec, SamplingParams, TextPrompt
from runtime.worker import model as models
from runtime.worker.decode import Decoder, speculates
from runtime.worker.model import LoadedModel
from runtime.worker.sequence import Sequence as Choice
from runtime.worker.sequence import SequenceGroup
from runtime.worker.speculation import StepCosts

WIDTHS = (1, 4, 16)
_REPORT = Path(__file__).parent / "speculation.json"
_SLICE = 256
_FILE = Path(__file__)


class Figure(msgspec.Struct):
    """One kind of text at one number of streams; tokens per second are of all streams together.

    `ratio` is with over without, the median of the rounds. Of the rows `num_same` said exactly
    what they say without, of `num_rows`; others differ by a tie or by rounding.
    """

    text: str
    streams: int
    without_tokens_per_s: float
    with_tokens_per_s: float
    ratio: float
    ratio_min: float
    ratio_max: float
    num_accepted: int
    num_rejected: int
    num_same: int
    num_rows: int


class Report(msgspec.Struct):
    """One run. `step_ms` is what steps took, by rows (in powers of two) and tokens of each row."""

    environment: Environment
    device: str
    model: str
    rounds: int
    tokens: int
    figures: list[Figure]
    step_ms: dict[str, float]


class _Config(msgspec.Struct):
    model_type: str


def edited(answer: Sequence[int]) -> list[int]:
    """An answer as a client expects it that had a file edited: one token of 24 is another."""
    return [t if number % 24 else answer[0] for number, t in enumerate(answer, 1)]


def misleading(answer: Sequence[int]) -> list[int]:
    """Wherever three tokens are found again, something else follows than was found."""
    triples = [answer[at : at + 3] for at in range(0, len(answer), 3)]
    return [token_id for one in triples for token_id in (*one, answer[0], answer[0])]


def nothing(_: Sequence[int]) -> list[int]:
    """Only what the prompt and the answer hold is guessed."""
    return []


TEXTS: dict[str, tuple[Callable[[Sequence[int]], list[int]], float]] = {
    "file in the prompt": (nothing, 0.0),
    "edited prediction": (edited, 0.0),
    "misleading prediction": (misleading, 0.0),
    "sampled": (nothing, 1.0),
}
"""What is predicted of an answer, and at which temperature it is said."""


class Bench:
    """One model, and what its steps took up to now."""

    def __init__(self, model: LoadedModel, num_tokens: int) -> None:
        self._model = model
        self._num_tokens = num_tokens
        self.costs = StepCosts()

    def figure(self, text: str, streams: int, rounds: int) -> Figure:
        """Measure one kind of text at one width; the first round is not counted."""
        predict, temperature = TEXTS[text]
        known, _ = self._run(self._groups(streams, temperature, []), None)
        predictions = [predict(one) for one in known]
        ours: list[float] = []
        plain: list[float] = []
        num_same, rows = 0, list[Choice]()
        for _ in range(rounds + 1):
            said, plain_rate = self._run(self._groups(streams, temperature, []), None)
            groups = self._groups(streams, temperature, predictions)
            also, our_rate = self._run(groups, self.costs)
            plain.append(plain_rate)
            ours.append(our_rate)
            num_same += sum(a == b for a, b in zip(said, also, strict=True))
            rows += [group.sequences[0] for group in groups]
        ratios = [a / b for a, b in zip(ours[1:], plain[1:], strict=True)]
        accepted = sum(row.num_accepted_tokens for row in rows)
        return Figure(
            text=text,
            streams=streams,
            without_tokens_per_s=round(statistics.median(plain[1:]), 1),
            with_tokens_per_s=round(statistics.median(ours[1:]), 1),
            ratio=round(statistics.median(ratios), 3),
            ratio_min=round(min(ratios), 3),
            ratio_max=round(max(ratios), 3),
            num_accepted=accepted,
            num_rejected=sum(row.num_proposed_tokens for row in rows) - accepted,
            num_same=num_same,
            num_rows=len(rows),
        )

    def _groups(
        self, streams: int, temperature: float, predictions: Sequence[list[int]]
    ) -> list[SequenceGroup]:
        return [
            self._group(number, temperature, predictions[number] if predictions else [])
            for number in range(streams)
        ]

    def _group(self, number: int, temperature: float, prediction: list[int]) -> SequenceGroup:
        lines = _FILE.read_text().splitlines()[number : number + 60]
        text = "\n".join(lines)
        ids: list[int] = self._model.tokenizer.encode(f"{number}\n{text}\n{number}\n{text[:60]}")
        kv = self._model.new_kv()
        for start in range(0, len(ids) - 1, _SLICE):
            self._model.prefill(ids[start : min(start + _SLICE, len(ids) - 1)], kv)
        sampling = SamplingParams(temperature=temperature, seed=number if temperature else None)
        request = GenerateRequest(
            request_id=str(number),
            model="bench",
            prompt=TextPrompt(text=""),
            sampling=sampling,
            ignore_eos=True,
            speculates=True,
        )
        group = SequenceGroup(
            request=request,
            token_ids=ids,
            num_prompt_tokens=len(ids),
            max_tokens=self._num_tokens,
            deadline_s=0.0,
            kv=kv,
            prediction=tuple(prediction),
        )
        nobody = cast("Any", None)
        group.sequences = [Choice(group, 0, nobody, nobody)]
        return group

    def _run(
        self, groups: list[SequenceGroup], costs: StepCosts | None
    ) -> tuple[list[list[int]], float]:
        """What each says, and the tokens per second of all together."""
        decoder = Decoder(self._model, max(WIDTHS), costs)
        for group in groups:
            decoder.insert(group, group.sequences, takes=True)
        start = time.perf_counter()
        while decoder.num_running:
            for token in decoder.step():
                token.sequence.output_token_ids.append(token.token_id)
                token.sequence.num_accepted_tokens += token.was_proposed
        seconds = time.perf_counter() - start
        said = [group.sequences[0].output_token_ids for group in groups]
        return said, sum(map(len, said)) / seconds


def main() -> None:
    """Parse the command line, run, print and write."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.speculation", description=__doc__)
    parser.add_argument("--model", type=Path, default=HEARTH_TINY)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--streams", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    path = arguments.model.resolve()
    model = models.load(_spec(path), lambda _: None)
    if not speculates(model):
        parser.error("this model does not speculate: some of its layers keep more than plain KV")
    bench = Bench(model, arguments.tokens)
    figures: list[Figure] = []
    for streams in arguments.streams:
        for text in TEXTS:
            one = bench.figure(text, streams, arguments.rounds)
            figures.append(one)
            rates = f"{one.with_tokens_per_s:.0f} / {one.without_tokens_per_s:.0f} tok/s"
            ratios = f"x{one.ratio:.2f} ({one.ratio_min:.2f} to {one.ratio_max:.2f})"
            counts = f"accepted {one.num_accepted}, rejected {one.num_rejected}"
            print(f"{streams:3d} {text}: {rates}, {ratios}; {counts}", flush=True)
    report = Report(
        environment=environment(),
        device=str(mx.default_device()),
        model=path.name,
        rounds=arguments.rounds,
        tokens=arguments.tokens,
        figures=figures,
        step_ms=bench.costs.measured_ms,
    )
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def _spec(path: Path) -> ModelSpec:
    config = msgspec.json.decode((path / "config.json").read_bytes(), type=_Config)
    return ModelSpec(
        id="bench",
        path=str(path),
        context=1 << 20,
        model_type=config.model_type,
        nbytes=sum(one.stat().st_size for one in path.glob("*.safetensors")),
        created_s=0,
    )


if __name__ == "__main__":
    main()
