"""Chat templates of all styles behind a server: shown whole, looked at, replaced, refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.running_server import CHAT, RunningServer, hearth, running
from tests.templates import FIRST_USER, NO_CALLS, PARTS, STRICT_CALLS, TEXT_ARGUMENTS

BROKEN = "{% for message in messages %}\n{{ message.content }}\n{% if %}\n{% endfor %}"
ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "the quick brown fox"},
    {"role": "assistant", "content": "jumps over"},
    {"role": "user", "content": [{"type": "text", "text": "the lazy dog"}]},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[RunningServer]:
    folder, files = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("files")
    shutil.copytree(models_dir / "tiny", folder / "parts")
    (folder / "parts" / "chat_template.jinja").write_text(PARTS)
    config = f'models_dir = "{folder}"\ndefault_model = "parts"\nmax_loaded_models = 2\n'
    texts = {"first": FIRST_USER, "strict": STRICT_CALLS, "joins": TEXT_ARGUMENTS, "broken": BROKEN}
    texts["unread"] = NO_CALLS
    for name, text in texts.items():
        file = files / f"{name}.jinja"
        file.write_text(text)
        place = f'path = "{models_dir / "tiny"}"\nchat_template = "{file}"'
        config += f"[models.{name}]\n{place}\n"
    with running(tmp_path_factory.mktemp("home"), config=config) as server:
        yield server


def card(server: RunningServer, name: str) -> dict[str, Any]:
    return server.get(f"/v1/models/{name}").json()


def test_a_template_that_loops_over_parts_shows_what_came_as_a_string(server: RunningServer):
    body = {"model": "parts", "messages": ASKED}
    told = server.post("/admin/prompt/explain", body).json()
    text = "".join(part["text"] for part in told["parts"])
    places = [text.find(said) for said in ("Be brief.", "quick brown", "jumps over", "lazy dog")]
    assert -1 not in places
    assert places == sorted(places)
    assert card(server, "parts")["template"] == {
        "content": "parts",
        "system": "native",
        "tools": "generic",
        "calls": "generic",
        "arguments": "object",
        "results": "generic",
        "lost": ["thoughts"],
    }


def test_a_template_of_the_owners_counts_and_a_question_that_it_drops_is_refused(
    server: RunningServer,
):
    body: dict[str, Any] = {"model": "first", "messages": ASKED, "max_tokens": 1}
    refused = server.post(CHAT, body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "messages[3]"
    assert "messages[3] (user)" in error["message"]
    answer = server.post(CHAT, body | {"messages": ASKED[1:3]}).json()
    assert not [one for one in answer["hearth"]["prompt"] if one["rule"] == "lost_text"]


def test_a_broken_template_fails_the_load_with_its_file_and_line(server: RunningServer):
    refused = server.post(CHAT, {"model": "broken", "messages": ASKED})
    assert refused.status_code >= 500
    message = refused.json()["error"]["message"]
    assert "broken.jinja, line 3: Expected an expression, got 'end of statement block'" in message


def test_tools_are_native_for_a_model_only_where_somebody_reads_its_calls(server: RunningServer):
    unread, joins = card(server, "unread"), card(server, "joins")
    assert (unread["tools"], joins["tools"]) == ("untried", "native")
    assert server.post("/admin/models/unread/load", {}).status_code == 200
    assert card(server, "unread")["tools"] == "generic"
    shown = server.post("/api/show", {"model": "unread"}).json()
    assert (shown["tools"], "tools" in shown["capabilities"]) == ("generic", True)


def test_a_model_is_checked_without_a_request(server: RunningServer):
    variables = {"HEARTH_HOME": str(server.home), "HEARTH_PORT": str(server.port)}
    checked = hearth("models", "check", "strict", **variables)
    assert "left out: text beside calls, thoughts" in checked.stdout, checked.stderr
    assert checked.returncode == 1
    shown = json.loads(hearth("models", "check", "strict", "--json", **variables).stdout)
    assert shown["template"]["lost"] == ["text beside calls", "thoughts"]
    joins = hearth("models", "check", "joins", **variables).stdout
    assert "calls: in the template's own form (arguments as JSON in a string)" in joins
    joined = card(server, "joins")
    assert (joined["tools"], joined["template"]["arguments"]) == ("native", "text")
    broken = hearth("models", "check", "broken", **variables)
    assert broken.returncode == 1
    assert "line 3" in broken.stderr
    assert hearth("models", "check", "parts", **variables).returncode == 0
    assert hearth("models", "check", **variables).returncode == 1
    examined = hearth("doctor", "--json", **variables)
    found = {one["subject"]: one for one in json.loads(examined.stdout)}
    assert found["Template of strict"]["fact"] == "leaves out text beside calls"
    assert found["Template of strict"]["remedy"]
    assert found["Template of parts"]["remedy"] is None
