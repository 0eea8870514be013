"""Whole agents as their users install them: how each is set up and asked, and what the server's
log says of its requests.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clients.conftest import MODEL
from tests.clients.node_clients import Project, installed
from tests.clients.scripted_model import Step, write_scripted
from tests.running_server import RunningServer
from tests.waiting import until

CONTEXT = 32768
RECOMPUTED = 32
"""So many tokens of the prompt before may be computed again: the last ones, and a turn's end."""

ROOMY = 65536
"""Of such a context the first prompt of Claude Code, 19,000 tokens, leaves enough to go on."""
SCRIPTED = "scripted"
TASK_S = 600.0
"""What hangs; a slow machine is no failure."""

_LINE = re.compile(
    r"POST (?P<path>/\S+) .*cached_tokens=(?P<cached>\d+) .*output_tokens=(?P<output>\d+) "
    r".*prompt_tokens=(?P<prompt>\d+) .*status=(?P<status>\d+)"
)


class Request(NamedTuple):
    """A request as the server's log tells it."""

    path: str
    cached: int
    prompt: int
    output: int
    status: int

    @property
    def known(self) -> int:
        """So many tokens does the next turn of its conversation find at most."""
        return self.prompt + self.output


def requests_of(server: RunningServer) -> list[Request]:
    found = (_LINE.search(line) for line in server.stderr.splitlines())
    return [
        Request(one["path"], *(int(one[name]) for name in Request._fields[1:]))
        for one in found
        if one is not None
    ]


def asked_since(server: RunningServer, num_before: int, num_asked: int) -> list[Request]:
    """What was asked after so many requests, once the line of each of `num_asked` is written."""
    num_all = num_before + num_asked
    asyncio.run(until(lambda: len(requests_of(server)) >= num_all, "a line of each request"))
    return requests_of(server)[num_before:]


def check_cached(requests: Sequence[Request]) -> None:
    """Every one succeeded, and had the prompt before it in the cache."""
    assert {one.status for one in requests} == {200}
    for before, after in pairwise(requests):
        assert after.cached >= before.prompt - RECOMPUTED, (before, after)


def conversations(requests: Sequence[Request]) -> list[list[Request]]:
    """The requests by conversation: each goes on from exactly all of one before, or begins one."""
    found: list[list[Request]] = []
    for request in requests:
        before = [one for one in found if one[-1].known == request.cached]
        if before:
            before[0].append(request)
        else:
            found.append([request])
    return found


def scripted_config(folder: Path, steps: Sequence[Step]) -> str:
    """Writes a model that says these steps; the configuration of a server that has it."""
    write_scripted(folder / SCRIPTED, steps)
    return f'models_dir = "{folder}"\n[models.{SCRIPTED}]\ncontext = {ROOMY}\n'


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


# pi


def pi_program() -> Project:
    return installed("pi", "@earendil-works/pi-coding-agent@0.87.1")


PI_APIS = {
    "chat": ("openai-completions", "/v1"),
    "messages": ("anthropic-messages", ""),
    "responses": ("openai-responses", "/v1"),
}
PI_CLI = "node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js"


def pi_home(folder: Path, url: str, name: str = MODEL) -> Path:
    """A home in which pi knows the server by all three protocols."""
    model = {"id": name, "contextWindow": CONTEXT, "maxTokens": 200}
    providers = {
        protocol: {"baseUrl": url + path, "api": api, "apiKey": "unused", "models": [model]}
        for protocol, (api, path) in PI_APIS.items()
    }
    (folder / ".pi" / "agent").mkdir(parents=True)
    config = folder / ".pi" / "agent" / "models.json"
    config.write_text(json.dumps({"providers": providers}))
    return folder


def pi_turn(pi: Project, home: Path, provider: str, *arguments: str, model: str = MODEL) -> int:
    """One question to pi; how many answers of the model it needed."""
    flags = ["--provider", provider, "--model", model, "--mode", "json"]
    cli = pi.folder / PI_CLI
    ended = pi.run(cli, *flags, *arguments, home=home, timeout_s=TASK_S, PI_OFFLINE="1")
    assert ended.returncode == 0, ended.stderr
    ends = [one["message"] for one in lines_of(ended.stdout) if one["type"] == "message_end"]
    answers = [one for one in ends if one["role"] == "assistant"]
    assert answers
    assert all(one["stopReason"] in ("stop", "toolUse", "length") for one in answers), answers
    return len(answers)


# Codex


def codex_program() -> Project:
    return installed("codex", "@openai/codex@0.169.0")


CODEX_CONFIG = """
model = "{model}"
model_provider = "local"
model_context_window = {context}
[model_providers.local]
name = "local"
base_url = "{url}/v1"
env_key = "HEARTH_API_KEY"
wire_api = "responses"
[analytics]
enabled = false
"""
CODEX_FLAGS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json")


def codex_home(folder: Path, url: str, name: str = MODEL) -> Path:
    """A home in which Codex knows the server."""
    config = CODEX_CONFIG.format(model=name, context=CONTEXT, url=url)
    (folder / "config.toml").write_text(config)
    return folder


