"""`hearth doctor`: what is wrong with this machine's setup, with one remedy for each finding."""

from __future__ import annotations

import argparse
import contextlib
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import msgspec
import psutil

from api.address import listen
from api.cli import doctor_disk, service
from api.cli.client import ServerLink
from api.cli.config import check
from api.cli.doctor_disk import Finding
from api.cli.errors import NoServer
from api.cli.models import CardList, ReadinessReport, lost_of, template_lines
from api.cli.views import log_errors_only, show, size
from runtime.config.running import at_running
from runtime.config.settings import Settings
from runtime.environment import INSTALL_HINT, find_blas, packaged_blas, worker_environment
from runtime.errors import HearthError
from runtime.keys import needs_of
from runtime.machine_limits import OPEN_FILES, WORKER_FILES, limits_here, too_low
from runtime.models.vision_files import can_see

_IMPORT_TIMEOUT_S = 120
_PATIENCE_S = 3.0
_REINSTALL = "reinstall it: make clean serve, or pip install --force-reinstall hearth"
_LEAST_SQLITE = (3, 38)
_OTHER_FILES = 256
"""Open files of a server beside the two that a waiting request may take."""


class Examined(msgspec.Struct):
    """What `--json` prints of one finding."""

    subject: str
    fact: str
    remedy: str | None


def examine(settings: Settings, config: Path | None = None) -> Iterator[Finding]:
    """Look at everything that serving needs, in the order in which it is needed. `config` is the
    file that was named.
    """
    yield _python()
    yield _mlx()
    yield _vision()
    yield _blas(settings.cpu_blas)
    yield _sqlite()
    yield from _config(settings)
    yield from doctor_disk.findings(settings)
    yield _memory(settings)
    yield from _ranks(settings)
    yield _open_files(settings.max_queue)
    yield _keys(settings)
    yield from _limits()
    yield _port(settings)
    yield _service(settings, config)
    yield from _templates(settings)


