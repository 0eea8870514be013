"""Settings: one file `hearth.toml`, then the environment, then flags; the last one wins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from runtime.types import SamplingParams, Struct

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Positive = Annotated[int, msgspec.Meta(gt=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ModelSettings(Struct, forbid_unknown_fields=True):
    """`[models.NAME]`: where a model comes from and how it is run.

    Exactly one of `path` (a directory) and `repo` (a repository in the Hugging Face cache), or
    neither when NAME is already a directory in `models_dir` or a cached repository.
    """

    path: Path | None = None
    repo: str | None = None
    aliases: tuple[str, ...] = ()
    context: Positive | None = None
    sampling: SamplingParams = SamplingParams()


class Settings(Struct, forbid_unknown_fields=True):
    """Everything that can be configured. Every key is also `HEARTH_` + the key in capitals.

    Times are seconds. `preload` names the models to load at boot; None means the default model.
    """

    home: Path
    host: str = "127.0.0.1"
    port: Port = 8420
    models_dir: Path | None = None
    default_model: str | None = None
    preload: tuple[str, ...] | None = None
    allow_download: bool = False
    aliases: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    models: dict[str, ModelSettings] = msgspec.field(default_factory=dict[str, ModelSettings])

    max_body_bytes: Positive = 64 * 1024 * 1024
    max_queue: Positive = 256
    max_choices: Positive = 16
    max_batch: Positive = 32
    request_deadline_s: Seconds = 600.0
    keep_alive_s: Seconds = 10.0
    wedge_timeout_s: Seconds = 60.0
    heartbeat_timeout_s: Seconds = 10.0
    load_timeout_s: Seconds = 600.0
    stop_timeout_s: Seconds = 30.0
    prefill_slice: Positive = 2048
    prefill_block_ms: Annotated[float, msgspec.Meta(ge=0)] = 250.0

    wired: Literal["off", "on"] = "off"
    cpu_blas: str = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"
