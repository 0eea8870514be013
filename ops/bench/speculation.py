"""Decoding with speculation over decoding without, in one process, round by round in turn.

`python -m ops.bench.speculation` needs a model's directory only, on whatever device mlx has, and
writes `speculation.json`. Each answer is known from a run without, so what is predicted of it can
be made as right or as wrong as a case wants, whatever the model says.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import msgspec

from api.bench.machine import Environment, environment
from runtime.embedded import HEARTH_TINY
from runtime.types import GenerateRequest, ModelSpec, SamplingParams, TextPrompt
from runtime.worker import model as models
from runtime.worker.decode import Decoder, warm_decode, warm_wide
from runtime.worker.draft import why_no_draft
from runtime.worker.model import LoadedModel
from runtime.worker.sampler import draw_key
from runtime.worker.sequence import Sequence as Choice
from runtime.worker.sequence import SequenceGroup
from runtime.worker.speculation import WIDTHS, StepCosts

_STREAMS = (1, 4, 16)
_REPORT = Path(__file__).parent / "speculation.json"
_FILE = Path(__file__)


class Figure(msgspec.Struct):
    """One kind of text at one number of streams; tokens per second are of all streams together.

    `ratio` is with over without, the median of the rounds. Of the rows `num_same` said exactly
    what they say without, of `num_rows`. Where another differs for the first time the scores of
    the two tokens were computed once more: they are a tie if one unit in the last place of the
    logits lies between them, else different, and `gap_ulps` is the most of all.
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
    num_ties: int
    num_different: int
    gap_ulps: float
    num_rows: int


class Report(msgspec.Struct):
    """One run. `step_ms` is what steps took, by rows (in powers of two) and tokens of each row.

    It is written after each figure; one that was cut short is not `is_complete`.
    """

    environment: Environment
    device: str
    model: str
    draft: str | None
    dtype: str
    rounds: int
    tokens: int
    is_complete: bool = False
    warm_s: float = 0.0
    figures: list[Figure] = msgspec.field(default_factory=list[Figure])
    step_ms: dict[str, float] = msgspec.field(default_factory=dict[str, float])


class _Config(msgspec.Struct):
    model_type: str
    dtype: str | None = msgspec.field(name="torch_dtype", default=None)


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


class Run(NamedTuple):
    """What each row said in one run, and what it took."""

    groups: list[SequenceGroup]
    tokens_per_s: float

    @property
    def said(self) -> list[list[int]]:
        return [group.sequences[0].output_token_ids for group in self.groups]


