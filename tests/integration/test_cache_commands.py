"""`hearth cache` over a running server and without one; what is deleted leaves no trace."""

from __future__ import annotations

import json
import os
import pty
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from runtime.cache.opened import open_blocks
from runtime.cache.tending import terms_of
from runtime.config.settings import Settings
from runtime.embedded import HEARTH_TINY
from store.keyed_names import conversation_key
from store.ownership import take
from tests.conversation import CODE, Conversation
from tests.crash.server_store import sql_dump
from tests.running_server import ROOT, RunningServer, environment, hearth, running
from tests.waiting import until

SHARED = "zebra canary"
SECRET = "quartz 90210 umbrella"
CANARY = f"{SHARED} {SECRET}"
ANSWER_CANARY = "velvet-onyx-41"
SESSION = "session-canary-4417"
CONFIG = 'default_model = "hearth-tiny"\n'


def run(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return hearth("cache", *arguments, HEARTH_HOME=str(home), **variables)


def asked(home: Path, *arguments: str, **variables: str) -> Any:
    outcome = run(home, *arguments, "--json", **variables)
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout)


def spoken(server: RunningServer, session_id: str | None, text: str) -> Conversation:
    """Two turns of a conversation that begins with `text`."""
    conversation = Conversation(num_sentences=20)
    conversation.messages[0]["content"] = f"{text}. {conversation.messages[0]['content']}"
    for _ in range(2):
        reply = conversation.ask(server, **({"session_id": session_id} if session_id else {}))
        assert CODE in reply.text
    return conversation


def token_runs(conversation_text: str) -> list[bytes]:
    """Any four consecutive token ids of the text, as slots hold them."""
    from mlx_lm.utils import load_tokenizer

    token_ids = load_tokenizer(HEARTH_TINY).encode(f"Note {conversation_text} note")[2:-2]
    windows = [token_ids[i : i + 4] for i in range(len(token_ids) - 3)]
    assert windows
    return [struct.pack("<4I", *window) for window in windows]


def holders(root: Path, needles: list[bytes]) -> set[str]:
    """The files below `root` with any of these bytes in their names or contents."""
    found: set[str] = set()
    for path in root.rglob("*"):
        content = b""
        with suppress(FileNotFoundError, IsADirectoryError):  # it may get its name just now
            content = path.read_bytes()
        if any(needle in content or needle in path.name.encode() for needle in needles):
            found.add(path.name)
    return found


def files(root: Path) -> list[Path]:
    """Those of slots, of states and of heads."""
    return [*root.rglob("*.safetensors")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[RunningServer]:
    with running(home, config=CONFIG) as server:
        yield server
        assert "Traceback" not in server.stderr


async def test_a_canary_is_in_its_slots_and_head_alone_and_nowhere_once_it_is_deleted(
    home: Path, server: RunningServer
):
    port = {"HEARTH_PORT": str(server.port)}
    root = home / "kv"
    other = spoken(server, "other", "Something else entirely")
    spoken(server, SESSION, CANARY)
    sibling = spoken(server, None, SHARED)
    tokens = token_runs(SECRET)
    texts = [CANARY.encode(), SESSION.encode(), ANSWER_CANARY.encode()]

    def kinds() -> set[str]:
        return {Path(name).suffix for name in holders(root, tokens)}

    await until(lambda: kinds() == {".safetensors"}, "the canary is there to begin with")
    assert not holders(root, texts)
    said = server.stderr + server.get("/metrics").text + sql_dump(root)
    assert not [one for one in (CANARY, SESSION, ANSWER_CANARY) if one in said]

    view = next(v for v in asked(home, "ls", **port) if v["id"] == key_of(home, SESSION))
    names = slots_of(server, SESSION) - slots_of(server, "other")
    assert holders(root, [*names])
    removed = asked(home, "rm", SESSION, **port)
    assert removed["num_conversations"] == 1
    assert removed["is_cut"]
    for what in [*tokens, *texts, *names, bytes.fromhex(view["id"]), view["id"].encode()]:
        assert not holders(root, [what]), what
    assert other.ask(server, session_id="other").tier == "hot"
    assert CODE in sibling.ask(server).text


def slots_of(server: RunningServer, session_id: str) -> set[bytes]:
    query = {"conversation": session_id}
    chain = server.request("GET", "/admin/cache/chain", params=query).json()
    return {Path(path).stem.encode() for path in chain["paths"]}


def key_of(home: Path, session_id: str) -> str:
    """What stands for a session id in listings."""
    with take(home / "kv") as owned:
        return conversation_key(owned.secret, session_id).hex()


async def test_a_listing_says_what_there_is(home: Path, server: RunningServer):
    port = {"HEARTH_PORT": str(server.port)}
    views: list[Any] = []

    def is_still() -> bool:
        """The answer of a former test may be on its way to the disk."""
        views[:] = asked(home, "ls", **port)
        seen = server.get("/admin/dashboard/conversations").json()["conversations"]
        tiers = {one["id"]: one["tier"] for one in seen}
        are_durable = all(view["is_durable"] for view in views if view["is_named"])
        return are_durable and tiers == {view["id"]: view["tier"] for view in views}

    await until(is_still, "all that has a name is durable, and both say the same")
    named = [view for view in views if view["is_named"]]
    assert named
    for view in named:
        assert view["model"] == "hearth-tiny"
        assert not view["is_pinned"]
        assert view["num_tokens"] > 0
        assert view["disk_bytes"] > 4096
    shown = asked(home, "show", named[0]["id"], **port)
    assert shown["conversation"]["tier"] == named[0]["tier"] == "hot"
    table = run(home, "ls", **port).stdout
    assert "DURABLE" in table.splitlines()[0]
    assert named[0]["id"][:12] in table
    for meant in ("hearth-tiny", views[0]["model_hash"][:12]):
        found = asked(home, "ls", "--model", meant, **port)
        assert {one["id"] for one in found} >= {view["id"] for view in views}
    stats = asked(home, "stats", **port)
    assert sum(tier["num_tokens"] for tier in stats["tiers"]) > 0

    def is_all_verified() -> bool:
        before = asked(home, "stats", **port)
        verified = asked(home, "verify", **port)
        assert (verified["num_damaged"], verified["num_unread"]) == (0, 0)
        num_slots = sum(tier["num_slots"] for tier in before["tiers"])
        return verified["num_verified"] == len(files(home / "kv")) > num_slots

    await until(is_all_verified, "as many are verified as there are")


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("rm",), 2, "Say what to delete"),
        (("rm", "no such thing"), 1, "hearth cache ls"),
        (("rm", "--model", "nothing"), 1, "does not exist"),
        (("rm", "--all"), 2, "--yes"),
        (("ls", "--model", "hearth-tny"), 1, "mean hearth-tiny? There are: hearth-tiny."),
        (("pin", "any", "--ahead", "hearth-tny"), 1, "Did you mean hearth-tiny?"),
        (("import", "file", "--model", "hearth-tny"), 1, "Did you mean hearth-tiny?"),
        (("export", "file"), 2, "Say what to export"),
        (("import", "/nowhere/file", "--model", "hearth-tiny"), 1, "is no regular file"),
    ],
)
def test_what_cannot_be_done_is_said_with_a_remedy(
    home: Path, server: RunningServer, arguments: tuple[str, ...], code: int, complaint: str
):
    outcome = run(home, *arguments, HEARTH_PORT=str(server.port))
    assert outcome.returncode == code
    assert complaint in outcome.stderr