def codex_turn(codex: Project, home: Path, *arguments: str) -> int:
    """One question to Codex; how many things the model said or called in it."""
    cli = codex.folder / "node_modules" / "@openai" / "codex" / "bin" / "codex.js"
    ended = codex.run(
        cli,
        "exec",
        *CODEX_FLAGS,
        *arguments,
        home=home,
        timeout_s=TASK_S,
        CODEX_HOME=str(home),
        HEARTH_API_KEY="unused",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    events = [one["type"] for one in lines_of(ended.stdout)]
    assert events[-1] == "turn.completed", ended.stdout
    assert "error" not in events, ended.stdout
    return events.count("item.completed")


# Claude Code


def claude_program() -> Project:
    return installed("claude", "@anthropic-ai/claude-code@2.1.329")


def claude_turn(
    claude: Project,
    home: Path,
    url: str,
    *arguments: str,
    model: str = MODEL,
    context: int = CONTEXT,
) -> int:
    """One question to Claude Code; how many turns of the model it counts."""
    cli = claude.folder / "node_modules" / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
    ended = claude.run(
        cli,
        *arguments,
        "--output-format",
        "json",
        home=home,
        timeout_s=TASK_S,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_AUTH_TOKEN="sk-unused",
        ANTHROPIC_MODEL=model,
        ANTHROPIC_SMALL_FAST_MODEL=model,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_CONTEXT_TOKENS=str(context),
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="200",
        DISABLE_AUTOUPDATER="1",
        DISABLE_TELEMETRY="1",
        DISABLE_ERROR_REPORTING="1",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(ended.stdout)
    assert not result["is_error"], result
    return int(result["num_turns"])


# opencode


def opencode_program() -> Project:
    return installed("opencode", "opencode-ai@1.18.33")


OPENCODE_APIS = {
    "chat": ("@ai-sdk/openai-compatible", "/v1/chat/completions"),
    "messages": ("@ai-sdk/anthropic", "/v1/messages"),
    "responses": ("@ai-sdk/openai", "/v1/responses"),
}


def opencode_home(folder: Path, url: str, protocol: str, name: str = MODEL) -> Path:
    """A home in which opencode knows the server, also for its side requests."""
    package, _ = OPENCODE_APIS[protocol]
    model = {"limit": {"context": CONTEXT, "output": 200}}
    options = {"baseURL": f"{url}/v1", "apiKey": "unused"}
    config = {
        "provider": {"hearth": {"npm": package, "options": options, "models": {name: model}}},
        "model": f"hearth/{name}",
        "small_model": f"hearth/{name}",
        "permission": {"*": "allow"},
        "autoupdate": False,
        "share": "disabled",
    }
    (folder / ".config" / "opencode").mkdir(parents=True)
    (folder / ".config" / "opencode" / "opencode.json").write_text(json.dumps(config))
    return folder


def opencode_turn(opencode: Project, home: Path, *arguments: str, model: str = MODEL) -> int:
    """One question to opencode; how many steps it took."""
    found = sorted(opencode.folder.glob("node_modules/opencode-*/bin/opencode"))
    if not found:
        pytest.skip("opencode has no program for this system")
    quiet = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    ended = subprocess.run(
        [found[0], "run", "--format", "json", "-m", f"hearth/{model}", *arguments],
        cwd=home,
        env=opencode.environment(home) | quiet,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TASK_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    events = [one["type"] for one in lines_of(ended.stdout)]
    assert "error" not in events, ended.stdout
    return events.count("step_finish")


# qwen-code


def qwen_program() -> Project:
    return installed("qwen", "@qwen-code/qwen-code@0.24.4")


QWEN_SETTINGS = {
    "security": {"auth": {"selectedType": "openai"}},
    "general": {"enableAutoUpdate": False},
    "privacy": {"usageStatisticsEnabled": False},
    "memory": {"enableManagedAutoMemory": False},
}


def qwen_home(folder: Path) -> Path:
    """A home in which qwen-code asks OpenAI's protocol and nobody else."""
    (folder / ".qwen").mkdir(parents=True)
    (folder / ".qwen" / "settings.json").write_text(json.dumps(QWEN_SETTINGS))
    return folder


def qwen_turn(qwen: Project, home: Path, url: str, *arguments: str, model: str = MODEL) -> int:
    """One question to qwen-code; how many answers of the model it needed."""
    cli = qwen.folder / "node_modules" / "@qwen-code" / "qwen-code" / "cli.js"
    ended = qwen.run(
        cli,
        "--yolo",
        "--output-format",
        "json",
        *arguments,
        home=home,
        timeout_s=TASK_S,
        OPENAI_BASE_URL=f"{url}/v1",
        OPENAI_API_KEY="unused",
        OPENAI_MODEL=model,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    events = json.loads(ended.stdout)
    assert not events[-1]["is_error"], events[-1]
    return sum(one["type"] == "assistant" for one in events)
