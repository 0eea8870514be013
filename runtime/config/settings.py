"""Settings: one file `hearth.toml`, then the environment, then flags; the last one wins."""

from __future__ import annotations

import json
import math
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import astuple

from runtime.config.limits import Bytes, LimitSettings, Positive, Seconds, Tokens
from runtime.config.tables import (
    QUANTITY,
    KeyPath,
    Location,
    Origin,
    as_table,
    convert_table,
    kinds_of,
    places_of,
)
from runtime.config.units import MILLISECONDS, TIME, TOKENS
from runtime.errors import SettingsError
from runtime.prompt.thinking import SWITCHES
from runtime.ranks import LOOPBACK, KvForm, Ranks, Split, backend_problem
from runtime.types import (
    MAX_IMAGE_BYTES,
    OWN_KWARGS,
    LineRule,
    Overflow,
    Priority,
    SamplingParams,
    Struct,
)

_REPO_URL = re.compile(r"(?:https?://[^/]+/|(?:www\.)?huggingface\.co/|hf\.co/)([^/?#]+/[^/?#]+)")
"""The first two parts of a path are the repository's name; what follows is a branch or a file."""


class PromptSwitches(Struct, frozen=True, forbid_unknown_fields=True):
    """`[prompt_rules]`: what may be done to prompts so that they stay cacheable; all is on.

    `billing_header` strips Claude Code's telemetry from its system prompt, `system_first` reads
    what it tells every session before its user's first words, and `moved_fields` reads what
    OpenClaw says anew at each request behind all else. `tools_first` writes
    tools before the system text where the template allows. `healed_turn` puts the tokens of
    generated turns back. `kept_tools` shows a conversation's tools to a request that goes on
    without them, in the spelling that it began with.
    """

    billing_header: bool | None = None
    system_first: bool | None = None
    moved_fields: bool | None = None
    tools_first: bool | None = None
    healed_turn: bool | None = None
    kept_tools: bool | None = None


Family = Literal[
    "*",
    "ai-sdk",
    "aider",
    "anthropic-sdk",
    "claude-code",
    "cline",
    "codex",
    "litellm",
    "ollama",
    "open-webui",
    "openai-sdk",
    "openclaw",
    "opencode",
    "pi",
    "qwen-code",
]
"""Programs as their headers tell them apart, or all of them."""


class OwnRule(Struct, frozen=True, forbid_unknown_fields=True):
    """`[own_rules.NAME]`: whole lines of a client's system prompt that are read in another place.

    They are those that begin with `begins`, to the letter.
    """

    client: Family = "*"
    begins: Annotated[str, Meta(max_length=200)] = ""
    to: Literal["first", "last"] = "last"

    def __post_init__(self) -> None:
        if "\n" in self.begins or not self.begins.strip():
            raise ValueError("begins must be the beginning of one line, and not blank")


def switched_off(own: PromptSwitches, shared: PromptSwitches) -> tuple[str, ...]:
    """What is off for a model: by its own word, or else by that for all."""
    given = zip(own.__struct_fields__, astuple(own), astuple(shared), strict=True)
    return tuple(
        name for name, ours, theirs in given if (ours if ours is not None else theirs) is False
    )


Port = Annotated[int, Meta(ge=0, le=65535)]
LEAST_MODEL_BYTES = 512 << 20
"""What `runtime.supervisor.placement` reserves for a model without any weights."""

MAX_KEEP_ALIVE_S = 10 * 365 * 86_400
SecondsOrOff = Annotated[float, Meta(ge=0, le=365 * 86_400, extra={QUANTITY: TIME})]
KeepAlive = Annotated[float, Meta(ge=-1e9, le=MAX_KEEP_ALIVE_S, extra={QUANTITY: TIME})]
Lifetime = Annotated[float, Meta(ge=0, le=10 * 365 * 86_400, extra={QUANTITY: TIME})]
Milliseconds = Annotated[float, Meta(ge=0, le=3_600_000, extra={QUANTITY: MILLISECONDS})]
EVERY_MODEL = "*"
"""The name of the table in `[models]` whose values every model has that gives none itself."""

KvBits = Annotated[int, Meta(ge=4, le=8, multiple_of=4)]
KvStart = Annotated[int, Meta(ge=0, le=2**31 - 1, extra={QUANTITY: TOKENS})]


