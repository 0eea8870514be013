"""The opponent: mlx-lm's BatchGenerator in a bare loop, driven by JSON lines on stdin."""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from runtime.worker.linear import choose_forms

_SLICE = 256
_upstream: Any = importlib.import_module("mlx_lm.generate")


def run(model: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, list[float]]:
    """Seconds from `insert` to each row's first and last token."""
    generator = _upstream.BatchGenerator(
        model, completion_batch_size=32, prefill_batch_size=32, stop_tokens=None
    )
    start = time.perf_counter()
    uids = generator.insert(prompts, max_tokens=[max_tokens] * len(prompts))
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    while len(last) < len(uids):
        _, responses = generator.next()
        now = time.perf_counter() - start
        for response in responses:
            first.setdefault(response.uid, now)
            if response.finish_reason is not None:
                last[response.uid] = now
    generator.close()
    return {"first": [first[uid] for uid in uids], "last": [last[uid] for uid in uids]}


def resume(model: Any, prompt: list[int], suffix: list[int]) -> dict[str, list[float]]:
    """Seconds to the first token after `suffix` on mlx-lm's own cache that holds `prompt`."""
    cache = make_prompt_cache(model)
    for start in range(0, len(prompt), _SLICE):
        model(mx.array(prompt[start : start + _SLICE])[None], cache=cache)
        mx.eval([layer.state for layer in cache])
    begun = time.perf_counter()
    next(_upstream.generate_step(mx.array(suffix), model, prompt_cache=cache, max_tokens=1))
    return {"first": [time.perf_counter() - begun]}


def main() -> None:
    """Load the model of argv, then answer one job a line until end of file.

    With `--formed` its layers choose their form as in a worker on a device that gains from it.
    """
    model = load(sys.argv[1])[0]
    if "--formed" in sys.argv:
        choose_forms(model)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if "resident" in job:
            times = resume(model, job["resident"], job["suffix"])
        else:
            times = run(model, job["prompts"], job["max_tokens"])
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
