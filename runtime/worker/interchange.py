"""`python -m runtime.worker.interchange`: one export or import, told as a line of JSON on stdin.

It answers with lines of JSON on stdout, of which the last is the result. An import asks for room
before it writes, and afterwards waits for the end of stdin: as long as it lives nobody takes the
files that it staged for those of a dead process.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from runtime.kv import layers, mlx_lm_file, taken_in
from runtime.kv.layers import KvLayout, UnsupportedCache
from runtime.mlx_lm_exchange import Export, Import, Job, Outcome, SpaceWanted
from runtime.progress import Progress
from runtime.ranks import KvForm
from runtime.worker import model as models
from runtime.worker.model import LoadedModel
from store.errors import OverCap, StoreError

_CHECKED_TOKENS = 256
_MAX_DEVIATION = 0.05
_FILE_BYTES = 8192
"""What a file may take on disk beyond its size."""


def run(job: Job) -> Outcome:
    """Do it; what cannot be done is the outcome's `error`."""
    try:
        if isinstance(job, Export):
            paths = [Path(path) for path in job.paths]
            file = Path(job.file)
            told = _reading(paths)
            num_tokens = mlx_lm_file.write(file, paths, job.leaves, job.model, job.model_path, told)
            return Outcome(num_tokens)
        return _import(job)
    except UnsupportedCache as error:
        return Outcome(0, error=f"layer caches of the class {error} cannot be exchanged")
    except (StoreError, ValueError, RuntimeError, OSError) as error:
        return Outcome(0, error=str(error))


def _import(job: Import) -> Outcome:
    _tell("read")
    stock = mlx_lm_file.read(Path(job.file))
    if stock.model_hash is not None and stock.model_hash != job.model_hash.hex():
        raise ValueError(f"it was computed by another model than {job.spec.id} is now")
    model = models.load(
        job.spec,
        lambda share: _tell("load the model", int(share * 100), 100),
        KvForm(job.kv_bits, kv_start=job.kv_start),
    )
    layout = layers.layout_of(model.new_kv())
    if layers.layout_of(stock.kv) != layout:
        raise ValueError(f"its layer caches are not those of {job.spec.id}")
    token_ids = _token_ids(job, model, stock)
    if model.kv_start and len(token_ids) > model.kv_start:
        raise ValueError(
            f"it holds {len(token_ids)} tokens. After the first {model.kv_start} Hearth quantises "
            "KV, so what mlx-lm computed is other KV: cache fewer tokens, or leave "
            "quantized_kv_start out"
        )
    _tell("compute the beginning")
    token_ms = _check(model, layout, stock.kv, token_ids)
    runs = mlx_lm_file.cut_runs(stock.kv, layout, len(token_ids), job.block_size)
    taken = taken_in.taken_in(job, layout, runs, token_ids, token_ms)
    head = taken_in.write(Path(job.root), taken, _want_room, partial(_tell, "write"))
    return Outcome(len(token_ids), head=head)


def _token_ids(job: Import, model: LoadedModel, stock: mlx_lm_file.StockFile) -> list[int]:
    """What was cached: as the file says, as was given, or as mlx-lm's `cache_prompt` makes it."""
    held = mlx_lm_file.num_tokens(stock.kv)
    candidates: list[list[int]] = []
    if stock.token_ids is not None:
        candidates.append(stock.token_ids)
    if job.token_ids is not None:
        candidates.append(list(job.token_ids))
    if job.prompt is not None:
        candidates += _tokenized(model.tokenizer, job.prompt)
    if not candidates:
        raise ValueError("it does not say its tokens: give --prompt-file or --tokens")
    for token_ids in candidates:
        if held is None or len(token_ids) == held:
            return token_ids
    found = ", ".join(str(len(one)) for one in candidates)
    raise ValueError(f"it holds {held} tokens, and the given prompt has {found}")


def _tokenized(tokenizer: Any, prompt: str) -> list[list[int]]:
    ways = [list(tokenizer.encode(prompt))]
    if tokenizer.has_chat_template:
        message = [{"role": "user", "content": prompt}]
        ways.insert(
            0,
            list(
                tokenizer.apply_chat_template(
                    message, add_generation_prompt=False, continue_final_message=True
                )
            ),
        )
    return ways


def _check(model: LoadedModel, layout: KvLayout, kv: Sequence[Any], token_ids: list[int]) -> float:
    """Compute the beginning again: KV of another model or prompt never gets in.

    How long a token took, in ms.

    Raises:
        ValueError: it differs by more than kernels do.
    """
    end = min(len(token_ids), _CHECKED_TOKENS)
    fresh = model.new_kv()
    with mx.stream(model.stream):
        start_s = time.perf_counter()
        model.prefill(token_ids[:end], fresh)
        mx.eval([cache.state for cache in fresh])
        token_ms = (time.perf_counter() - start_s) * 1000 / end
        pairs = zip(layers.cut(kv, layout, 0, end), layers.cut(fresh, layout, 0, end), strict=True)
        for theirs, ours in pairs:
            if theirs.dtype == mx.uint32 or not theirs.size:
                continue
            if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
                raise ValueError("its tensors are not those of the model")
            a, b = theirs.astype(mx.float32), ours.astype(mx.float32)
            allowed = _MAX_DEVIATION * mx.linalg.norm(b) + 1e-6
            if (mx.linalg.norm(a - b) > allowed).item():
                raise ValueError("it is not what this model computes for this prompt")
    return token_ms


def _want_room(num_bytes: int) -> None:
    """So much is about to be written. Raises OverCap where that is not allowed."""
    _say(SpaceWanted(num_bytes=num_bytes))
    if not msgspec.json.decode(sys.stdin.readline(), type=bool):
        raise OverCap(num_bytes)


def _reading(paths: Sequence[Path]) -> Callable[[int], None]:
    return lambda number: _tell("read", number, len(paths))


def _tell(step: str, num_done: int = 0, num_total: int = 0) -> None:
    """How far it is."""
    _say(Progress(step=step, num_done=num_done, num_total=num_total))


def _say(told: Progress | SpaceWanted | Outcome) -> None:
    """A line of JSON."""
    sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
    sys.stdout.flush()


def main() -> None:
    """Read the job, do it, say what came of it, wait to be let go."""
    os.umask(0o077)  # the file tells as much as the prompt
    job = msgspec.json.decode(sys.stdin.readline(), type=Export | Import)
    _say(run(job))
    sys.stdin.read()


if __name__ == "__main__":
    main()