class SamplingSettings(SamplingParams, frozen=True, forbid_unknown_fields=True):
    """`[models.NAME.sampling]`: what applies when a request does not say."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    repetition_context_size: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None


class PrewarmSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """A prefix to be warm: a system prompt and tools, written as Anthropic's requests have them."""

    system: str = ""
    tools: tuple[dict[str, object], ...] = ()


class ModelDefaults(Struct, frozen=True, forbid_unknown_fields=True):
    """`[models."*"]`: of every model that does not say otherwise itself.

    `keep_alive_s` is how long it stays loaded unused (0: not at all, negative: for ever).
    `priority` is that of its requests that name none; `thinking`, `max_tokens` and the arguments
    of its chat `template` hold for those that do not say. `overflow` is what is done with a
    conversation that no longer fits. Without `vision` a model that could see reads text only. With
    `speculation` "auto" rows propose what they say next where that was measured to pay.
    """

    context: Tokens | None = None
    kv_bits: KvBits | None = None
    quantized_kv_start: KvStart | None = None
    kv_ttl_s: Lifetime | None = None
    keep_alive_s: KeepAlive | None = None
    priority: Priority | None = None
    thinking: bool | None = None
    overflow: Overflow | None = None
    max_tokens: Tokens | None = None
    template: dict[str, object] = msgspec.field(default_factory=dict[str, object])
    sampling: SamplingSettings = SamplingSettings()
    prompt_rules: PromptSwitches = PromptSwitches()
    vision: bool = True
    speculation: Literal["auto", "off"] = "off"


def repo_of_url(text: str) -> str | None:
    """`ORGANISATION/NAME`, where a text is the address of a repository; None where it is none."""
    found = _REPO_URL.match(text)
    return found[1] if found is not None else None