def run(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print the findings; the exit code is 1 when one of them has a remedy."""
    log_errors_only()
    findings = list(examine(settings, arguments.config))
    if (trouble := vars(arguments).get("config_trouble")) is not None:
        remedy = "correct it; the rest was checked with the default settings"
        findings.insert(0, Finding("Config", trouble, remedy))
    lines: list[str] = []
    for finding in findings:
        mark = "ok  " if finding.remedy is None else "FIX "
        lines.append(f"{mark} {finding.subject}: {finding.fact}")
        if finding.remedy is not None:
            lines.append(f"     {finding.remedy}")
    shown = [Examined(*one) for one in findings]
    show(shown, "\n".join(lines), as_json=arguments.as_json)
    return int(any(finding.remedy is not None for finding in findings))


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", f"{version} ({sys.executable})")


def _mlx() -> Finding:
    """Imported in a process of its own: that of the server never imports it."""
    code = "import mlx.core as mx, mlx_lm; print(mx.__version__, mx.default_device())"
    try:
        result = subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding("mlx", "importing it takes longer than two minutes", _REINSTALL)
    if result.returncode != 0:
        reason = result.stderr.strip().splitlines()[-1:] or [f"exit code {result.returncode}"]
        return Finding("mlx", f"cannot be imported: {reason[0]}", _REINSTALL)
    return Finding("mlx", result.stdout.strip())


def _vision() -> Finding:
    if not can_see():
        return Finding(
            "Vision",
            "mlx-vlm is not installed, so vision models take text only",
        )
    return Finding("Vision", f"mlx-vlm {version('mlx-vlm')}")


def _blas(setting: str) -> Finding:
    """Which BLAS workers get on a Linux CPU, and how fast it multiplies here and now."""
    if sys.platform != "linux" or setting == "off":
        return Finding(
            "BLAS",
            "cpu_blas is off, so mlx's own is used"
            if setting == "off"
            else "comes with the system",
        )
    try:
        library = find_blas(setting)
    except FileNotFoundError:
        return Finding("BLAS", f"{setting} does not exist", "correct cpu_blas or set it to auto")
    if library is not None:
        return Finding("BLAS", f"{library} is used: {_blas_speed(setting)}")
    fact = f"mlx's own, which is slow on a CPU: {_blas_speed(setting)}"
    with contextlib.suppress(OSError):
        return Finding("BLAS", fact, INSTALL_HINT if packaged_blas() is None else None)
    return Finding(
        "BLAS", fact, f"make sure that you own the directory ~/.cache/hearth, or {INSTALL_HINT}"
    )


def _blas_speed(setting: str) -> str:
    """How fast a worker's process multiplies two matrices of 1,024 by 1,024 float32 on the CPU."""
    code = (
        "import timeit, mlx.core as mx; mx.set_default_device(mx.cpu)\n"
        "a = mx.random.normal((1024, 1024)); mx.eval(a)\n"
        "best = min(timeit.repeat(lambda: mx.eval(a @ a), number=1, repeat=4))\n"
        "print(f'{2 * 1024**3 / best / 1e9:.0f}')"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=worker_environment(setting),
        capture_output=True,
        text=True,
        timeout=_IMPORT_TIMEOUT_S,
        check=False,
    )
    return f"{result.stdout.strip()} GFLOP/s" if result.returncode == 0 else "it cannot be loaded"


def _sqlite() -> Finding:
    fact = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < _LEAST_SQLITE:
        least = ".".join(map(str, _LEAST_SQLITE))
        return Finding("SQLite", fact, f"use a Python that is built with SQLite {least} or newer")
    return Finding("SQLite", fact)


def _config(settings: Settings) -> Iterator[Finding]:
    """Of the hub's cache only what the settings name: more than models for Hearth lies there."""
    try:
        found = check(settings)
    except HearthError as error:
        yield Finding(
            "Settings", error.message, "correct hearth.toml, the HEARTH_… variable or the flag"
        )
        return
    yield Finding("Settings", f"valid; {found.num_models} models can be used")
    for name, reason in found.left_out.items():
        if "/" not in name or name in settings.models:
            yield Finding(
                f"Model {name}",
                f"cannot be used: {reason}",
                "correct it in the settings, or remove it there",
            )


def _templates(settings: Settings) -> Iterator[Finding]:
    """What the chat templates of models that were loaded leave out, where a server runs."""
    with contextlib.suppress(NoServer, HearthError):
        for card in ServerLink(settings).get("/v1/models", CardList).data:
            if card.template is None:
                continue
            lost = lost_of(card.template)
            told = "; ".join(template_lines(card.template))
            fact = f"leaves out {', '.join(lost)}" if lost else told
            remedy = "give it another one: chat_template in its table of the settings"
            yield Finding(f"Template of {card.id}", fact, remedy if lost else None)


def _memory(settings: Settings) -> Finding:
    total_bytes = psutil.virtual_memory().total
    budget_bytes = settings.memory_budget or 0
    fact = f"{size(total_bytes)} in this machine"
    if budget_bytes > total_bytes:
        fact = f"memory_budget is {size(budget_bytes)}, but there are only {fact}"
        return Finding("Memory", fact, "lower memory_budget, or leave it out")
    return Finding("Memory", fact)


def _ranks(settings: Settings) -> Iterator[Finding]:
    """What holds of models that several processes compute, where there are any."""
    for name, model in settings.models.items():
        if (ranks := model.together) is None:
            continue
        fact = f"{len(ranks.hosts)} of {name} over {ranks.backend or 'what mlx.launch would take'}"
        if ranks.backend not in (None, "ring"):
            fact += ", which was never measured"
        kept = "on disk" if ranks.are_here else "on the disk of each machine, here alone with a cap"
        yield Finding("Ranks", f"{fact}; its KV cache is kept {kept}")


def _open_files(max_queue: int) -> Finding:
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * max_queue + _OTHER_FILES
    fact = f"at most {limit} at once"
    if hard not in (limit, resource.RLIM_INFINITY):
        fact += f", and up to {hard} when a server starts"
    if hard != resource.RLIM_INFINITY and WORKER_FILES <= hard < needed:
        remedy = f"ulimit -Hn {OPEN_FILES} as root; a service gets as many by itself"
        return Finding("Open files", f"{fact}, but up to {needed} may be needed", remedy)
    return Finding("Open files", fact)


def _keys(settings: Settings) -> Finding:
    """What is asked for, and what is open without: the default for one person is no fault."""
    needs = needs_of(settings.api_keys, settings.admin_key)
    if needs.admin == "nothing":
        open_to_all = "none are set, so every program on this machine may use the server and /admin"
        return Finding("Keys", f"{open_to_all} (`hearth key` makes one)")
    asked = "by all but liveness" if needs.use != "nothing" else "by /admin, figures and dashboard"
    return Finding("Keys", f"asked for {asked}; /admin takes the admin key or admin.token")


def _limits() -> Iterator[Finding]:
    """Other than open files only where one is too low; a server has the same from its shell."""
    for one in too_low(limits_here()):
        yield Finding("Limits", one.fact, one.remedy)


def _port(settings: Settings) -> Finding:
    host, port = settings.host, settings.port
    link = ServerLink(at_running(settings), _PATIENCE_S)
    is_elsewhere = link.url != ServerLink(settings).url
    if is_elsewhere and _answers(link):
        fact = f"the server of {settings.home} is running at {link.url}, where commands find it"
        return Finding("Port", f"{fact}; the settings say {host} port {port}")
    try:
        listen(host, port).close()
    except OSError as error:
        if _answers(ServerLink(settings, _PATIENCE_S)):
            return Finding("Port", f"a Hearth server is running at {host} port {port}")
        return Finding(
            "Port",
            f"{host} port {port} cannot be used: {error.strerror}",
            f"stop what uses it (lsof -i :{port}) or choose another with --port",
        )
    return Finding("Port", f"{host} port {port} is free")


def _answers(link: ServerLink) -> bool:
    try:
        link.peek("/health/ready", ReadinessReport)
    except NoServer:
        return False
    return True


def _service(settings: Settings, config: Path | None) -> Finding:
    """A unit from before the settings changed gives the server too little time to leave."""
    try:
        command = service.command_line(settings, config)
        unit = service.unit_of(settings, sys.platform, Path.home(), command)
        installed = unit.path.read_text() if unit.path.exists() else None
    except (HearthError, OSError) as error:
        return Finding("Service", f"could not be checked: {error}")
    if installed is None:
        return Finding("Service", "not installed; `hearth service install` starts Hearth at login")
    if installed != unit.text:
        fact = f"{unit.path} does not match this release and these settings"
        return Finding("Service", fact, "hearth service install")
    return Finding("Service", f"{unit.path} is up to date")
