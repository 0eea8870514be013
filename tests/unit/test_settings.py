"""The real loader with real files: precedence, types, errors that name key, place and remedy."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.config.limits import GenerateLimits
from runtime.config.settings import (
    ModelSettings,
    SamplingSettings,
    Settings,
    check_places,
    load_settings,
)
from runtime.errors import SettingsError
from runtime.ranks import KvForm, Ranks
from runtime.supervisor import placement
from runtime.supervisor.worker_link import worker_options

Load = Callable[..., Settings]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    return home


@pytest.fixture
def load(home: Path, tmp_path: Path) -> Load:
    """Write `hearth.toml` in the home and load, with flags by key and variables by name."""

    def load(
        toml: str | None = None, /, flags: dict[str, str] | None = None, **env: str
    ) -> Settings:
        if toml is not None:
            (home / "hearth.toml").write_text(toml)
        environ = {"HOME": str(tmp_path), "HEARTH_HOME": str(home), "PATH": "/bin"} | env
        return load_settings(flags or {}, environ)

    return load


def refused(
    load: Load, toml: str | None = None, flags: dict[str, str] | None = None, **env: str
) -> str:
    with pytest.raises(SettingsError) as caught:
        load(toml, flags=flags, **env)
    return caught.value.message


def test_without_any_source_the_defaults_hold_and_nothing_is_created(tmp_path: Path):
    settings = load_settings({}, {"HOME": str(tmp_path)})
    assert settings == Settings(home=tmp_path / ".hearth")
    assert (settings.host, settings.port, settings.preload) == ("127.0.0.1", 8420, None)
    assert list(tmp_path.iterdir()) == []


def test_file_then_environment_then_flags(load: Load):
    assert load("port = 1").port == 1
    assert load("port = 1", HEARTH_PORT="2").port == 2
    assert load("port = 1", HEARTH_PORT="2", flags={"port": "3"}).port == 3


def test_each_source_keeps_what_the_next_does_not_say(load: Load):
    settings = load('host = "::1"', HEARTH_PORT="2", flags={"wired": "on"})
    assert (settings.host, settings.port, settings.wired) == ("::1", 2, "on")


def test_every_simple_key_is_a_variable_and_a_flag(load: Load, tmp_path: Path):
    values = {
        "host": ("0.0.0.0", "0.0.0.0"),
        "models_dir": ("~/models", tmp_path / "models"),
        "default_model": ("a", "a"),
        "preload": ("a, b,", ("a", "b")),
        "allow_download": ("true", True),
        "request_deadline_s": ("1.5", 1.5),
        "max_queue": ("7", 7),
        "memory_budget": ("24000000000", 24_000_000_000),
        "max_loaded_models": ("2", 2),
        "log_level": ("debug", "debug"),
    }
    for key, (text, value) in values.items():
        assert getattr(load(**{f"HEARTH_{key.upper()}": text}), key) == value
        assert getattr(load(flags={key: text}), key) == value


def test_a_deadline_of_0_is_none(load: Load):
    assert load().deadline_s == 600
    assert load("request_deadline_s = '2m'").deadline_s == 120
    assert load("request_deadline_s = 0").deadline_s == math.inf


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("cache_max_bytes", "100GB", 100_000_000_000),
        ("memory_budget", "1.5 GiB", 3 << 29),
        ("max_body_bytes", "64mib", 64 << 20),
        ("hot_bytes", "500MB", 500_000_000),
        ("model_keep_alive_s", "1h30m", 5400),
        ("model_keep_alive_s", "-1", -1),
        ("history_ttl_s", "7d", 7 * 86_400),
        ("history_grace_s", "0s", 0),
        ("request_deadline_s", "90s", 90),
        ("prefill_block_ms", "1.5s", 1500),
        ("prefill_slice", "2k", 2048),
        ("block_size", "1K", 1024),
    ],
)
def test_what_is_measured_may_have_a_unit_wherever_it_is_set(
    load: Load, key: str, text: str, value: float
):
    assert getattr(load(**{f"HEARTH_{key.upper()}": text}), key) == value
    assert getattr(load(flags={key: text}), key) == value
    in_file = text if text == "-1" else f"'{text}'"
    assert getattr(load(f"{key} = {in_file}"), key) == value


def test_tables_take_units_too(load: Load):
    settings = load("""
        [models.a]
        context = "32k"
        keep_alive_s = "5m"
        [limits.generate]
        body_bytes = "1MiB"
        output_tokens = "1M"
    """)
    assert settings.models["a"] == ModelSettings(context=32_768, keep_alive_s=300)
    assert settings.limits.generate == GenerateLimits(body_bytes=1 << 20, output_tokens=1 << 20)


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("0", False), ("True", True), ("false", False)]
)
def test_booleans_in_the_environment(load: Load, text: str, value: bool):
    assert load(HEARTH_ALLOW_DOWNLOAD=text).allow_download is value


def test_an_empty_variable_counts_as_unset_and_a_lone_comma_as_an_empty_list(load: Load):
    assert load(HEARTH_PORT="", HEARTH_PRELOAD="").preload is None
    assert load(HEARTH_PRELOAD=",").preload == ()


def test_home_comes_from_the_flag_before_the_variable(load: Load, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "hearth.toml").write_text("port = 5")
    settings = load("port = 4", flags={"home": str(other)})
    assert (settings.home, settings.port) == (other, 5)


def test_models_are_tables_with_paths_relative_to_the_file(load: Load, home: Path, tmp_path: Path):
    settings = load("""
        [aliases]
        small = "org/model.x"
        [models.local]
        path = "weights/local"
        [models.other]
        path = "~/other"
        [models."org/model.x"]
        aliases = ["x"]
        context = 1024
        sampling = {temperature = 0.5, top_k = 20}
    """)
    assert settings.aliases == {"small": "org/model.x"}
    assert settings.models == {
        "local": ModelSettings(path=home / "weights" / "local"),
        "other": ModelSettings(path=tmp_path / "other"),
        "org/model.x": ModelSettings(
            aliases=("x",), context=1024, sampling=SamplingSettings(temperature=0.5, top_k=20)
        ),
    }


def test_a_cold_store_is_a_path_relative_to_the_file_or_an_address(
    load: Load, home: Path, tmp_path: Path
):
    assert load('cold_store = "cold"').cold_store == str(home / "cold")
    assert load('cold_store = "~/cold"').cold_store == str(tmp_path / "cold")
    assert load('cold_store = "s3://bucket/x"').cold_store == "s3://bucket/x"
    with pytest.raises(
        SettingsError, match=r"cold_store .* is 3, but must be a path or an address"
    ):
        load("cold_store = 3")


def test_a_relative_path_starts_where_it_is_written(
    load: Load, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert load('kv_dir = "kv2"').kv_root == home / "kv2"
    assert load("", HEARTH_KV_DIR="kv2").kv_root == tmp_path / "kv2"
    assert load("", flags={"kv_dir": "kv2"}).kv_root == tmp_path / "kv2"


def test_a_named_file_replaces_the_one_in_the_home(load: Load, home: Path, tmp_path: Path):
    named = tmp_path / "named.toml"
    named.write_text('max_queue = 3\nhome = "here"')
    settings = load_settings({}, {"HOME": str(tmp_path), "HEARTH_CONFIG": str(named)})
    assert (settings.max_queue, settings.home) == (3, tmp_path / "here")
    settings = load("port = 1", flags={"config": str(named)})
    assert (settings.max_queue, settings.home, settings.port) == (3, home, 8420)


def test_a_named_file_must_exist(load: Load, tmp_path: Path):
    missing = tmp_path / "missing.toml"
    expected = (
        f"The configuration file {missing} does not exist. "
        "Create it, or correct --config or HEARTH_CONFIG."
    )
    assert refused(load, HEARTH_CONFIG=str(missing)) == expected
    assert refused(load, flags={"config": str(missing)}) == expected


def test_a_file_that_is_a_directory_is_refused(load: Load, tmp_path: Path):
    assert refused(load, HEARTH_CONFIG=str(tmp_path)).startswith(
        f"The configuration file {tmp_path} cannot be read: Is a directory."
    )


def test_the_file_in_the_home_cannot_move_the_home(load: Load, home: Path):
    assert refused(load, 'home = "/x"').startswith(f"home cannot be set in {home / 'hearth.toml'}")


@pytest.mark.parametrize(
    ("toml", "place"), [("port = 1\nhost = [\n\n", "line 3"), ("port 1", "line 1, column 6")]
)
def test_bad_toml_is_refused_with_its_line(load: Load, home: Path, toml: str, place: str):
    message = refused(load, toml)
    assert message.startswith(f"The configuration file {home / 'hearth.toml'} is not valid TOML: ")
    assert place in message


def test_bytes_that_are_no_text_are_refused(load: Load, home: Path):
    (home / "hearth.toml").write_bytes(b"host = '\xff'")
    assert "is not valid TOML" in refused(load)


@pytest.mark.parametrize(
    ("toml", "key", "nearest"),
    [
        ("prot = 1", "prot", "port"),
        ("[models.a]\npaht = 'x'", "models.a.paht", "models.a.path"),
        ("[models.'a/b']\nalias = 'x'", 'models."a/b".alias', 'models."a/b".aliases'),
        (
            "[models.a.sampling]\ntemprature = 1",
            "models.a.sampling.temprature",
            "models.a.sampling.temperature",
        ),
    ],
)
def test_an_unknown_key_in_the_file(load: Load, home: Path, toml: str, key: str, nearest: str):
    file = home / "hearth.toml"
    assert refused(load, toml) == f"{key} in {file} is no setting. The nearest is {nearest}."


@pytest.mark.parametrize(
    ("toml", "key", "place"),
    [
        ("pinned = true", "pinned", "in [models.NAME]"),
        ("[sampling]\ntop_k = 1", "sampling", "in [models.NAME]"),
        ("temperature = 1", "temperature", "in [models.NAME.sampling]"),
        ("[models.a]\nTop_P = 1", "models.a.Top_P", "in [models.NAME.sampling]"),
        ("[models.a]\nport = 1", "models.a.port", "at the top, before the first [table]"),
        ("[models.a]\nrepo = 'a/b'\n[limits]\nmax_queue = 1", "limits.max_queue", "at the top"),
        ("depth = 5", "depth", "in [limits.generate] or in [limits.embed] or "),
        ("[models.a.sampling]\ncontext = 5", "models.a.sampling.context", "in [models.NAME]"),
    ],
)
def test_a_key_in_the_wrong_place_is_told_where_it_belongs(
    load: Load, home: Path, toml: str, key: str, place: str
):
    bare = key.rpartition(".")[2].lower()
    said = f"{key} in {home / 'hearth.toml'} is no setting there: {bare} belongs {place}"
    assert refused(load, toml).startswith(said)


def test_a_variable_for_what_only_the_file_has_is_told_where_it_belongs(load: Load):
    assert refused(load, None, None, HEARTH_PINNED="1") == (
        "HEARTH_PINNED in the environment is no setting there: "
        "pinned belongs in [models.NAME] of the file."
    )


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("HEARTH_PRT", "HEARTH_PORT"),
        ("HEARTH_port", "HEARTH_PORT"),
        ("HEARTH_MODEL_DIR", "HEARTH_MODELS_DIR"),
    ],
)
def test_an_unknown_variable(load: Load, variable: str, nearest: str):
    assert refused(load, None, None, **{variable: "1"}) == (
        f"{variable} in the environment is no setting. The nearest is {nearest}."
    )


def test_an_unknown_flag(load: Load):
    assert refused(load, flags={"prot": "1"}) == (
        "--prot on the command line is no setting. The nearest is --port."
    )


@pytest.mark.parametrize(
    ("toml", "shown"),
    [
        ("port = 65536", "port {} is 65536, but must be a whole number from 0 to 65535."),
        ("port = '80'", "port {} is '80', but must be a whole number from 0 to 65535."),
        ("kv_bits = 5", "kv_bits {} is 5, but must be one of 4, 8."),
        (
            "otlp_endpoint = 'ftp://x'",
            "otlp_endpoint {} is 'ftp://x', but must be a text that matches ^https?://.",
        ),
        ("port = true", "port {} is True, but must be a whole number from 0 to 65535."),
        (
            "max_queue = 0",
            "max_queue {} is 0, but must be a whole number above 0 and at most 281474976710656.",
        ),
        (
            "keep_alive_s = nan",
            (
                "keep_alive_s {} is nan, but must be a number above 0 and at most 31536000, or a "
                "time such as 90s, 5m or 1h30m."
            ),
        ),
        (
            "keep_alive_s = inf",
            (
                "keep_alive_s {} is inf, but must be a number above 0 and at most 31536000, or a "
                "time such as 90s, 5m or 1h30m."
            ),
        ),
        ("host = 1", "host {} is 1, but must be a text."),
        ("models_dir = ''", "models_dir {} is '', but must be a path."),
        ("preload = 'a'", "preload {} is 'a', but must be a list, each item a text."),
        ("allow_download = 1", "allow_download {} is 1, but must be true or false."),
        ("wired = 'maybe'", "wired {} is 'maybe', but must be one of off, on."),
        ("models = 1", "models {} is 1, but must be a table, each value a table."),
        ("models.a = 1", "models.a {} is 1, but must be a table."),
        ("aliases = {a = 1}", "aliases {} is {{'a': 1}}, but must be a table, each value a text."),
        (
            "models.a.sampling.temperature = 3",
            "models.a.sampling.temperature {} is 3, but must be a number from 0 to 2.",
        ),
    ],
)
def test_an_unusable_value_in_the_file(load: Load, home: Path, toml: str, shown: str):
    expected = shown.format(f"in {home / 'hearth.toml'}")
    assert refused(load, toml) == f"{expected} Correct it, or remove it for the default."


@pytest.mark.parametrize(
    ("key", "text", "kind", "taken"),
    [
        ("history_ttl_s", "5GB", "a size", "or a time such as 90s, 5m or 1h30m."),
        ("prefill_block_ms", "5GB", "a size", "or a time such as 250ms or 1s."),
        ("cache_max_bytes", "5m", "a time", "or a size such as 500MB or 1.5GiB."),
        ("models.a.context", "5MB", "a size", "or a number of tokens such as 32k."),
        ("limits.read.time_s", "5M", "a number of tokens", "or a time such as 90s, 5m or 1h30m."),
        ("max_queue", "2k", "a number of tokens", "must be a whole number above 0 and at most"),
    ],
)
def test_a_unit_of_the_wrong_kind_is_refused(
    load: Load, home: Path, key: str, text: str, kind: str, taken: str
):
    message = refused(load, f"{key} = '{text}'")
    assert message.startswith(f"{key} in {home / 'hearth.toml'} is '{text}', {kind}, but must be ")
    assert taken in message


@pytest.mark.parametrize("value", ["'0.5B'", "'5GB5MB'", "'100G'", "'-1GB'", "'GB'", "'0MB'"])
def test_a_text_that_is_no_size_is_refused_with_what_is_one(load: Load, value: str):
    assert "or a size such as 500MB or 1.5GiB." in refused(load, f"cache_max_bytes = {value}")


def test_an_unusable_value_elsewhere_names_its_place_and_remedy(load: Load):
    assert refused(load, HEARTH_PORT="80a") == (
        "HEARTH_PORT in the environment is '80a', but must be a whole number from 0 to 65535. "
        "Correct it, or unset it for the default."
    )
    assert refused(load, flags={"models_dir": "a\0b"}) == (
        "--models-dir on the command line is 'a\\x00b', but must be a path. "
        "Correct it, or leave it out for the default."
    )


def test_tables_belong_to_the_file(load: Load):
    assert "must be a table, which only the file can give" in refused(load, HEARTH_MODELS="a")


def test_a_long_value_is_shortened(load: Load):
    message = refused(load, HEARTH_WIRED="x" * 500)
    assert f"is '{'x' * 78}…, but" in message


def test_a_model_has_one_source(load: Load, home: Path):
    assert refused(load, "[models.a]\npath = 'x'\nrepo = 'a/b'") == (
        f"models.a in {home / 'hearth.toml'}: path and repo exclude each other; keep one of them"
    )


def test_each_rank_has_a_host(load: Load, home: Path):
    assert refused(load, "[models.a]\nranks = 3\nhosts = ['10.0.0.1', '10.0.0.2']") == (
        f"models.a in {home / 'hearth.toml'}: ranks = 3 needs one of hosts each, or no hosts at all"
    )


def test_a_rank_without_a_host_is_on_this_machine(load: Load):
    text = "[models.a]\nranks = 2\n[models.b]\nranks = 2\nhosts = ['10.0.0.1', '10.0.0.2']"
    settings = load(text)
    ranks = [worker_options(settings, name).ranks for name in ("a", "b", "c")]
    here, apart = Ranks(hosts=("127.0.0.1",) * 2), Ranks(hosts=("10.0.0.1", "10.0.0.2"))
    assert ranks == [here, apart, None]
    assert (here.are_here, apart.are_here) == (True, False)


@pytest.mark.parametrize("backend", ["mpi", "carrier-pigeon"])
def test_ranks_speak_over_what_can_be_started(load: Load, backend: str):
    said = refused(load, f"[models.a]\nranks = 2\nbackend = '{backend}'")
    assert f'backend = "{backend}"' in said
    assert "ring" in said
    assert load("[models.a]\nranks = 2\nbackend = 'jaccl'").models["a"].backend == "jaccl"


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        (
            "[models.a]\naliases = ['x']\n[models.b]\naliases = ['x']",
            "models.b.aliases: 'x' is an alias of b here, and of a already. Keep it with one",
        ),
        (
            "[aliases]\nx = 'c'\n[models.a]\naliases = ['x']",
            "aliases.x: 'x' is an alias of c here, and of a already. Keep it with one of them.",
        ),
        (
            "[models.a]\naliases = ['b']\n[models.b]\npath = 'b'",
            "models.a.aliases: 'b' is an alias of a here, and [models.b] is a model of that name.",
        ),
        (
            "[aliases]\nb = 'a'\n[models.b]\npath = 'b'",
            "aliases.b: 'b' is an alias of a here, and [models.b] is a model of that name. Rename",
        ),
    ],
)
def test_a_name_is_of_one_model(load: Load, toml: str, said: str):
    assert refused(load, toml).startswith(said)


def test_an_alias_may_be_said_twice_of_one_model(load: Load):
    settings = load("""
        [aliases]
        x = "a"
        y = "x"
        [models.a]
        aliases = ["x", "y", "a", "y"]
    """)
    assert settings.models["a"].aliases == ("x", "y", "a", "y")


def test_a_memory_budget_that_no_model_fits_in_is_refused(load: Load):
    assert refused(load, "memory_budget = 1000") == (
        "memory_budget is 1000 bytes, and the smallest model needs 512 MiB. "
        'Give it with its unit, such as "24GB", or leave it out.'
    )
    least = placement.reservation(placement.Profile(weights_bytes=0, context=1))
    assert load(f"memory_budget = {least}").memory_budget == least
    assert "the smallest model needs" in refused(load, flags={"memory_budget": str(least - 1)})


def test_a_models_dir_that_is_none_is_refused(load: Load, home: Path):
    (home / "file").touch()
    for name, why in (("gone", "does not exist"), ("file", "is no directory")):
        with pytest.raises(SettingsError) as caught:
            check_places(load(f"models_dir = '{name}'"))
        assert caught.value.message == (
            f"models_dir is {home / name}, which {why}. Create it, or correct the key."
        )
    check_places(load("models_dir = '.'"))


def test_defaults_of_all_models_give_way_to_a_models_own_key_by_key(load: Load):
    settings = load("""
        kv_ttl_s = "1d"
        [models."*"]
        keep_alive_s = "1h"
        kv_ttl_s = "2h"
        vision = false
        thinking = false
        priority = "background"
        sampling = {temperature = 0.2, top_p = 0.9}
        prompt_rules = {tools_first = false}
        [models.a]
        keep_alive_s = 5
        vision = true
        thinking = true
        [models.a.sampling]
        temperature = 0.7
        [models.b]
    """)
    own, plain, unnamed = (settings.model(name) for name in ("a", "b", "found"))
    assert own.sampling == SamplingSettings(temperature=0.7, top_p=0.9)
    assert (own.vision, own.thinking, own.priority) == (True, True, "background")
    assert plain == unnamed
    assert (unnamed.vision, unnamed.thinking, unnamed.priority) == (False, False, "background")
    assert [settings.keep_alive_of(name) for name in ("a", "b", "found")] == [5, 3600, 3600]
    assert {settings.kv_ttl_of(name) for name in ("a", "b", "found")} == {7200}
    assert {settings.prompt_rules_off(name) for name in ("a", "found")} == {("tools_first",)}
    assert set(settings.named_models) == {"a", "b"}


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("path = 'x'", 'models."*".path in {} is no setting there: path belongs in [models.NAME].'),
        ("pinned = true", 'models."*".pinned in {} is no setting there: pinned belongs in'),
        ("contxt = 5", 'models."*".contxt in {} is no setting. The nearest is models."*".context'),
        ("kv_bits = 5", 'models."*".kv_bits in {} is 5, but must be one of 4, 8.'),
    ],
)
def test_what_cannot_be_a_default_of_all_models_is_refused(
    load: Load, home: Path, toml: str, said: str
):
    message = refused(load, f"[models.'*']\n{toml}\n[models.a]\npath = 'y'")
    assert message.startswith(said.format(home / "hearth.toml"))


def test_the_start_of_quantising_is_rounded_up_to_blocks_and_is_nothing_without_bits(load: Load):
    toml = "kv_bits = 8\nquantized_kv_start = 5000\n[models.a]\npath = 'y'\n"
    toml += "[models.b]\npath = 'z'\nquantized_kv_start = 0\n"
    settings = load(toml)
    assert settings.kv_form_of("a") == settings.kv_form_of("found") == KvForm(8, kv_start=5120)
    assert settings.kv_form_of("b") == KvForm(8)
    only_a = "quantized_kv_start = '5k'\n[models.a]\npath = 'y'\nkv_bits = 4\n"
    settings = load(only_a)
    assert settings.kv_form_of("a") == KvForm(4, kv_start=5120)
    assert settings.kv_form_of("found") == KvForm()


@pytest.mark.parametrize(
    ("toml", "key"),
    [
        ("quantized_kv_start = 5000", "quantized_kv_start"),
        ("[models.a]\npath = 'y'\nquantized_kv_start = 5000", "models.a.quantized_kv_start"),
        ("[models.'*']\nquantized_kv_start = 5000", 'models."*".quantized_kv_start'),
    ],
)
def test_a_start_of_quantising_without_bits_is_refused(load: Load, toml: str, key: str):
    assert refused(load, toml) == (
        f"{key} says from where on KV is quantised, but not to how many bits. "
        "Give kv_bits as well, or leave it out."
    )


def test_a_start_of_quantising_is_not_for_ranks(load: Load):
    toml = "kv_bits = 8\nquantized_kv_start = 5000\n[models.a]\npath = 'y'\nranks = 2\n"
    assert "models.a is split over ranks" in refused(load, toml)
    assert load(f"{toml}quantized_kv_start = 0").kv_form_of("a") == KvForm(8, 2)


def test_a_star_without_quotes_is_told_how_it_is_written(load: Load):
    assert refused(load, "[models.*]\nvision = false").endswith('; write [models."*"] with quotes.')


@pytest.mark.parametrize(
    ("name", "quoted"),
    [("qwen2.5", 'models."qwen2.5"'), ("Qwen3-4B.v1.5-x", 'models."Qwen3-4B.v1.5-x"')],
)
def test_a_name_with_a_dot_and_without_quotes_is_told_so(
    load: Load, home: Path, name: str, quoted: str
):
    assert refused(load, f"[models.{name}]\nrepo = 'a/b'") == (
        f"[models.{name}] in {home / 'hearth.toml'} names a table in a table: a name with a dot in "
        f"it needs quotes, [{quoted}]."
    )


@pytest.mark.parametrize(
    "address", ["https://huggingface.co/a/b", "hf.co/a/b", "https://huggingface.co/a/b/tree/main"]
)
def test_an_address_in_place_of_a_repository_is_told_the_name(load: Load, address: str):
    assert refused(load, f"[models.x]\nrepo = '{address}'").endswith(
        'repo is an address: write its name only, repo = "a/b"'
    )


def test_directories_of_models_are_a_list(load: Load, home: Path):
    home.joinpath("more").mkdir(parents=True)
    assert load('models_dirs = ["more", "~/other"]').models_dirs[0] == home / "more"