class ModelSettings(ModelDefaults, frozen=True, forbid_unknown_fields=True):
    """`[models.NAME]`: where a model comes from and how it is run.

    Exactly one of `path` (a directory) and `repo` (a repository in the Hugging Face cache), or
    neither when NAME is already a directory in `models_dir` or a cached repository.
    A `pinned` one is loaded at boot and stays.
    `ranks` processes compute it together, all on this machine or each on its one of `hosts`, the
    first being this machine as the others reach it; where they are on several, KV stays in memory.
    They speak over `backend`, and `split` says what is shared out. A `draft` is the name of a
    smaller model that is loaded beside it and guesses what it says next; `speculation` is on then.
    `chat_template` is a file with a template that counts instead of the model's own.
    """

    path: Path | None = None
    repo: str | None = None
    aliases: tuple[str, ...] = ()
    chat_template: Path | None = None
    draft: str | None = None
    pinned: bool = False
    prewarm: tuple[str | PrewarmSettings, ...] = ()
    ranks: Annotated[int, Meta(ge=1, le=64)] = 1
    hosts: tuple[str, ...] = ()

    backend: str | None = None
    split: Split | None = None

    @property
    def speculates(self) -> bool:
        """Its rows may propose what they say next."""
        return self.draft is not None or self.speculation == "auto"

    @property
    def together(self) -> Ranks | None:
        """Its ranks, where there are several."""
        if self.ranks == 1:
            return None
        hosts = self.hosts or (LOOPBACK,) * self.ranks
        return Ranks(hosts=hosts, backend=self.backend, split=self.split)

    @property
    def num_ranks_here(self) -> int:
        """How many of the ranks are processes of this machine."""
        return self.together.num_here if self.together is not None else 1

    def __post_init__(self) -> None:
        if self.hosts and len(self.hosts) != self.ranks:
            raise ValueError(f"ranks = {self.ranks} needs one of hosts each, or no hosts at all")
        if self.draft is not None and self.ranks > 1:
            raise ValueError("a model that ranks share cannot have a draft; leave draft out for it")
        if problem := backend_problem(self.backend):
            raise ValueError(problem)
        if self.repo is not None and (repo := repo_of_url(self.repo)) is not None:
            raise ValueError(f'repo is an address: write its name only, repo = "{repo}"')
        if self.path is not None and self.repo is not None:
            raise ValueError("path and repo exclude each other; keep one of them")


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that can be configured. Every key but the tables is also `HEARTH_` + the key.

    Here times are seconds and sizes bytes; where they are written they may have other units.
    `prefill_slice` is in tokens; None lets the device decide, and for each model what was timed
    there once, after nobody asked for anything for `learn_slice_after_s` (0: never). Without
    `decode_overlap`, which is for finding out where time goes, a step is done before its tokens
    are handled. `preload` names the models to load at boot; None means the default model. With
    `spare_worker` a process waits for the next model, unless memory is tight (about 150 MB).

    All loaded models together reserve `memory_budget` bytes at most; None means 65 % of the
    machine's memory, or 85 % of an NVIDIA GPU's. At most `max_loaded_models` are loaded
    at a time; None leaves that to the memory. When less than `memory_floor` bytes of the machine
    are available (5 %, or 1 GiB) hot tiers shrink, then idle models leave, then requests wait.

    A request waits `max_wait_s` for its model at most. `max_queue` requests may be open, of one
    model `max_queue_per_model` (None: as many as in all). A model that nobody uses for
    `model_keep_alive_s` is unloaded (0: at once, negative: never).

    Who may ask. `[api_keys]` maps a tenant's name to the digest of its key, `admin_key` is one for
    /admin; `hearth key` makes both. Without keys only this machine can ask. A `host` that others
    can reach needs `allow_remote` and a key. `allowed_hosts` are further names of this server,
    `allowed_origins` the web pages (`https://name:port`) that may ask it. A client that does not
    go on sending its request for `send_timeout_s` is cut off. Of `max_connections` (half of the
    files that may be open, at most 1024) those that wait for their client make room for others.
    `limits` bound requests by the kind of their route, within what holds for all of them.

    Of the images in a request at most `max_new_images` may be new, that is in its last message;
    a model that sees is sent bodies that are larger by as many. Only with `allow_remote_images` are
    images fetched from https addresses on the public internet.

    The KV cache. `kv_disk = false` keeps KV in memory only, else it lies in `kv_dir` (`kv` in
    `home`) and takes `cache_max_bytes` there at most (100 GB, or a quarter of what is free), of
    which each tenant may pin `pinned_max_bytes` (half of it, divided by the number of keys). A
    model keeps `hot_bytes` in memory (a quarter of what its weights leave), of which a share of
    `prewarm_share` is filled after a load with what was used last. With `prewarm` the prefixes
    that `prewarm` of a model has (texts, files in `home`, tables of system and tools) are made
    warm as well, and of those that conversations on disk share up to `prewarm_learned`.
    `block_size` is the unit of matching in tokens. `kv_bits` (4 or 8, also per model) quantises
    live KV; None keeps the model's own dtype. All of a conversation's is, once it has
    `quantized_kv_start` tokens (also per model), rounded up to a whole block. At most
    `kv_write_queue_bytes` wait to be written, and after `kv_daily_write_bytes` in a day only
    pinned KV is. Unused KV leaves the disk after `kv_ttl_s` unless the request says; 0 writes
    nothing. It moves to `cold_store` (a directory or an `s3://` address) where there is one, which
    may take `cold_max_bytes`, for `cold_ttl_s`.

    What clients ask the server to remember lies in `history.sqlite3` in `home`. It takes
    `history_max_bytes` at most, and expires when it was not used for `history_ttl_s`; for
    `history_grace_s` more `hearth history restore` brings it back, then it is erased.

    Traces of requests, without their text, go to `otlp_endpoint` (OTLP over HTTP) if it is set.
    """

    home: Path
    host: str = "127.0.0.1"
    port: Port = 8420
    models_dir: Path | None = None
    models_dirs: tuple[Path, ...] = ()
    default_model: str | None = None
    preload: tuple[str, ...] | None = None
    allow_download: bool = False
    aliases: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    models: dict[str, ModelSettings] = msgspec.field(default_factory=dict[str, ModelSettings])
    prompt_rules: PromptSwitches = PromptSwitches()
    own_rules: dict[str, OwnRule] = msgspec.field(default_factory=dict[str, OwnRule])

    api_keys: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    admin_key: str | None = None
    allow_remote: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    send_timeout_s: Seconds = 30.0
    max_connections: Positive | None = None

    limits: LimitSettings = LimitSettings()
    max_body_bytes: Bytes = 16 * 1024 * 1024
    allow_remote_images: bool = False
    max_new_images: Positive = 4
    max_queue: Positive = 256
    max_queue_per_model: Positive | None = None
    max_wait_s: Seconds = 600.0
    model_keep_alive_s: KeepAlive = 900.0
    max_choices: Positive = 16
    max_batch: Positive = 32
    memory_budget: Bytes | None = None
    memory_floor: Bytes | None = None
    max_loaded_models: Positive | None = None
    request_deadline_s: SecondsOrOff = 600.0
    keep_alive_s: Seconds = 10.0
    wedge_timeout_s: Seconds = 60.0
    heartbeat_timeout_s: Seconds = 10.0
    load_timeout_s: Seconds = 600.0
    stop_timeout_s: Seconds = 30.0
    spare_worker: bool = True
    prefill_slice: Tokens | None = None
    learn_slice_after_s: Lifetime = 10.0
    prefill_block_ms: Milliseconds = 250.0
    decode_overlap: bool = True

    kv_disk: bool = True
    kv_dir: Path | None = None
    cache_max_bytes: Bytes | None = None
    pinned_max_bytes: Bytes | None = None
    hot_bytes: Bytes | None = None
    prewarm: bool = True
    prewarm_learned: Annotated[int, Meta(ge=0, le=1000)] = 8
    prewarm_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    block_size: Annotated[int, Meta(ge=16, le=4096, extra={QUANTITY: TOKENS})] = 256
    kv_bits: KvBits | None = None
    quantized_kv_start: KvStart = 0
    kv_write_queue_bytes: Bytes | None = None
    kv_daily_write_bytes: Bytes = 50_000_000_000
    kv_ttl_s: Lifetime | None = None
    cold_store: Location | None = None
    cold_max_bytes: Bytes = 100_000_000_000
    cold_ttl_s: Lifetime = 30 * 86_400.0
    history_max_bytes: Bytes = 4_000_000_000
    history_ttl_s: Seconds = 30 * 86_400.0
    history_grace_s: Lifetime = 7 * 86_400.0

    wired: Literal["off", "on"] = "off"
    cpu_blas: str = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"
    log_file: Path | None = None
    otlp_endpoint: Annotated[str, Meta(pattern="^https?://")] | None = None

    @property
    def named_models(self) -> dict[str, ModelSettings]:
        """Those of `[models.NAME]`, without the defaults of all."""
        return {name: own for name, own in self.models.items() if name != EVERY_MODEL}

    @property
    def most_context(self) -> int | None:
        """The longest conversation in tokens of models that have no `context` of their own."""
        return self.models.get(EVERY_MODEL, ModelSettings()).context

    def model(self, name: str) -> ModelSettings:
        """What is said of this model, or else of all, but for `most_context`."""
        if (own := self.models.get(name)) is not None:
            return own
        every = self.models.get(EVERY_MODEL, ModelSettings())
        return msgspec.structs.replace(every, context=None)

    def kv_form_of(self, model: str) -> KvForm:
        """How this model's KV is kept."""
        own = self.model(model)
        kv_bits, start = own.kv_bits or self.kv_bits, own.quantized_kv_start
        start = self.quantized_kv_start if start is None else start
        start += -start % self.block_size
        return KvForm(kv_bits, own.ranks, own.split, start if kv_bits is not None else 0)

    def kv_ttl_of(self, model: str) -> float | None:
        """Seconds that unused KV of this model stays on disk; None leaves it to the store."""
        own_s = self.model(model).kv_ttl_s
        return self.kv_ttl_s if own_s is None else own_s

    def prompt_rules_off(self, model: str) -> tuple[str, ...]:
        """What is not done to the prompts of this model."""
        return switched_off(self.model(model).prompt_rules, self.prompt_rules)

    def own_rules_for(self, client: str) -> tuple[LineRule, ...]:
        """The owner's rules for requests of this family of clients, in their order."""
        return tuple(
            LineRule(name=f"own_rules.{name}", begins=rule.begins, to=rule.to)
            for name, rule in self.own_rules.items()
            if rule.client in ("*", client)
        )

    def keep_alive_of(self, model: str) -> float:
        """Seconds that this model stays loaded unused; negative is for ever."""
        own_s = self.model(model).keep_alive_s
        return self.model_keep_alive_s if own_s is None else own_s

    @property
    def deadline_s(self) -> float:
        """Seconds that a request may take in all; infinite where no limit is set."""
        return self.request_deadline_s or math.inf

    @property
    def max_image_body_bytes(self) -> int:
        """What a body for a model that sees may have: as many images more, in base64."""
        return self.max_body_bytes + self.max_new_images * MAX_IMAGE_BYTES * 4 // 3

    @property
    def kv_root(self) -> Path:
        """Where KV lies on disk."""
        return self.kv_dir or self.home / "kv"


