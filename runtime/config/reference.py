"""Every setting in a line: what `--help` says, and what the configuration reference is made from.

A default that depends on the machine is described here; others are in `runtime.config.settings`.
"""

from __future__ import annotations

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Files and directories", ("home", "models_dir", "models_dirs", "kv_dir", "log_file")),
    (
        "Models",
        (
            *("default_model", "preload", "aliases", "models", "allow_download"),
            *("model_keep_alive_s", "memory_budget", "memory_floor", "max_loaded_models"),
            *("spare_worker", "wired", "cpu_blas"),
        ),
    ),
    (
        "Network and access",
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
            *("max_batch", "max_choices", "keep_alive_s", "prefill_slice", "learn_slice_after_s"),
            *("prefill_block_ms", "decode_overlap", "limits", "prompt_rules", "own_rules"),
        ),
    ),
    (
        "The KV cache",
        (
            *(
                "kv_disk",
                "cache_max_bytes",
                "pinned_max_bytes",
                "hot_bytes",
                "kv_bits",
                "quantized_kv_start",
                "block_size",
                "kv_ttl_s",
            ),
            *("kv_daily_write_bytes", "kv_write_queue_bytes"),
            *("prewarm", "prewarm_learned", "prewarm_share"),
            *("cold_store", "cold_max_bytes", "cold_ttl_s"),
        ),
    ),
    ("Agents and stored responses", ("history_max_bytes", "history_ttl_s", "history_grace_s")),
    (
        "Timeouts for failures",
        ("load_timeout_s", "wedge_timeout_s", "heartbeat_timeout_s", "stop_timeout_s"),
    ),
    ("Logs and traces", ("log_level", "log_format", "otlp_endpoint")),
)