class Bench:
    """One model, and what its steps took up to now."""

    def __init__(self, model: LoadedModel, num_tokens: int, draft: LoadedModel | None) -> None:
        self._model = model
        self._draft = draft
        self._num_tokens = num_tokens
        self._prompts: dict[int, tuple[list[int], list[Any]]] = {}
        self._known: dict[tuple[int, float], list[list[int]]] = {}
        self.costs = StepCosts()

    def warm(self, most_streams: int) -> float:
        """Have everything compiled and every width seen; the seconds that the first took."""

        def decode(token_ids: list[int], kv: list[Any]) -> None:
            warm_decode(self._model, token_ids, kv, compiles=models.compiles_kernels())
            warm_wide(self._model, token_ids, kv, most_streams)

        return models.warm(self._model, decode)

    def learn(self, streams: int) -> None:
        """See each width twice, so that no figure has the cost of trying them."""
        known = self._answers(streams, 0.0)
        for width in (1, *WIDTHS):
            self._run(streams, 0.0, known, _OneWidth(self.costs, width), 4 * width)

    def figure(self, text: str, streams: int, rounds: int) -> Figure:
        """Measure one kind of text at one width; who goes first takes turns."""
        predict, temperature = TEXTS[text]
        predictions = [predict(one) for one in self._answers(streams, temperature)]
        pairs: list[tuple[Run, Run]] = []
        for number in range(rounds):
            runs: dict[bool, Run] = {}
            for is_ours in (bool(number % 2), not number % 2):
                costs = self.costs if is_ours else None
                runs[is_ours] = self._run(streams, temperature, predictions, costs)
            pairs.append((runs[False], runs[True]))
        ratios = [ours.tokens_per_s / plain.tokens_per_s for plain, ours in pairs]
        rows = [group.sequences[0] for _, ours in pairs for group in ours.groups]
        accepted = sum(row.num_accepted_tokens for row in rows)
        gaps = [
            self._gap_ulps(group, plain)
            for run, ours in pairs
            for group, plain in zip(ours.groups, run.said, strict=True)
        ]
        apart = [gap for gap in gaps if gap is not None]
        return Figure(
            text=text,
            streams=streams,
            without_tokens_per_s=round(statistics.median(p.tokens_per_s for p, _ in pairs), 1),
            with_tokens_per_s=round(statistics.median(o.tokens_per_s for _, o in pairs), 1),
            ratio=round(statistics.median(ratios), 3),
            ratio_min=round(min(ratios), 3),
            ratio_max=round(max(ratios), 3),
            num_accepted=accepted,
            num_rejected=sum(row.num_proposed_tokens for row in rows) - accepted,
            num_same=len(gaps) - len(apart),
            num_ties=sum(gap <= 1.0 for gap in apart),
            num_different=sum(gap > 1.0 for gap in apart),
            gap_ulps=round(max(apart, default=0.0), 2),
            num_rows=len(rows),
        )

    def _answers(self, streams: int, temperature: float) -> list[list[int]]:
        """What the rows say without speculation."""
        key = streams, temperature
        if key not in self._known:
            self._known[key] = self._run(streams, temperature, [], None).said
        return self._known[key]

    def _gap_ulps(self, group: SequenceGroup, plain: list[int]) -> float | None:
        """How far apart the scores of the first two tokens are that differ, in units in the last
        place of the logits; None where none differ. A seed's noise is part of its scores.
        """
        said = group.sequences[0].output_token_ids
        pairs = zip(said, plain, strict=True)
        at = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
        if at is None:
            return None
        kv = self._model.new_kv()
        ids = [*group.token_ids, *plain[:at]]
        self._model.prefill(ids[:-1], kv)
        with mx.stream(self._model.stream):
            logits = self._model.model(mx.array([ids[-1:]]), cache=kv)[:, -1]
            both = mx.array([said[at], plain[at]])
            size = cast("float", mx.abs(logits[0, both]).max().item())
            bits = -math.log2(mx.finfo(logits.dtype).eps)
            scores = logits
            seed = group.request.sampling.seed
            if seed is not None:
                key = mx.random.key(draw_key(seed, 0, at))
                scores = logits + mx.random.gumbel(logits.shape, key=key)
            first, second = cast("list[float]", scores[0, both].astype(mx.float32).tolist())
        ulp = 2.0 ** (math.floor(math.log2(max(size, 1e-30))) - bits)
        return abs(first - second) / ulp

    def _group(
        self, number: int, temperature: float, prediction: list[int], num_tokens: int
    ) -> SequenceGroup:
        if number not in self._prompts:
            self._prompts[number] = self._prefilled(number)
        ids, kv = self._prompts[number]
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
            max_tokens=num_tokens,
            deadline_s=0.0,
            kv=self._model.copy_kv(kv),
            prediction=tuple(prediction),
        )
        nobody = cast("Any", None)
        group.sequences = [Choice(group, 0, nobody, nobody)]
        return group

    def _prefilled(self, number: int) -> tuple[list[int], list[Any]]:
        lines = _FILE.read_text().splitlines()[number : number + 60]
        text = "\n".join(lines)
        ids: list[int] = self._model.tokenizer.encode(f"{number}\n{text}\n{number}\n{text[:60]}")
        kv, size = self._model.new_kv(), models.best_slice()
        for start in range(0, len(ids) - 1, size):
            self._model.prefill(ids[start : min(start + size, len(ids) - 1)], kv)
        return ids, kv

    def _run(
        self,
        streams: int,
        temperature: float,
        predictions: Sequence[list[int]],
        costs: StepCosts | None,
        num_tokens: int | None = None,
    ) -> Run:
        groups = [
            self._group(
                number,
                temperature,
                predictions[number] if predictions else [],
                num_tokens or self._num_tokens,
            )
            for number in range(streams)
        ]
        draft = self._draft if costs is not None else None
        decoder = Decoder(self._model, streams, costs, draft=draft)
        for group in groups:
            decoder.insert(group, group.sequences, takes=True)
        num_said, start = 0, time.perf_counter()
        while decoder.num_running:
            for token in decoder.step():
                token.sequence.output_token_ids.append(token.token_id)
                token.sequence.num_accepted_tokens += token.was_proposed
                num_said += 1
        return Run(groups, num_said / (time.perf_counter() - start))