def load_settings(flags: Mapping[str, str], environ: Mapping[str, str]) -> Settings:
    """The settings that file, environment and flags give together. Creates nothing.

    `flags` holds the given flags by key (`models_dir`, not `--models-dir`) and may name the file
    as `config`; in `environ` that is `HEARTH_CONFIG`. An empty variable counts as unset.

    Raises:
        SettingsError: an unknown key, an unusable value, names that contradict each other, or a
            file that cannot be read.
    """
    user_home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    given = _read_variables(environ, user_home) | _read_flags(flags, user_home)
    defaults = Settings(home=user_home / ".hearth")
    config = given.pop("config", None)
    if isinstance(config, Path):
        found = _read_file(config, user_home, is_required=True)
    else:
        file = Path(str(given.get("home", defaults.home))) / "hearth.toml"
        found = _read_file(file, user_home, is_required=False)
        if "home" in found:
            raise SettingsError(
                f"home cannot be set in {file}, which is found through it. "
                "Use HEARTH_HOME or --home, or name the file with --config."
            )
    settings = msgspec.structs.replace(defaults, **found | given)
    _check_memory(settings.memory_budget)
    _check_aliases(settings)
    _check_kv_start(settings)
    _check_templates(settings)
    return settings


def check_places(settings: Settings) -> None:
    """That the directories are there without which no server is started.

    Raises:
        SettingsError: `models_dir`, or one of `models_dirs`, is none.
    """
    if (folder := settings.models_dir) is not None and (why := why_no_directory(folder)):
        raise SettingsError(f"models_dir is {folder}, which {why}. Create it, or correct the key.")
    for folder in settings.models_dirs:
        if (why := why_no_directory(folder)) is not None:
            raise SettingsError(f"models_dirs has {folder}, which {why}. Create it, or remove it.")


