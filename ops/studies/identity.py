"""What knowing a model by every byte costs: `python -m ops.studies.identity`, see README.

A model of some 10 GB is loaded by a server that does not know its digest and by one that does,
with its files in the page cache and without; beside it they are read, and digested, by themselves.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx
import msgspec
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe

from api.bench.machine import Environment, environment
from ops.bench.client import stream_completion
from ops.bench.engine import prompt
from ops.bench.processes import hearth
from runtime.embedded import HEARTH_TINY
from runtime.models.identity import NoMemo, look, read_digests

_REPORT = Path(__file__).parent / "identity.json"
_LAYER_BYTES = 1_620_000_000
_SHAPE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_PIECE_BYTES = 16 << 20
_PATIENCE_S = 300.0


class Loads(msgspec.Struct):
    """Seconds from asking until the first token of a server that has nothing loaded.

    `identified_s` is from the beginning of the load to the digest, where it is read beside it.
    """

    known_s: float
    unknown_s: float
    added_s: float
    ratio: float
    identified_s: float


class Alone(msgspec.Struct):
    """Seconds for all bytes, nothing else going on; `share` is the digest's rate over reading."""

    read_s: float
    digest_s: float
    share: float


class Figures(msgspec.Struct):
    """Medians over the rounds, of times taken in turn; cold: nothing of it in the page cache."""

    environment: Environment
    rounds: int
    weights_bytes: int
    cold_load: Loads
    warm_load: Loads
    cold: Alone
    warm: Alone


def write_model(folder: Path, num_bytes: int) -> Path:
    """A mixture of experts with about so many bytes of weights, of which a token needs few."""
    shutil.copytree(HEARTH_TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    num_layers = max(1, round(num_bytes / _LAYER_BYTES))
    config = json.loads((folder / "config.json").read_text())
    config |= _SHAPE | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, array in cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())):
        parts = name.split(".")
        shard = parts[2] if parts[1] == "layers" else "ends"
        shards.setdefault(shard, {})[name] = tuple(array.shape)
    del model
    for number, (_, shapes) in enumerate(sorted(shards.items()), 1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weights = {key: _noise(shape) for key, shape in shapes.items()}
        mx.save_safetensors(str(file), weights, {"format": "mlx"})
        _forget(file)
    return folder


def _noise(shape: Sequence[int]) -> mx.array:
    """The same random rows again and again: nobody looks whether they repeat."""
    rows = mx.random.normal(shape[-2:]) * 0.02
    return mx.contiguous(mx.broadcast_to(rows, shape))


def _forget(file: Path) -> None:
    """Have the page cache hold nothing of a file."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def read(model: Path) -> float:
    """Seconds to read every byte from beginning to end."""
    start_s, buffer = time.perf_counter(), bytearray(_PIECE_BYTES)
    for path in _files(model):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start_s


def digest(model: Path) -> float:
    """Seconds to digest every byte."""
    start_s = time.perf_counter()
    read_digests(look(model), NoMemo())
    return time.perf_counter() - start_s


async def load(model: Path, home: Path) -> tuple[float, float | None]:
    """Seconds to a first token, and until the digest was read, if it was not known."""
    log = home / "server.log"
    log.unlink(missing_ok=True)
    async with hearth(model, home, preload=(), log_file=str(log), log_format="json") as server:
        body = {"model": "bench", "prompt": prompt(9, seed=1), "max_tokens": 1, "ignore_eos": True}
        stream = await stream_completion(server.port, body)
        over_s = time.monotonic() + _PATIENCE_S
        while (found := _identified(log)) is None:
            if time.monotonic() > over_s:
                raise TimeoutError("the model was not identified")
            await asyncio.sleep(0.1)
    return stream.ttft_s, found[0] if found[1] else None


def _identified(log: Path) -> tuple[float, bool] | None:
    """Seconds, and whether anything was read for it."""
    for line in log.read_text().splitlines():
        said = json.loads(line)
        if said.get("event") == "model_identified":
            return float(said["seconds"]), bool(said["is_read"])
    return None


async def loads(model: Path, homes: Path, rounds: int, before: Callable[[], None]) -> Loads:
    """Server after server: one whose home is new, then one that knows."""
    known: list[float] = []
    unknown: list[float] = []
    identified: list[float] = []
    for _ in range(rounds):
        home = Path(tempfile.mkdtemp(dir=homes))
        before()
        seconds, read_s = await load(model, home)
        assert read_s is not None, "a new home knows nothing"
        unknown.append(seconds)
        identified.append(read_s)
        before()
        seconds, read_s = await load(model, home)
        assert read_s is None, "what was read is remembered"
        known.append(seconds)
    known_s, unknown_s = statistics.median(known), statistics.median(unknown)
    return Loads(
        known_s=round(known_s, 2),
        unknown_s=round(unknown_s, 2),
        added_s=round(unknown_s - known_s, 2),
        ratio=round(unknown_s / known_s, 3),
        identified_s=round(statistics.median(identified), 2),
    )


def alone(model: Path, rounds: int, before: Callable[[], None]) -> Alone:
    """Reading and digesting in turn."""
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        before()
        read_s = read(model)
        before()
        times.append((read_s, digest(model)))
    read_s, digest_s = (statistics.median(one) for one in zip(*times, strict=True))
    return Alone(round(read_s, 2), round(digest_s, 2), round(read_s / digest_s, 3))


def measure(folder: Path, num_bytes: int, rounds: int) -> Figures:
    """Everything, in turn."""
    model = write_model(folder / "model", num_bytes)
    homes = folder / "homes"
    homes.mkdir()
    old_s = time.time() + 61  # what was written within a minute is not remembered

    def cool() -> None:
        for path in _files(model):
            _forget(path)

    def heat() -> None:
        read(model)

    cold, warm = alone(model, rounds, cool), alone(model, rounds, heat)
    time.sleep(max(old_s - time.time(), 0))
    return Figures(
        environment=environment(),
        rounds=rounds,
        weights_bytes=sum(path.stat().st_size for path in _files(model)),
        cold_load=asyncio.run(loads(model, homes, rounds, cool)),
        warm_load=asyncio.run(loads(model, homes, rounds, heat)),
        cold=cold,
        warm=warm,
    )


def show(figures: Figures) -> None:
    """The figures for people."""
    gigabytes = figures.weights_bytes / 1e9
    print(f"{gigabytes:.1f} GB        read   digest   of its rate")
    for name, one in (("disk", figures.cold), ("memory", figures.warm)):
        print(f"{name:10s} {one.read_s:6.1f} s {one.digest_s:6.1f} s {one.share:9.2f}")
    print("load      known   unknown   added   identified after")
    for name, one in (("cold", figures.cold_load), ("warm", figures.warm_load)):
        row = f"{one.known_s:6.1f} s {one.unknown_s:6.1f} s {one.added_s:+6.1f} s"
        print(f"{name:6s} {row} {one.identified_s:9.1f} s")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m ops.studies.identity", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), int(arguments.gigabytes * 1e9), arguments.rounds)
    show(figures)
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


if __name__ == "__main__":
    main()
