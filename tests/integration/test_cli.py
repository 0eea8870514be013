"""The command line against a running server, and without one."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import stat
import subprocess
import sys
from collections.abc import Generator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import DataTable, Static

from api.cli.chat import ChatSession, summary
from api.cli.client import ServerLink
from api.cli.commands import COMMANDS, EXIT_CODES, parser
from api.cli.progress import watching
from api.cli.top import Top
from runtime.config.running import read_url
from runtime.config.settings import Settings
from runtime.progress import Progress
from tests.running_server import (
    CHAT,
    ROOT,
    RunningServer,
    environment,
    free_port,
    running,
    started,
    streaming,
)
from tests.running_server import hearth as command
from tests.waiting import PATIENCE_S, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running(tmp_path_factory.mktemp("home")) as server:
        yield server


def hearth(home: Path, port: int, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return command(*words, stdin=stdin, HEARTH_HOME=str(home), HEARTH_PORT=str(port))


def told(server: RunningServer, *words: str, stdin: str = "") -> str:
    done = hearth(server.home, server.port, *words, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_json(server: RunningServer, *words: str) -> Any:
    return json.loads(told(server, *words, "--json"))


def test_status_says_where_the_server_is_and_what_it_has_loaded(server: RunningServer):
    text = told(server, "status")
    assert f"{server.url} (ready)" in text
    assert "hearth-tiny" in text
    status = as_json(server, "status")
    assert status["health"]["status"] == "ready"
    assert [one["id"] for one in status["models"]] == ["hearth-tiny"]


def test_models_and_their_states_are_listed(server: RunningServer):
    assert "CONTEXT" in told(server, "models").splitlines()[0]
    assert as_json(server, "ps")[0]["state"] in ("ready", "busy")
    assert {"hearth-tiny"} <= {one["id"] for one in as_json(server, "models")}


def test_a_model_is_pinned_unloaded_and_loaded_by_name(server: RunningServer):
    assert as_json(server, "pin", "hearth-tiny")["pinned"] is True
    assert as_json(server, "unpin", "hearth-tiny")["pinned"] is False
    assert told(server, "pin", "hearth-tiny").startswith("hearth-tiny is pinned, and ")
    assert told(server, "unpin", "hearth-tiny").startswith("hearth-tiny is pinned no longer, and ")
    told(server, "unload", "hearth-tiny")
    assert as_json(server, "load", "hearth-tiny")["state"] in ("ready", "busy")
    assert told(server, "restart", "hearth-tiny").startswith("hearth-tiny is ")


def test_a_model_that_does_not_exist_is_the_servers_own_refusal(server: RunningServer):
    done = hearth(server.home, server.port, "load", "hearth-tini")
    assert done.returncode == 1
    assert "Did you mean hearth-tiny" in done.stderr


def test_a_conversation_shows_what_each_turn_reused(server: RunningServer):
    text = told(server, "chat", "--max-tokens", "40", stdin="Hello!\nAnd again?\n")
    first, second = [line for line in text.splitlines() if line.startswith("[")]
    assert "tokens reused" in first
    reused, total = (int(second.split()[i].strip("[")) for i in (0, 2))
    assert 0 < reused < total
    assert "(hot)" in second


def test_one_message_is_answered_and_can_be_had_as_json(server: RunningServer):
    turn = as_json(server, "chat", "--think", "--max-tokens", "200", "Hello!")
    assert turn["text"]
    assert turn["reasoning"]
    assert turn["output_tokens"] > 0
    shown = told(server, "chat", "--think", "Hello!")
    assert f"{turn['reasoning']}\n\n{turn['text']}\n" in shown
    done = hearth(server.home, server.port, "top")
    assert (done.returncode, "hearth top --json" in done.stderr) == (2, True)


def test_chat_thinks_as_the_settings_say_unless_it_is_told(tmp_path: Path):
    with running(tmp_path, config='[models."*"]\nthinking = true\n') as server:
        assert as_json(server, "chat", "Hello!")["reasoning"]
        assert not as_json(server, "chat", "--no-think", "Hello!")["reasoning"]


class Impatient(io.StringIO):
    """Somebody who presses Ctrl-C when the first word comes."""

    def write(self, text: str, /) -> int:
        if not self.getvalue():
            super().write(text)
            raise KeyboardInterrupt
        return super().write(text)


def test_an_answer_that_is_stopped_leaves_the_conversation_usable(server: RunningServer):
    settings = Settings(home=server.home, port=server.port)
    talk = ChatSession(ServerLink(settings), {"max_tokens": 200})
    stopped = talk.say("Hello!", Impatient())
    assert (stopped.is_stopped, summary(stopped)) == (True, "[stopped]")
    told_after = talk.say("And again?", io.StringIO())
    assert told_after.text
    assert told_after.cache.cached_tokens > 0


def test_who_types_is_told_of_a_refusal_and_goes_on(server: RunningServer):
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "api", "chat", "--model", "nobody"],
        env=environment({"HEARTH_HOME": str(server.home), "HEARTH_PORT": str(server.port)}),
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(theirs)
        os.write(ours, b"Hi\n/modle x\n/bye\n")
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None
        said = process.stderr.read().decode()
    os.close(ours)
    assert "Ctrl-C stops an answer" in said
    assert said.count("nobody") == 1, "the command that does not exist was not sent to the model"
    assert "there is no /modle" in said


def test_the_settings_in_force_are_shown_without_their_secrets(server: RunningServer):
    shown = as_json(server, "config", "show", "--admin-key", "sha256:" + "0" * 64)
    assert shown["port"] == server.port
    assert shown["admin_key"] == "…"
    assert "can be used" in told(server, "config", "check")
    wrong = hearth(server.home, server.port, "config", "check", "--default-model", "nobody")
    assert wrong.returncode == 2
    assert "nobody" in wrong.stderr


def test_the_database_of_a_running_server_is_left_alone(server: RunningServer):
    done = hearth(server.home, server.port, "db", "upgrade")
    assert done.returncode == 1
    assert "server has the store open" in done.stderr


async def test_the_live_view_draws_what_runs(server: RunningServer):
    body = {
        "messages": [{"role": "user", "content": "go on"}],
        "max_tokens": 20_000,
        "ignore_eos": True,
    }
    async with streaming(server, CHAT, body) as stream:
        await stream.next_event()
        view = Top(ServerLink(Settings(home=server.home, port=server.port)))
        async with view.run_test() as pilot:
            await pilot.pause()
            await view.refill()
            tables = [view.query_one(name, DataTable) for name in ("#models", "#requests")]
            rows = [table.get_row_at(0) for table in tables]
            texts = [str(view.query_one(name, Static).render()) for name in ("#memory", "#saved")]
    model, request = rows
    assert model[0] == request[1] == "hearth-tiny"
    assert request[2] == "answering"
    assert [line.split()[0] for line in texts[0].splitlines()] == ["memory", "hot", "warm", "cold"]
    assert "reused today" in texts[1]
    assert as_json(server, "top")["memory"]["reserved_bytes"] > 0


def test_a_prompt_is_warm_when_the_command_returns(server: RunningServer, tmp_path: Path):
    system = f"kettle {tmp_path.name} " * 40
    done = as_json(server, "prewarm", "--system", system)
    assert (done["status"], done["model"]) == ("completed", "hearth-tiny")
    assert done["prompt_tokens"] > 100
    file = tmp_path / "request.json"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}]
    file.write_text(json.dumps({"messages": messages}))
    again = as_json(server, "prewarm", str(file))
    assert again["cached_tokens"] > 100
    shown = hearth(server.home, server.port, "prewarm", "-", stdin=file.read_text())
    assert "completed" in shown.stdout
    wrong = hearth(server.home, server.port, "prewarm", str(tmp_path / "missing"))
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "cannot be read" in wrong.stderr
    assert "Say what to warm" in hearth(server.home, server.port, "prewarm").stderr


def test_a_prompt_is_shown_as_the_model_reads_it(server: RunningServer, tmp_path: Path):
    late = {"role": "system", "content": "Late."}
    asked = [{"role": "user", "content": "Hi"}, late, {"role": "user", "content": "kettle"}]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    bodies = {
        "chat": {"messages": [{"role": "system", "content": "Be brief."}, *asked], "tools": [tool]},
        "messages": {"system": "Be brief.", "max_tokens": 9, "messages": asked},
        "responses": {"instructions": "Be brief.", "input": asked},
    }
    for name, body in bodies.items():
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({"model": "hearth-tiny"} | body))
        found = as_json(server, "prompt", "explain", str(file))
        assert sum(part["num_tokens"] for part in found["parts"]) == len(found["tokens"])
        says = {source: part["text"] for part in found["parts"] for source in part["sources"]}
        assert "Be brief." in says["messages[0] (system)"]
        assert "kettle" in says["messages[3] (user)"]
        told = {rule for part in found["parts"] for rule in part["rules"]}
        assert told <= {one["rule"] for one in found["rewrites"]}
        asked_for = found["tokens"]
        detokenized = server.post("/detokenize", {"tokens": asked_for}).json()["prompt"]
        assert detokenized == "".join(part["text"] for part in found["parts"])
    other = tmp_path / "other.json"
    asked[0]["content"] = "Hello"
    other.write_text(json.dumps(bodies["chat"]))
    parting = as_json(server, "prompt", "explain", str(tmp_path / "chat.json"), str(other))
    assert (parting["part"], parting["other_part"]) == ("messages[1] (user)",) * 2
    assert (parting["text"], parting["other_text"]) == ("Hi", "Hello") or "Hi" in parting["text"]
    same = hearth(server.home, server.port, "prompt", "explain", str(other), str(other))
    assert same.stdout.startswith("They are the same")
    shown = hearth(server.home, server.port, "prompt", "explain", "-", stdin=other.read_text())
    assert "── messages[1] (user)" in shown.stdout
    assert "kettle" not in server.stderr


NEED_A_SERVER = [
    ("status",),
    ("ps",),
    ("top",),
    ("models",),
    ("chat", "Hi"),
    ("prewarm", "--system", "Hi"),
    *((action, "m") for action in ("load", "unload", "pin", "unpin", "restart")),
]


def test_without_a_server_every_command_says_so(tmp_path: Path):
    port = free_port()
    for words in NEED_A_SERVER:
        done = hearth(tmp_path, port, *words)
        assert done.returncode == 3, words
        assert "No server answers at http://127.0.0.1" in done.stderr


def test_what_needs_no_server_works_without_one(tmp_path: Path):
    (tmp_path / "hearth.toml").write_text("no = 1")
    assert hearth(tmp_path, 1, "config", "check").returncode == 2
    for words in (("version",), ("key",)):
        done = hearth(tmp_path, 1, *words, "--json")
        assert (done.returncode, bool(json.loads(done.stdout))) == (0, True)
    (tmp_path / "hearth.toml").unlink()
    assert json.loads(hearth(tmp_path, 1, "config", "check", "--json").stdout)["num_models"] > 0
    assert (
        "ExecStart" in json.loads(hearth(tmp_path, 1, "service", "show", "--json").stdout)["text"]
    )
    assert hearth(tmp_path, 1, "db", "check").returncode == 1
    assert hearth(tmp_path, 1, "cache", "ls").returncode == 1


@pytest.mark.skipif(sys.platform != "linux", reason="systemd's commands are asked")
def test_a_service_has_its_settings_from_the_file_and_from_nowhere_else(tmp_path: Path):
    bus, said = tmp_path / "bin" / "systemctl", tmp_path / "said"
    bus.parent.mkdir()
    bus.write_text(f'#!/bin/sh\necho "$@" >> {said}\n')
    bus.chmod(0o755)
    (tmp_path / "my.toml").write_text("port = 9000")
    around = {"HOME": str(tmp_path), "PATH": f"{bus.parent}:{os.environ['PATH']}"}
    around |= {"HEARTH_HOME": str(tmp_path), "HEARTH_SPARE_WORKER": ""}

    def service(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return command("service", *words, **around, **more)

    for words, more in ((("--port", "9000"), {}), ((), {"HEARTH_PORT": "9000"})):
        done = service("install", *words, **more)
        assert (done.returncode, said.exists()) == (2, False)
        assert (*words, *more)[0] in done.stderr
        assert f"{tmp_path / 'hearth.toml'}" in done.stderr
    unit = tmp_path / ".config" / "systemd" / "user" / "hearth.service"
    assert not unit.exists()
    assert service("install", "--config", str(tmp_path / "my.toml")).returncode == 0
    assert f"--home {tmp_path} --config {tmp_path / 'my.toml'}\n" in unit.read_text()
    assert "disable" not in said.read_text()
    assert service("install").returncode == 0
    assert "--config" not in unit.read_text()
    assert said.read_text().index("disable") < said.read_text().rindex("enable --now")
    bus.write_text("#!/bin/sh\nexit 1\n")
    assert (service("uninstall").returncode, unit.exists()) == (1, False)
    assert service("uninstall").returncode == 0


async def test_a_conversation_is_shown_and_pinned_also_before_it_is_on_disk(server: RunningServer):
    assert as_json(server, "cache", "pin", "to-come", "--ahead", "hearth-tiny")["num_tokens"] == 0
    unknown = hearth(server.home, server.port, "cache", "pin", "no such one")
    assert (unknown.returncode, "cache ls" in unknown.stderr) == (1, True)
    body = {"messages": [{"role": "user", "content": "kettle " * 300}], "max_tokens": 4}
    assert server.post(CHAT, body | {"session_id": "to-come"}).status_code == 200
    await until(lambda: is_known(server, "to-come"), "it is on disk")
    shown = as_json(server, "cache", "show", "to-come")
    assert shown["is_kept"] is True
    assert shown["slots"][0]["start"] == 0
    assert shown["slots"][-1]["leave"] == shown["conversation"]["num_tokens"]
    assert "pinned: yes" in told(server, "cache", "show", shown["conversation"]["id"][:12])
    assert as_json(server, "cache", "unpin", "to-come")["is_pinned"] is False
    assert as_json(server, "cache", "show", "to-come")["is_kept"] is False


def is_known(server: RunningServer, session: str) -> bool:
    done = hearth(server.home, server.port, "cache", "show", session, "--json")
    return done.returncode == 0 and json.loads(done.stdout)["conversation"]["is_durable"]


async def test_garbage_is_collected_and_everything_verified_with_signs_of_progress(
    server: RunningServer,
):
    body = {"messages": [{"role": "user", "content": "a kettle to keep"}], "max_tokens": 4}
    assert server.post(CHAT, body | {"session_id": "verified"}).status_code == 200
    await until(lambda: is_known(server, "verified"), "it is on disk")
    done = hearth(server.home, server.port, "cache", "gc", "--json")
    wanted = {"num_dropped", "num_demoted", "freed_bytes"}
    assert json.loads(done.stdout).keys() == wanted
    assert "gc: " in done.stderr, "the last step said when the command looked; it need not see all"
    done = hearth(server.home, server.port, "cache", "verify", "--json")
    assert json.loads(done.stdout)["num_verified"] > 0
    assert "verify" in done.stderr


async def test_a_cache_without_a_server_is_worked_on_itself(server: RunningServer, tmp_path: Path):
    body = {"messages": [{"role": "user", "content": "copied kettle " * 200}], "max_tokens": 4}
    assert server.post(CHAT, body | {"session_id": "copied"}).status_code == 200
    await until(lambda: is_known(server, "copied"), "it is on disk")
    home = tmp_path / "copy"
    shutil.copytree(server.home, home, ignore=shutil.ignore_patterns("*.lock", "*.sock"))
    ids = [one["id"] for one in json.loads(hearth(home, 1, "cache", "ls", "--json").stdout)]
    assert ids
    pinned = hearth(home, 1, "cache", "pin", ids[0], "--json")
    assert json.loads(pinned.stdout)["is_pinned"] is True
    assert "pinned: yes" in hearth(home, 1, "cache", "show", ids[0]).stdout
    assert json.loads(hearth(home, 1, "cache", "gc", "--json").stdout)["num_dropped"] == 0
    assert hearth(home, 1, "cache", "unpin", ids[0]).returncode == 0
    assert hearth(home, 1, "cache", "rm", ids[0]).returncode == 0
    left = json.loads(hearth(home, 1, "cache", "ls", "--json").stdout)
    assert ids[0] not in [one["id"] for one in left]


def completions(words: str, script: str) -> set[str]:
    """What bash offers for the last word of a command line."""
    asking = f"""
{script}
COMP_WORDS=({words} "")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
COMP_LINE="{words} "
COMP_POINT=${{#COMP_LINE}}
$(complete -p hearth | sed 's/.*-F \\([^ ]*\\) .*/\\1/') hearth "" "{words.rsplit(maxsplit=1)[-1]}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", asking], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_shell_completes_every_command(tmp_path: Path):
    script = hearth(tmp_path, 1, "completion", "bash").stdout
    commands = {command.name for command in COMMANDS}
    assert {"prewarm", "cache", "doctor"} <= commands <= completions("hearth", script)
    assert {"show", "pin", "unpin", "gc"} <= completions("hearth cache", script)


def test_every_command_says_what_its_exit_code_means(tmp_path: Path):
    for name in (one.name for one in COMMANDS if one.name != "cache"):
        assert "exit codes:" in help_of(name)
    documented = (ROOT / "docs" / "operations.md").read_text().replace("`", "")
    for line in EXIT_CODES.splitlines()[1:6]:
        code, meaning = line.strip().split(maxsplit=1)
        assert f"| {code} | {meaning} |" in documented


def help_of(name: str) -> str:
    with pytest.raises(SystemExit) as left, redirect_stdout(io.StringIO()) as out:
        parser().parse_args([name, "--help"])
    assert left.value.code == 0
    return out.getvalue()


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]):
    with watching("verify") as watch:
        for number in range(1000):
            watch(Progress(step="read", num_done=number, num_total=1000))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "verify: read 0 %"
    assert len(lines) == 10


