"""Every setting in a line: what `--help` says, and what the configuration reference is made from.

A default that depends on the machine is told here; the others are those of `runtime.settings`.
"""

from __future__ import annotations

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Where things are", ("home", "models_dir", "kv_dir", "log_file")),
    (
        "Models",
        (
            *("default_model", "preload", "aliases", "models", "allow_download"),
            *("model_keep_alive_s", "memory_budget", "memory_floor", "max_loaded_models"),
            *("spare_worker", "wired", "cpu_blas"),
        ),
    ),
    (
        "Who may ask, and from where",
        (
            *("host", "port", "allow_remote", "api_keys", "admin_key"),
            *("allowed_hosts", "allowed_origins", "send_timeout_s", "max_body_bytes"),
            "max_connections",
            *("allow_remote_images", "max_new_images"),
        ),
    ),
    (
        "Requests",
        (
            *("max_queue", "max_queue_per_model", "max_wait_s", "request_deadline_s"),
            *("max_batch", "max_choices", "keep_alive_s", "prefill_slice", "prefill_block_ms"),
            *("limits", "prompt_rules"),
        ),
    ),
    (
        "The KV cache",
        (
            *("kv_disk", "cache_max_bytes", "hot_bytes", "kv_bits", "block_size", "kv_ttl_s"),
            *("kv_daily_write_bytes", "kv_write_queue_bytes"),
            *("prewarm", "prewarm_learned", "prewarm_share"),
            *("cold_store", "cold_max_bytes", "cold_ttl_s"),
        ),
    ),
    ("What the server remembers", ("history_max_bytes", "history_ttl_s", "history_grace_s")),
    (
        "When something is wrong",
        ("load_timeout_s", "wedge_timeout_s", "heartbeat_timeout_s", "stop_timeout_s"),
    ),
    ("What is told", ("log_level", "log_format", "otlp_endpoint")),
)

SETTINGS: dict[str, str] = {
    "home": "directory of everything Hearth keeps (default: ~/.hearth)",
    "host": "address to listen on; 127.0.0.1 is this machine only",
    "port": "port to listen on; 0 takes any free one",
    "models_dir": "directory whose subdirectories are models",
    "default_model": "model for requests that name none",
    "preload": "models to load at boot (default: the default model)",
    "allow_download": "fetch a repository from the Hugging Face hub when a request names it",
    "aliases": "further names of models: `[aliases]`, name = model",
    "models": "models by a name of your own: `[models.NAME]`, see below",
    "prompt_rules": "what may be done to prompts so that they stay cacheable, see below",
    "api_keys": "keys that may ask: `[api_keys]`, tenant = digest, as `hearth key` makes them",
    "admin_key": "digest of the key that opens /admin",
    "allow_remote": "allow a host that other machines reach; needs a key too",
    "allowed_hosts": "further names by which this server may be asked",
    "allowed_origins": "web pages (https://name:port) that may ask this server, /admin aside",
    "send_timeout_s": "a client that stops sending its request is cut off after this",
    "max_connections": (
        "connections at a time; those that wait for their client make room for others "
        "(default: half of the files that may be open, at most 1024)"
    ),
    "limits": "what a request may cost, by the kind of its route: `[limits.KIND]`, see below",
    "max_body_bytes": "the longest request that is read",
    "allow_remote_images": "fetch images of https addresses on the public internet",
    "max_new_images": "images after the last answer that a request may have",
    "max_queue": "requests that may be open at a time",
    "max_queue_per_model": "the same of one model (default: as many as in all)",
    "max_wait_s": "the longest that a request waits for its model",
    "model_keep_alive_s": "unload a model after so long without use; 0 at once, negative never",
    "max_choices": "the largest n of a request",
    "max_batch": "requests that one model computes at a time",
    "memory_budget": (
        "bytes that all loaded models may reserve (default: 85 % of what the device recommends, "
        "or 65 % of the machine's memory)"
    ),
    "memory_floor": (
        "with fewer bytes available on the machine hot tiers shrink, then idle models leave "
        "(default: 5 %, at least 1 GiB)"
    ),
    "max_loaded_models": "models loaded at a time (default: as many as fit)",
    "request_deadline_s": "the longest that a request may take in all",
    "keep_alive_s": "a stream that waits shows a sign of life this often",
    "wedge_timeout_s": "a worker that is busy and makes no progress for so long is ended",
    "heartbeat_timeout_s": "a worker that says nothing for so long is ended",
    "load_timeout_s": "the longest that loading a model may take",
    "stop_timeout_s": "how long running requests may go on when the server is to stop",
    "spare_worker": "keep a process with its imports done for the next model (about 150 MB)",
    "prefill_slice": "tokens of a prompt that are computed in one piece (default: by device)",
    "prefill_block_ms": "how long a piece of a long prompt may hold up running streams",
    "kv_disk": "keep KV on disk too",
    "kv_dir": "where KV lies on disk (default: kv in home)",
    "cache_max_bytes": "KV on the fast disk (default: 100 GB, or a quarter of what is free)",
    "hot_bytes": "KV in memory, of each model (default: a quarter of what its weights leave)",
    "prewarm": "compute or restore known prefixes before they are asked",
    "prewarm_learned": "how many often used prefixes a model learns by itself",
    "prewarm_share": "share of the hot tier that is filled after a load with what was used last",
    "block_size": "unit of matching, in tokens",
    "kv_bits": "quantise live KV to 4 or 8 bits (default: the model's own precision)",
    "kv_write_queue_bytes": (
        "KV that may wait to be written (default: a twentieth of the memory, 64 MiB to 2 GiB)"
    ),
    "kv_daily_write_bytes": "after so much in a day only pinned KV is written",
    "kv_ttl_s": "unused KV leaves the disk after this, 0 writes nothing (default: a day)",
    "cold_store": "directory or s3:// address, of one home, where KV moves when its time is over",
    "cold_max_bytes": "KV in the cold store",
    "cold_ttl_s": "unused KV leaves the cold store after this",
    "history_max_bytes": "agents and stored responses on disk",
    "history_ttl_s": "what was stored expires after so long without use",
    "history_grace_s": "what expired can be restored for so long, then it is erased; 0: at once",
    "wired": "let mlx wire the whole recommended working set (macOS)",
    "cpu_blas": "BLAS for CPU workers on Linux: auto, off or a library's path",
    "log_level": "debug, info, warning or error",
    "log_format": "console or json",
    "log_file": "log to this file, which rotates, instead of stderr",
    "otlp_endpoint": "send traces here, over OTLP/HTTP",
}

