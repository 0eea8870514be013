"""The machine that figures were taken on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil

from runtime.environment import find_blas


class Environment(msgspec.Struct):
    """What a reader needs to judge the figures."""

    platform: str
    python: str
    cpu: str
    cores: int
    memory_gib: float
    blas: str
    load_before: list[float]
    versions: dict[str, str]
    gpu: str = ""
    """Its name, where NVIDIA's tool tells it; on a Mac the processor's name says it."""


def environment() -> Environment:
    """This machine, now."""
    blas = find_blas("auto")
    return Environment(
        platform=platform.platform(),
        python=platform.python_version(),
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 0,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        blas=blas.name if blas else "the platform's own",
        load_before=[round(load, 2) for load in os.getloadavg()],
        versions={name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm", "litestar")},
        gpu=_gpu_name(),
    )


def _gpu_name() -> str:
    """Every card in a line of its own, joined; empty without any."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
        return ", ".join(told.stdout.splitlines())
    return ""


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