def why_no_directory(path: Path) -> str | None:
    """What is wrong with a path that is to be a directory's, as the rest of a sentence."""
    try:
        return None if stat.S_ISDIR(path.stat().st_mode) else "is no directory"
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _check_memory(budget_bytes: int | None) -> None:
    if budget_bytes is not None and budget_bytes < LEAST_MODEL_BYTES:
        least_mib = LEAST_MODEL_BYTES >> 20
        raise SettingsError(
            f"memory_budget is {budget_bytes} bytes, and the smallest model needs {least_mib} MiB. "
            'Give it with its unit, such as "24GB", or leave it out.'
        )


def _check_kv_start(settings: Settings) -> None:
    """Where there is a start, KV is quantised from it on, and by one process."""
    forms = {name: settings.kv_form_of(name) for name in ("", *settings.models)}
    usual = settings.models.get(EVERY_MODEL, ModelSettings()).quantized_kv_start
    for name, own in settings.models.items():
        is_own = own.quantized_kv_start and own.quantized_kv_start != usual
        if is_own and forms[name].kv_bits is None:
            raise _no_kv_bits(("models", name, "quantized_kv_start"))
        if forms[name].kv_start and own.ranks > 1:
            raise SettingsError(
                f"{_dotted(('models', name))} is split over ranks, whose KV cannot be quantised "
                "from a start on. Give it quantized_kv_start = 0, or leave ranks out."
            )
    if all(form.kv_bits is None for form in forms.values()):
        if usual:
            raise _no_kv_bits(("models", EVERY_MODEL, "quantized_kv_start"))
        if settings.quantized_kv_start:
            raise _no_kv_bits(("quantized_kv_start",))


def _check_templates(settings: Settings) -> None:
    """Their arguments are those that a request may give, but for thinking, which has a key."""
    for name, own in settings.models.items():
        for key in own.template:
            path = _dotted(("models", name, "template", key))
            if key in SWITCHES:
                raise SettingsError(
                    f"{path} is [{_dotted(('models', name))}] thinking here: set that instead."
                )
            if key in OWN_KWARGS:
                raise SettingsError(f"{path} is what Hearth gives itself. Remove it.")


def _no_kv_bits(path: tuple[str, ...]) -> SettingsError:
    return SettingsError(
        f"{_dotted(path)} says from where on KV is quantised, but not to how many bits. "
        "Give kv_bits as well, or leave it out."
    )


def _check_aliases(settings: Settings) -> None:
    """Each alias is one model's, and no name of another."""
    owners: dict[str, str] = {}
    given = [
        (f"models.{_dotted((name,))}.aliases", alias, name)
        for name, own in settings.models.items()
        for alias in own.aliases
    ]
    given += [
        (_dotted(("aliases", alias)), alias, target) for alias, target in settings.aliases.items()
    ]
    for key, alias, target in given:
        model = owners.get(target, target)
        if alias in settings.models and alias != model:
            raise SettingsError(
                f"{key}: {alias!r} is an alias of {model} here, and [{_dotted(('models', alias))}] "
                "is a model of that name. Rename one of them."
            )
        if (owner := owners.setdefault(alias, model)) != model:
            raise SettingsError(
                f"{key}: {alias!r} is an alias of {model} here, and of {owner} already. "
                "Keep it with one of them."
            )


