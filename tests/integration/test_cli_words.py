"""What the command line says: of how it is used, to whom, and in how many words."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest

from api.cli.cache import text as cache_text
from api.cli.client import ServerLink
from api.cli.commands import COMMANDS, parser
from api.cli.views import ago, count, fact, show, size, took
from runtime.cache.opened import open_blocks
from runtime.cache.tending import terms_of
from runtime.cache.views import ConversationView
from runtime.config.settings import Settings
from runtime.version import VERSION
from tests.running_server import free_port
from tests.running_server import hearth as command


@pytest.mark.parametrize("name", [one.name for one in COMMANDS])
def test_whoever_uses_a_command_wrongly_reads_a_few_lines(
    name: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as left:
        parser().parse_args([name, "--config"])
    assert left.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) <= 5


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("serv", "serve"),
        ("cache lss", "ls"),
        ("serve --prot 8", "--port"),
        ("serve --prot=8", "--port"),
        ("cache ls --modl x", "--model"),
        ("serve --PORT 8", "--port"),
        ("serve --budget 8GB", "--memory-budget"),
        ("serve --models_dir x --prot 8", "--models-dir?; did you mean --port"),
        ("--prot 8 serve", "--port"),
        ("chat --thinking", "--think"),
    ],
)
def test_what_is_nearest_to_an_unknown_word_is_named(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as left:
        parser().parse_args(words.split())
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--port 8 serve", "--port; flags come after the command"),
        ("serve --pinned", "--pinned; pinned belongs in [models.NAME] of the file"),
        ("serve --context=5", "--context=5; context belongs in [models.NAME] of the file"),
        (
            "serve --temperature 0",
            "--temperature 0; temperature belongs in [models.NAME.sampling] of the file",
        ),
        (
            "serve --aliases a=b",
            "--aliases a=b; aliases is a table, which only the file can give",
        ),
    ],
)
def test_a_flag_of_another_place_is_told_where_it_belongs(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as left:
        parser().parse_args(words.split())
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith(f"unrecognized arguments: {said}\n")


def test_where_nothing_is_near_nothing_is_named(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", "--xyzzy", "8"])
    assert "did you mean" not in capsys.readouterr().err


def test_the_command_alone_shows_its_help_and_its_version_when_asked(tmp_path: Path):
    done = command(HEARTH_HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "  serve " in done.stdout
    assert command("--version").stdout == f"hearth {VERSION}\n"


def test_what_speaks_to_a_server_shows_only_how_to_find_it(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parser().parse_args(["pin", "--help"])
    shown = capsys.readouterr().out
    assert "--home" in shown
    assert "--port" in shown
    assert "--kv-bits" not in shown
    assert parser().parse_args(["pin", "m", "--kv-bits", "8"]).kv_bits == "8", "it is known still"


def test_stdout_is_for_the_answer_also_where_another_has_the_store(tmp_path: Path):
    store = open_blocks(tmp_path / "kv", terms_of(Settings(home=tmp_path)))
    try:
        done = command("db", "upgrade", "--json", HEARTH_HOME=str(tmp_path))
    finally:
        store.close()
    assert (done.returncode, done.stdout) == (1, "")
    assert "A server has the store open" in done.stderr
    done = command("db", "check", "--json", HEARTH_HOME=str(tmp_path))
    assert json.loads(done.stdout)["is_intact"] is True


@pytest.mark.parametrize("words", ["cache rm", "cache export f", "prewarm", "prewarm --system a f"])
def test_a_command_that_says_too_little_or_too_much_is_not_tried(tmp_path: Path, words: str):
    open_blocks(tmp_path / "kv", terms_of(Settings(home=tmp_path))).close()
    done = command(*words.split(), HEARTH_HOME=str(tmp_path), HEARTH_PORT=str(free_port()))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hearth: Say what to ")


def test_a_name_is_asked_at_all_its_addresses_as_the_server_took_the_first(tmp_path: Path):
    settings = Settings(home=tmp_path, host="localhost", port=1)
    assert ServerLink(settings).url == "http://localhost:1"
    assert ServerLink(msgspec.structs.replace(settings, host="0.0.0.0")).url == "http://127.0.0.1:1"


def test_who_finds_no_server_reads_words_and_no_numbers_of_errors(tmp_path: Path):
    done = command("ps", HEARTH_HOME=str(tmp_path), HEARTH_PORT=str(free_port()))
    assert "(Connection refused)" in done.stderr


def test_nobody_is_asked_for_a_message_that_no_server_would_hear(tmp_path: Path):
    done = command("chat", HEARTH_HOME=str(tmp_path), HEARTH_PORT=str(free_port()))
    assert (done.returncode, done.stdout) == (3, "")
    assert "No server answers" in done.stderr


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (count(999), "999"),
        (count(3_400), "3.4k"),
        (count(999_999), "1.0M"),
        (size(0), "0 B"),
        (size(1_234_567_890), "1.2 GB"),
        (ago(320), "5 min ago"),
        (took(450.4), "450 ms"),
        (took(2_345), "2.3 s"),
        (took(150_000), "2 min"),
        (fact("freed_bytes", 2_500_000), "freed: 2.5 MB"),
        (fact("num_verified", 12_000), "verified: 12.0k"),
        (fact("is_cut", value=True), "cut: yes"),
        (fact("model", "m"), "model: m"),
    ],
)
def test_people_read_numbers_in_few_digits(shown: str, wanted: str):
    assert shown == wanted


def test_tables_have_few_digits_and_json_every_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    open_blocks(tmp_path / "kv", terms_of(Settings(home=tmp_path))).close()
    where = {"HEARTH_HOME": str(tmp_path), "HEARTH_PORT": str(free_port())}
    free = json.loads(command("cache", "stats", "--json", **where).stdout)["free_bytes"]
    told = command("cache", "stats", **where).stdout
    assert f"free on disk: {size(free)}".rpartition(" ")[2] in told
    assert str(free) not in told
    for words in (("cache", "gc"), ("cache", "verify")):
        answered = json.loads(command(*words, "--json", **where).stdout)
        assert all(isinstance(value, int) for value in answered.values())
        assert "_" not in command(*words, **where).stdout
    view = ConversationView(
        id="a" * 32,
        model="m",
        model_hash="b" * 64,
        num_tokens=34_567,
        num_durable=34_567,
        num_turns=3,
        num_slots=1,
        disk_bytes=3_234_567,
        own_bytes=1_234_567,
        tier="warm",
        last_used_s=time.time() - 320,
        is_pinned=False,
        is_durable=True,
        is_named=True,
    )
    assert {"34.6k", "1.2", "2.0", "MB", "5", "min"} <= set(cache_text([view]).split())
    show([view], cache_text([view]), as_json=True)
    assert '"num_tokens":34567,' in capsys.readouterr().out