class _OneWidth(StepCosts):
    """Costs by which one width always pays, kept in others."""

    def __init__(self, costs: StepCosts, width: int) -> None:
        super().__init__()
        self._costs = costs
        self._width = width

    def saw(self, num_rows: int, width: int, seconds: float) -> None:
        self._costs.saw(num_rows, width, seconds)

    def of(self, num_rows: int, width: int) -> float | None:  # noqa: ARG002
        return 0.1 if width == self._width else 1e6


def main() -> None:
    """Parse the command line, run, print and write."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.speculation", description=__doc__)
    parser.add_argument("--model", type=Path, default=HEARTH_TINY)
    parser.add_argument("--draft", type=Path, help="a smaller model with the same tokenizer")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--streams", type=int, nargs="+", default=_STREAMS)
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no figure after")
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    start = time.perf_counter()
    path = arguments.model.resolve()
    model = models.load(_spec(path), lambda _: None)
    if not model.has_plain_rows:
        parser.error("this model does not speculate: some of its layers keep more than plain KV")
    draft = _load_draft(model, arguments.draft) if arguments.draft is not None else None
    bench = Bench(model, arguments.tokens, draft)
    report = Report(
        environment=environment(),
        device=str(mx.default_device()),
        model=path.name,
        draft=arguments.draft.name if arguments.draft is not None else None,
        dtype=str(msgspec.json.decode((path / "config.json").read_bytes(), type=_Config).dtype),
        rounds=arguments.rounds,
        tokens=arguments.tokens,
        warm_s=round(bench.warm(max(arguments.streams)), 1),
    )
    print(f"warm after {report.warm_s} s", flush=True)
    wanted = [(streams, text) for streams in arguments.streams for text in arguments.texts]
    learnt: set[int] = set()
    for streams, text in wanted:
        if time.perf_counter() - start > arguments.seconds:
            break
        if streams not in learnt:
            bench.learn(streams)
            learnt.add(streams)
        report.figures.append(bench.figure(text, streams, arguments.rounds))
        report.step_ms = bench.costs.measured_ms
        report.is_complete = len(report.figures) == len(wanted)
        print(_line(report.figures[-1]), flush=True)
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    print(f"step ms: {report.step_ms}", flush=True)


def _load_draft(model: LoadedModel, path: Path) -> LoadedModel:
    draft = models.load(_spec(path.resolve()), lambda _: None)
    why = why_no_draft(model, draft)
    if why is not None:
        raise SystemExit(f"{path} cannot be a draft: {why}")
    return draft


def _line(one: Figure) -> str:
    rates = f"{one.with_tokens_per_s:.0f} / {one.without_tokens_per_s:.0f} tok/s"
    ratios = f"x{one.ratio:.2f} ({one.ratio_min:.2f} to {one.ratio_max:.2f})"
    counts = f"accepted {one.num_accepted}, rejected {one.num_rejected}"
    same = f"same {one.num_same} of {one.num_rows}, ties {one.num_ties}"
    different = f"different {one.num_different} (by up to {one.gap_ulps} ulp)"
    return f"{one.streams:3d} {one.text}: {rates}, {ratios}; {counts}; {same}, {different}"


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