SETTINGS: dict[str, str] = {
    "home": "directory in which Hearth keeps everything (default: ~/.hearth)",
    "host": "address to listen on; with 127.0.0.1 only this machine can connect",
    "port": "port to listen on; 0 means any free one",
    "models_dir": "directory with models, one in each subdirectory or PUBLISHER/NAME",
    "models_dirs": "more such directories, of LM Studio for example; the first of a name wins",
    "default_model": "model for requests that name none",
    "preload": "models to load at start (default: the default model)",
    "allow_download": "download what `repo`, `default_model` or `preload` name and is not here "
    "yet, from the Hugging Face hub, when it is needed",
    "aliases": "more names for models: `[aliases]`, name = model",
    "models": "models under a name you choose, with settings: `[models.NAME]`, see below",
    "prompt_rules": "how prompts may be changed so that more of them is reused, see below",
    "own_rules": "lines of a system prompt that are read in another place: `[own_rules.NAME]`, "
    "see below",
    "api_keys": "API keys: `[api_keys]`, tenant = digest, as `hearth key` prints them",
    "admin_key": "digest of the key for /admin and the dashboard",
    "allow_remote": "allow a host that other machines can reach; needs a key too",
    "allowed_hosts": "more host names that requests may use for this server",
    "allowed_origins": "web pages (https://name:port) that may send requests, except to /admin",
    "send_timeout_s": "a client that stops in the middle of its request is disconnected after this",
    "max_connections": (
        "open connections; when all are taken, one that waits for its client is closed "
        "(default: half of the files that may be open, at most 1024)"
    ),
    "limits": "limits for one request, by kind of route: `[limits.KIND]`, see below",
    "max_body_bytes": "largest request body",
    "allow_remote_images": "fetch images from https addresses on the public internet",
    "max_new_images": "images in the last message, tools' results not counted",
    "max_queue": "requests that run or wait, at most",
    "max_queue_per_model": "the same for one model (default: max_queue)",
    "max_wait_s": "how long a request may wait for its model",
    "model_keep_alive_s": "unload a model after this long without use; 0: at once, negative: never",
    "max_choices": "largest n in a request",
    "max_batch": "requests that one model works on at a time",
    "memory_budget": (
        "bytes that all loaded models together may use (default: 85 % of an NVIDIA GPU's, "
        "else 65 % of the machine's memory)"
    ),
    "memory_floor": (
        "when fewer bytes are free on the machine, KV in memory shrinks, then idle models unload "
        "(default: 5 %, at least 1 GiB)"
    ),
    "max_loaded_models": "models that are loaded at a time (default: as many as fit)",
    "request_deadline_s": "how long a request may take in all; 0 sets no limit",
    "keep_alive_s": "how often a waiting stream sends a keep-alive",
    "wedge_timeout_s": "a worker that is busy without progress for this long is killed",
    "heartbeat_timeout_s": "a worker that does not respond for this long is killed",
    "load_timeout_s": "how long loading a model may take",
    "stop_timeout_s": "how long running requests may go on after the server was told to stop",
    "spare_worker": "keep a process ready for the next model, which takes about 150 MB",
    "prefill_slice": "tokens of a prompt that are read in one step (default: by device, and by "
    "model where that was found to be faster)",
    "learn_slice_after_s": "a model that has read long prompts is timed once, with slices of "
    "several lengths, after this long without requests; 0: never",
    "prefill_block_ms": "how long one step of a long prompt may pause running streams",
    "decode_overlap": "compute the next token while the last one is sent; false only to find out "
    "where time goes",
    "kv_disk": "keep KV on disk as well as in memory",
    "kv_dir": "directory of the KV on disk (default: kv in home)",
    "cache_max_bytes": "KV on disk, of all models (default: 100 GB, or a quarter of what is free)",
    "pinned_max_bytes": "KV on disk that one API key may pin with POST /v1/prewarm "
    "(default, and at most: half of cache_max_bytes, divided by the number of keys)",
    "hot_bytes": "KV in memory, of each model (default: a quarter of what its weights leave free)",
    "prewarm": "compute or restore known prompts before they are needed",
    "prewarm_learned": "how many beginnings that conversations share are read with each model",
    "prewarm_share": "share of hot_bytes that is filled with the latest KV when a model loads",
    "block_size": "tokens in a block, the unit in which prompts are matched",
    "kv_bits": "quantise the KV cache to 4 or 8 bits (default: the model's own precision)",
    "quantized_kv_start": "with kv_bits: leave the KV of a conversation as it is until it has so "
    "many tokens, rounded up to whole blocks, and quantise all of it then",
    "kv_write_queue_bytes": (
        "KV that may wait for the disk (default: a twentieth of the memory, 64 MiB to 2 GiB)"
    ),
    "kv_daily_write_bytes": "most written in a day; then only what requests and settings pin",
    "kv_ttl_s": "delete KV on disk after this long without use; 0: write none (default: 14 days)",
    "cold_store": "directory or s3:// address where KV moves after kv_ttl_s; for one home only",
    "cold_max_bytes": "KV in the cold store",
    "cold_ttl_s": "delete KV in the cold store after this long without use",
    "history_max_bytes": "space for agents and stored responses on disk",
    "history_ttl_s": "they expire after this long without use",
    "history_grace_s": "what expired can be restored for this long, then it is erased; 0: at once",
    "wired": "let mlx wire as much memory as macOS recommends",
    "cpu_blas": "math library (BLAS) for Linux CPUs: auto, off or the path of one",
    "log_level": "debug, info, warning or error",
    "log_format": "console or json",
    "log_file": "log to this file instead of stderr; it is rotated",
    "otlp_endpoint": "send traces here, over OTLP/HTTP",
}

LIMITS: dict[str, str] = {
    "body_bytes": "largest body without images (default: max_body_bytes, which applies as well)",
    "depth": "how deeply JSON may be nested",
    "parts": "lists, objects, field names, texts, and eighths of numbers and backslashes in a body",
    "time_s": "how long until the answer begins",
    "prompt_tokens": "longest prompt (default: the model's context)",
    "output_tokens": "longest answer, whatever the request says (default: the rest of the context)",
}

