"""The process that exchanges KV with stock mlx-lm, from outside: mlx is never imported here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

import msgspec

from runtime.environment import worker_environment
from runtime.errors import InterchangeFailed
from runtime.mlx_lm_exchange import Job, Outcome, SpaceWanted
from runtime.progress import Progress, Watch, unwatched


@contextmanager
def done(
    job: Job,
    cpu_blas: str,
    watch: Watch = unwatched,
    reserve: Callable[[int], bool] = lambda _: False,
) -> Generator[Outcome]:
    """Do a job; what it staged stays as long as the block lasts.

    `reserve` says whether there is room for the bytes it is about to write.

    Raises:
        InterchangeFailed: it could not be done.
    """
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "runtime.worker.interchange"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=worker_environment(cpu_blas),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        process.stdin.flush()
        outcome: Outcome | None = None
        for line in iter(process.stdout.readline, b""):
            told = msgspec.json.decode(line, type=Progress | SpaceWanted | Outcome)
            if isinstance(told, Outcome):
                outcome = told
                break
            if isinstance(told, Progress):
                watch(told)
                continue
            process.stdin.write(msgspec.json.encode(reserve(told.num_bytes)) + b"\n")
            process.stdin.flush()
        if outcome is None:
            last = process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
            raise InterchangeFailed(f"The conversion ended without a result: {' '.join(last)}")
        if outcome.error is not None:
            process.stdin.close()
            raise InterchangeFailed(f"{job.file} cannot be exchanged: {outcome.error}.", "file")
        yield outcome