def test_the_wrong_port_is_said(home: Path, server: RunningServer):
    outcome = run(home, "ls", HEARTH_PORT="1")
    assert outcome.returncode == 1
    assert "--port" in outcome.stderr


def test_other_machines_and_pages_are_refused(server: RunningServer):
    for host in ("evil.example", "evil.example:80", "[2001:db8::1]:80"):
        answer = server.request("GET", "/admin/cache", headers={"host": host})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "host_not_allowed"
    answer = server.request("DELETE", "/admin/cache/conversations", params={"conversation": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "conversation"


def test_everything_goes_also_without_a_server(tmp_path: Path):
    with running(tmp_path, config=CONFIG) as server:
        spoken(server, SESSION, CANARY)
    root = tmp_path / "kv"
    path = files(root)[0]  # written at the latest when a server stops
    (root / "index.db.aside-1").write_bytes(b"".join(token_runs(SECRET)))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert asked(tmp_path, "verify")["num_damaged"] >= 1
    assert holders(root, token_runs(SECRET))
    assert asked(tmp_path, "rm", "--all", "--yes")["is_cut"]
    assert not holders(root, token_runs(SECRET))
    assert files(root) == []
    assert asked(tmp_path, "ls") == []


def test_what_was_asked_of_a_model_that_is_gone_is_found_by_its_name(tmp_path: Path):
    old = f'default_model = "old"\n[models.old]\npath = "{HEARTH_TINY}"\n'
    with running(tmp_path, config=old + '[aliases]\nshort = "old"\n') as server:
        spoken(server, SESSION, CANARY)
        port = {"HEARTH_PORT": str(server.port)}
        kept = asked(tmp_path, "ls", "--model", "short", **port)
        assert [view["model"] for view in kept] == ["old"]
    with running(tmp_path, config=CONFIG) as server:
        port = {"HEARTH_PORT": str(server.port)}
        assert len(asked(tmp_path, "ls", "--model", "old", **port)) == 1
        unknown = run(tmp_path, "ls", "--model", "odl", **port)
        assert "Did you mean old? There are: hearth-tiny, old." in unknown.stderr
        assert asked(tmp_path, "ls", "--model", "hearth-tiny", **port) == []
    assert len(asked(tmp_path, "ls", "--model", "old")) == 1
    assert run(tmp_path, "ls", "--model", "odl").stderr == unknown.stderr
    assert asked(tmp_path, "rm", "--model", "old")["num_conversations"] == 1
    assert run(tmp_path, "ls", "--model", "old").returncode == 1


@pytest.mark.parametrize(("answer", "code"), [(b"\n", 1), (b"n\n", 1), (b"y\n", 0)])
def test_who_deletes_everything_is_asked_first(tmp_path: Path, answer: bytes, code: int):
    open_blocks(tmp_path / "kv", terms_of(Settings(home=tmp_path))).close()
    aside = tmp_path / "kv" / "index.db.aside-1"
    aside.touch()
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "api", "cache", "rm", "--all", "--json"],
        env=environment({"HEARTH_HOME": str(tmp_path), "HEARTH_PORT": "1"}),
        cwd=ROOT,
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(theirs)
        os.write(ours, answer)
        out, said = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == code, said
    assert f"in {tmp_path / 'kv'}? [y/N] ".encode() in said
    assert (aside.exists(), bool(out)) == (code == 1, code == 0)