LIMITED: dict[str, str] = {
    "generate": (
        "Routes of every API that answer prompts or count their tokens, and `/generate` of "
        "agents. Here `time_s` is for the whole answer, which is cut off then (default: "
        "`request_deadline_s`, which applies as well)."
    ),
    "embed": "Embeddings, `/tokenize` and `/detokenize`. `request_deadline_s` applies as well.",
    "prewarm": "`/v1/prewarm`, which answers before the prompt was computed.",
    "history": "Agents and stored responses, except generating.",
    "admin": "`/admin` and `/running`. There is no time limit for loading and verifying.",
    "read": "Everything else: models, health, metrics, the dashboard's page.",
}

MODEL: dict[str, str] = {
    "path": "directory of the model; or",
    "repo": "its repository in the Hugging Face cache; leave out both if NAME is one of these",
    "aliases": "more names",
    "context": "longest conversation in tokens (default: the model's own limit)",
    "kv_bits": "as above, for this model",
    "quantized_kv_start": "as above, for this model",
    "kv_ttl_s": "as above, for this model",
    "keep_alive_s": "as model_keep_alive_s, for this model",
    "pinned": "loaded at start and never unloaded",
    "prewarm": "prompts to compute in advance: texts, files in home, or tables of system and tools",
    "priority": "priority of requests that set none: interactive, default or background",
    "thinking": "whether it thinks when a request does not say (default: the template's own; "
    "off in Anthropic's API)",
    "overflow": "what happens to a conversation that is too long: refuse (a 400), "
    "drop_oldest_turns or summarise (default: refuse)",
    "max_tokens": "longest answer when a request does not say (default: what fits; 16 in "
    "`/v1/completions`, as OpenAI's API has it)",
    "template": "arguments for its chat template, such as `preserve_thinking`: "
    "`[models.NAME.template]`; those of a request (`chat_template_kwargs`) win",
    "chat_template": "file with a chat template that counts instead of the model's own",
    "sampling": "used when a request does not set it: `[models.NAME.sampling]`",
    "prompt_rules": "as above, for this model: `[models.NAME.prompt_rules]`",
    "speculation": "guess what is copied from the prompt, where that is faster: auto or off",
    "draft": "name of a smaller model with the same tokenizer, loaded beside it, that guesses what "
    "it says next",
    "vision": "false: a vision model is used for text only",
    "ranks": "processes over which the model is split",
    "hosts": "their machines, if there are several: one for each rank, this one first",
    "backend": "how they communicate: ring, nccl, jaccl or jaccl-ring (default: nccl on CUDA, "
    "else ring; only ring was tested)",
    "split": "tensor: parts of every layer, or pipeline: some layers each (default: as it can)",
}

EVERY = (
    "Defaults for all models, also those that have no table of their own. A model's own table "
    "wins, key by key, also inside `sampling`, `template` and `prompt_rules`. `context` is an "
    "upper bound here: a model whose own is shorter keeps that. The quotes are needed, "
    "`[models.*]` is not valid TOML."
)

OWN_RULE: dict[str, str] = {
    "client": "the program whose requests it is for, as its headers tell it; `*`: all",
    "begins": "how the line begins, to the letter; the whole line is moved",
    "to": "last: behind everything, first: before everything",
}

PROMPT_RULES: dict[str, str] = {
    "billing_header": "remove the billing line that Claude Code puts first",
    "system_first": "read Claude Code's system text after the first words of its user before them",
    "moved_fields": "read the fields of OpenClaw's system prompt that change at each request last",
    "tools_first": "put tools before the system prompt, where the template allows",
    "healed_turn": "use the generated tokens when a client sends an answer back reformatted",
    "kept_tools": "show a conversation's tools also to a request that goes on without them",
}
