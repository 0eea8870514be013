"""The opponent: mlx-lm's BatchGenerator in a bare loop, driven by JSON lines on stdin."""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from mlx_lm.utils import load

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


def main() -> None:
    """Load the model of argv, then answer {"prompts", "max_tokens"} lines until end of file."""
    model = load(sys.argv[1])[0]
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(run(model, job["prompts"], job["max_tokens"])), flush=True)


if __name__ == "__main__":
    main()