def test_progress_is_a_bar_on_a_terminal(server: RunningServer):
    ours, theirs = pty.openpty()
    terminal = {"TERM": "xterm", "COLUMNS": "80"}
    where = {"HEARTH_HOME": str(server.home), "HEARTH_PORT": str(server.port)}
    with subprocess.Popen(
        [sys.executable, "-m", "api", "cache", "verify", "--json"],
        env=environment(where | terminal),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        answer = process.communicate(timeout=60)[0]
    assert json.loads(answer)["num_damaged"] == 0
    drawn = os.read(ours, 65536).decode()
    os.close(ours)
    assert "verify" in drawn
    assert "\x1b[" in drawn


def test_commands_find_the_server_of_their_home_on_whatever_port_it_is(tmp_path: Path):
    home = tmp_path / "home"
    found = ("--home", str(home))
    with running(home, config="port = 1\n") as server:
        url = read_url(home)
        assert url is not None
        assert url in server.ready_line
        for words in (["ps"], ["models"], ["cache", "ls"], ["history"], ["load", "hearth-tiny"]):
            done = command(*words, *found)
            assert done.returncode == 0, done.stderr
        assert url in command("status", *found).stdout
        assert f"is running at {url}" in command("doctor", *found).stdout
        lost = command("ps", *found, "--port", "1")
        assert (lost.returncode, f"is at {url}" in lost.stderr) == (3, True)
        with started(home) as second:
            assert second.process.wait(PATIENCE_S) == 1
            assert f"Another server runs there at {url}" in second.stderr
        assert stat.S_IMODE((home / "server.url").stat().st_mode) == 0o600
    assert read_url(home) is None, "it is gone"
    assert "http://127.0.0.1:1 " in command("ps", *found).stderr