def given_outside(flags: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """The flags and variables that set something, `home` aside, as they are spelled."""
    paths = [(name,) for name in _KINDS if name != "home"]
    variables = [_variable((name.upper(),)) for (name,) in paths]
    set_here = [name for name in variables if environ.get(name)]
    return set_here + [_flag(path) for path in paths if path[0] in flags]


def belongs(key: str) -> str | None:
    """Where in the file a key can be, as the rest of `belongs …`; None for one that is none."""
    return " or ".join(places_of(key, _KINDS)) or None


_PREFIX = "HEARTH_"
_KINDS = kinds_of(Settings)
_OUTER_KINDS = _KINDS | {"config": Path}


def _read_variables(environ: Mapping[str, str], user_home: Path) -> dict[str, object]:
    table = {
        name.removeprefix(_PREFIX): value
        for name, value in environ.items()
        if name.startswith(_PREFIX) and value
    }
    kinds = {key.upper(): kind for key, kind in _OUTER_KINDS.items()}
    origin = Origin(
        place="in the environment",
        remedy="unset it",
        spell=_variable,
        is_text=True,
        base=Path.cwd(),
        user_home=user_home,
        file=_KINDS,
    )
    return {key.lower(): value for key, value in convert_table(table, kinds, origin).items()}


def _read_flags(flags: Mapping[str, str], user_home: Path) -> dict[str, object]:
    origin = Origin(
        place="on the command line",
        remedy="leave it out",
        spell=_flag,
        is_text=True,
        base=Path.cwd(),
        user_home=user_home,
        file=_KINDS,
    )
    return convert_table(flags, _OUTER_KINDS, origin)


def _read_file(file: Path, user_home: Path, *, is_required: bool) -> dict[str, object]:
    try:
        table = _parse_toml(file.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        if is_required:
            raise SettingsError(
                f"The configuration file {file} does not exist. "
                "Create it, or correct --config or HEARTH_CONFIG."
            ) from error
        return {}
    except OSError as error:
        raise SettingsError(
            f"The configuration file {file} cannot be read: {error.strerror}. "
            "Correct that, or name another with --config."
        ) from error
    except ValueError as error:
        raise SettingsError(f"The configuration file {file} is not valid TOML: {error}.") from error
    origin = Origin(
        place=f"in {file}",
        remedy="remove it",
        spell=_dotted,
        is_text=False,
        base=file.parent.absolute(),
        user_home=user_home,
        file=_KINDS,
    )
    return convert_table(_with_defaults(table, origin), _KINDS, origin)


def _with_defaults(table: dict[str, object], origin: Origin) -> dict[str, object]:
    """The file with what `[models."*"]` gives in the table of each model, key by key.

    `context` is not: as a default it is the most that a model has, not what it has.
    """
    models = as_table(table.get("models")) or {}
    every = as_table(models.get(EVERY_MODEL))
    if every is None:
        return table
    convert_table(every, kinds_of(ModelDefaults), origin, ("models", EVERY_MODEL))
    defaults = {key: value for key, value in every.items() if key != "context"}
    merged = {name: _over(one, defaults) for name, one in models.items()}
    return table | {"models": merged | {EVERY_MODEL: every}}


def _over(own: object, defaults: object) -> object:
    """What is given, and of tables what only the defaults give."""
    given, usual = as_table(own), as_table(defaults)
    if given is None or usual is None:
        return own
    return usual | {key: _over(one, usual.get(key)) for key, one in given.items()}


def _parse_toml(text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        end = f"at line {len(text.splitlines())}, the end"
        hint = '; write [models."*"] with quotes' if "[models.*" in text else ""
        raise ValueError(str(error).replace("at end of document", end) + hint) from error


def _variable(path: KeyPath) -> str:
    return _PREFIX + path[0]


def _flag(path: KeyPath) -> str:
    return "--" + path[0].replace("_", "-")


def _dotted(path: KeyPath) -> str:
    """The keys as TOML writes them: quoted where they are not bare."""
    return ".".join(
        key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)
        for key in path
    )
