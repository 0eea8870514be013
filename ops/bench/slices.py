"""How fast models prefill in slices of several sizes: `python -m ops.bench.slices`.

One long prompt is computed in slices of each size, the sizes in turn and backwards in the next
round; after that the worker's own learner times the model as it does while idle. Rates are over
that of the device's own size. Writes `slices.json` after each model.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
import queue
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import mlx.core as mx
import msgspec

from api.bench.machine import Environment, environment
from ops.bench.processes import worker_environment
from ops.bench.random_models import write_eight
from runtime.embedded import HEARTH_TINY
from runtime.kv.deletions import Deletions
from runtime.kv.state import KvState
from runtime.kv.tiers import Tiers
from runtime.kv_messages import Opened, SliceLearned
from runtime.types import ModelSpec
from runtime.worker import model as models
from runtime.worker.arrivals import Arrival, Quit
from runtime.worker.model import LoadedModel
from runtime.worker.scheduler import Scheduler
from runtime.worker.slice_learner import MIN_COMPUTED_TOKENS, SliceLearner, Surroundings
from runtime.worker.slices import SIZES, sizes_to_time
from store.block_names import HashChain

_REPORT = Path(__file__).parent / "slices.json"


class Row(msgspec.Struct):
    """One model. `tokens_per_s` of each size are medians of the rounds. `over_default` are medians
    of the ratios within each round, and those of what is learned follow from them; `peak_mb` is
    the most that mlx had beside the weights. `learned` is None where a slice would hold others up
    for too long to be timed.
    """

    model: str
    kind: str
    num_tokens: int
    default: int
    learned: int | None
    learning_s: float
    tokens_per_s: dict[int, float]
    over_default: dict[int, float]
    learned_over_default: float
    learned_over_best: float
    peak_mb: dict[int, int]


class Report(msgspec.Struct):
    """One run."""

    environment: Environment
    device: str
    rounds: int
    rows: list[Row]


def load(folder: Path) -> LoadedModel:
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, object])
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    kind = str(config.get("model_type"))
    spec = ModelSpec(folder.name, str(folder), 65_536, kind, nbytes, created_s=0)
    return models.load(spec, lambda _: None)


def prefill(model: LoadedModel, num_tokens: int, size: int) -> tuple[float, int]:
    """Seconds to compute a prompt in slices of that size, and the most memory meanwhile."""
    token_ids = [at * 7907 % model.vocab_size for at in range(num_tokens)]
    kv = model.new_kv()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    start = time.perf_counter()
    for at in range(0, num_tokens, size):
        model.prefill(token_ids[at : at + size], kv)
    return time.perf_counter() - start, mx.get_peak_memory() - before


def learn(model: LoadedModel, tokens_per_s: float) -> SliceLearned | None:
    """What the worker finds out when it has nothing to do."""
    if not sizes_to_time(models.best_slice(), tokens_per_s):
        return None
    inbox: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
    reports: list[SliceLearned] = []

    def report(learned: SliceLearned) -> None:
        reports.append(learned)
        inbox.put(Quit())

    state = KvState.of(model, HashChain(b"s", b"m"), 0)
    tiers = Tiers(state, None, Deletions(), lambda _: None)
    tiers.counts.num_computed_tokens = MIN_COMPUTED_TOKENS
    scheduler = Scheduler(max_batch=1, max_slice=models.best_slice(), block_s=0.25)
    scheduler.prefill_rate = tokens_per_s
    around = Surroundings(model, scheduler, tiers, report)
    learner = SliceLearner(around, models.device_name(), models.best_slice(), quiet_s=0.001)
    learner.heed(Opened(b"m", b"s"), is_idle=True)
    learner.wait(inbox)
    return reports[0]


def measure(model: LoadedModel, num_tokens: int, rounds: int) -> Row:
    """All sizes that the prompt has room for in turn, then what is learned."""
    sizes = [size for size in SIZES if size <= num_tokens]
    default = models.best_slice()
    prefill(model, default, default)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    peaks: dict[int, int] = dict.fromkeys(sizes, 0)
    for number in range(rounds):
        for size in sorted(sizes, reverse=number % 2 == 1):
            took_s, peak = prefill(model, num_tokens, size)
            seconds[size].append(took_s)
            peaks[size] = max(peaks[size], peak)
            print(f"  {size}: {num_tokens / took_s:.0f} tokens/s", file=sys.stderr, flush=True)
    rates = {size: num_tokens / median(each) for size, each in seconds.items()}
    gains = {
        size: median(base / own for base, own in zip(seconds[default], each, strict=True))
        for size, each in seconds.items()
    }
    start = time.perf_counter()
    learned = learn(model, rates[default])
    used = learned.num_tokens if learned is not None else default
    return Row(
        model=model.spec.id,
        kind=model.spec.model_type,
        num_tokens=num_tokens,
        default=default,
        learned=learned.num_tokens if learned is not None else None,
        learning_s=round(time.perf_counter() - start, 1),
        tokens_per_s={size: round(rate, 1) for size, rate in rates.items()},
        over_default={size: round(one, 3) for size, one in gains.items()},
        learned_over_default=round(gains[used], 3),
        learned_over_best=round(gains[used] / max(gains.values()), 3),
        peak_mb={size: peak >> 20 for size, peak in peaks.items()},
    )


def _in_a_process(folder: Path, arguments: argparse.Namespace) -> Row:
    """Measured with the environment of a worker, which has another BLAS."""
    command = [sys.executable, "-m", "ops.bench.slices", "--one", "--model", str(folder)]
    command += ["--tokens", str(arguments.tokens), "--rounds", str(arguments.rounds)]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=worker_environment())
    return msgspec.json.decode(told.stdout, type=Row)


def main() -> None:
    """Measure model after model; print and write as it comes."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.slices", description=__doc__)
    parser.add_argument("--model", type=Path, nargs="+", default=[HEARTH_TINY])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=_REPORT)
    parser.add_argument("--eight", action="store_true", help="the shape of an 8B in 4 bits")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        row = measure(load(arguments.model[0]), arguments.tokens, arguments.rounds)
        sys.stdout.buffer.write(msgspec.json.encode(row))
        return
    report = Report(environment(), models.device_name(), arguments.rounds, [])
    with tempfile.TemporaryDirectory() as home:
        eight = [write_eight(Path(home) / "eight", 0)] if arguments.eight else []
        _measure_all(eight or arguments.model, arguments, report)


def _measure_all(folders: list[Path], arguments: argparse.Namespace, report: Report) -> None:
    for folder in folders:
        print(folder.name, flush=True)
        report.rows.append(_in_a_process(folder, arguments))
        print(msgspec.json.encode(report.rows[-1]).decode(), flush=True)
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
