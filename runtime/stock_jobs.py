"""Exchanging KV with stock mlx-lm, in a process of its own: what it is told and what it answers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager

import msgspec

from runtime.blas import blas_environment
from runtime.errors import InterchangeFailed
from runtime.types import ModelSpec
from runtime.wire import SlotStaged


class Export(msgspec.Struct, frozen=True, tag="export"):
    """Write the slots at `paths`, each up to a position, to `file`, for `model` at `model_path`."""

    file: str
    paths: tuple[str, ...]
    leaves: tuple[int, ...]
    model: str
    model_path: str


class Import(msgspec.Struct, frozen=True, tag="import", kw_only=True):
    """Stage what `file` holds as slots of a model in the store at `root`."""

    file: str
    spec: ModelSpec
    model_hash: bytes
    secret: bytes
    root: str
    block_size: int
    kv_bits: int | None = None
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None


Job = Export | Import


class Outcome(msgspec.Struct, frozen=True):
    """How many tokens were exchanged, the slots that were staged, and why it failed, if it did."""

    num_tokens: int
    slots: tuple[SlotStaged, ...] = ()
    error: str | None = None


@contextmanager
def done(job: Job, cpu_blas: str) -> Generator[Outcome]:
    """Do a job; what it staged stays as long as the block lasts.

    Raises:
        InterchangeFailed: it could not be done.
    """
    environment = dict(os.environ) | blas_environment(cpu_blas, os.environ)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "runtime.worker.interchange"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment | {"HF_HUB_OFFLINE": "1"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            last = process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
            raise InterchangeFailed(f"The conversion ended without a result: {' '.join(last)}")
        outcome = msgspec.json.decode(line, type=Outcome)
        if outcome.error is not None:
            process.stdin.close()
            raise InterchangeFailed(f"{job.file} cannot be exchanged: {outcome.error}.", "file")
        yield outcome