LIMITS: dict[str, str] = {
    "body_bytes": "the longest body, before images (default: max_body_bytes, which holds as well)",
    "depth": "how deeply JSON may be nested",
    "time_s": "the longest until the answer begins",
    "prompt_tokens": "the longest prompt (default: the model's context)",
    "output_tokens": "the longest answer, whatever is asked for (default: the context's rest)",
}

LIMITED: dict[str, str] = {
    "generate": (
        "What answers prompts or counts their tokens, in every protocol, and `/generate` of "
        "agents. `time_s` is for the whole answer, which ends there (default: "
        "`request_deadline_s`, which holds as well)."
    ),
    "embed": "Embeddings, `/tokenize` and `/detokenize`. `request_deadline_s` holds as well.",
    "prewarm": "`/v1/prewarm`, which answers before the prompt is warm.",
    "history": "Agents and stored responses, apart from generating.",
    "admin": "`/admin` and `/running`; loading and verifying take as long as they take.",
    "read": "Everything else: models, health, metrics, the dashboard's page.",
}

MODEL: dict[str, str] = {
    "path": "its directory; or",
    "repo": "its repository in the Hugging Face cache; neither if NAME already is one of these",
    "aliases": "further names",
    "context": "the longest conversation in tokens (default: the model's own)",
    "kv_bits": "as above, for this model",
    "kv_ttl_s": "as above, for this model",
    "keep_alive_s": "as model_keep_alive_s, for this model",
    "pinned": "loaded at boot, and stays",
    "prewarm": "prefixes to be warm: texts, files in home, or tables of system and tools",
    "priority": "of its requests that name none: interactive, default or background",
    "sampling": "what applies when a request does not say: `[models.NAME.sampling]`",
    "prompt_rules": "as above, for this model: `[models.NAME.prompt_rules]`",
    "vision": "false: a model that could see reads text only",
    "ranks": "processes that compute it together",
    "hosts": "one for each rank, if they are on several machines; the first is this one",
    "backend": "what they speak over: ring, nccl, jaccl or jaccl-ring (default: nccl on CUDA, "
    "else ring; only ring was measured)",
    "split": "tensor (parts of every layer) or pipeline (some layers each); default: as it can",
}

PROMPT_RULES: dict[str, str] = {
    "billing_header": "strip the billing line that Claude Code puts first",
    "cch_nonce": "strip the nonce of that line",
    "current_date": "move a line with the date from the early prompt to its end",
    "current_time": "move a line with the time",
    "git_status": "move the state of the working tree",
    "message_id": "move ids of messages",
    "run_stats": "move figures of the run",
    "tools_first": "write tools before the system text, where the template allows",
    "healed_turn": "put back the tokens of a generated turn that a client gives back changed",
}
