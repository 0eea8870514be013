"""From the first second of a server's life to its last."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from api.address import listen
from runtime.config.settings import Settings
from runtime.supervisor.supervision_rules import rules_of
from runtime.timeouts import stop_bound_s
from tests.gates import Gates
from tests.running_server import (
    CHAT,
    COMPLETIONS,
    RunningServer,
    free_port,
    running,
    started,
    streaming,
    workers_of,
)
from tests.waiting import PATIENCE_S, until

SERVICE_STOP_S = 120.0
NEEDED_FOR_LIVENESS = {"api", "runtime", "uvicorn", "uvloop", "httptools", "msgspec", "click"} | {
    *("typing_extensions", "cython_runtime")
}
"""Packages beside the standard library's; some bring others."""
SHORT: dict[str, Any] = {"model": "tiny", "prompt": "a kettle", "max_tokens": 2}
LONG: dict[str, Any] = SHORT | {"max_tokens": 3500, "ignore_eos": True}


def status(server: RunningServer, path: str) -> int:
    """The status of a GET; 0 when nobody listens yet."""
    try:
        return server.get(path).status_code
    except httpx.TransportError:
        return 0


def config(models_dir: Path, more: str = "") -> str:
    return f'models_dir = "{models_dir}"\ndefault_model = "tiny"\n{more}\n'


# Beginning


async def test_liveness_is_answered_before_the_server_is_built_and_readiness_when_loaded(
    tmp_path: Path, models_dir: Path
) -> None:
    """And little is imported until then: that much takes a fraction of a second anywhere."""
    gates = Gates(tmp_path / "gates", ("api.preflight", "api.app", "mlx.core"))
    home, how = tmp_path / "home", config(models_dir)
    with started(home, config=how, is_fresh=True, **gates.variables) as server:
        imported = await gates.reached("api.preflight")
        packages = {name.partition(".")[0] for name in imported if not name.startswith("_")}
        assert packages - sys.stdlib_module_names == NEEDED_FOR_LIVENESS
        assert len(imported) < 320
        await until(lambda: status(server, "/health/live") == 200, "live")
        assert server.get("/health").json() == {"status": "live"}
        async with server.client() as client:
            asked = asyncio.create_task(client.get("/health/ready"))
            assert server.get("/health/live").json() == {"status": "live"}
            gates.open("api.preflight")
            await gates.reached("api.app")
            assert "; tiny is still being loaded, and requests wait" in server.next_line()
            assert not asked.done()
            gates.open("api.app")
            unready = await asked
        assert (unready.status_code, unready.json()["status"]) == (503, "loading")
        await gates.reached("mlx.core")
        assert status(server, "/health/ready") == 503
        gates.open("mlx.core")
        assert server.next_line() == "tiny is loaded"
        ready = server.get("/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        states = {model["id"]: model["state"] for model in ready.json()["models"]}
        assert (states["tiny"], states["twin"]) == ("ready", "cold")


def test_a_probe_may_ask_with_head(server: RunningServer) -> None:
    for path in ("/", "/health", "/health/live", "/api/version", "/api/tags"):
        response = server.request("HEAD", path)
        assert (response.status_code, response.content) == (200, b"")


def test_a_first_start_says_three_things(tmp_path: Path) -> None:
    with running(tmp_path / "new") as new:
        loading, kept = sorted(new.stderr.splitlines(), key=lambda line: "kept" in line)
        assert "loading the model" in loading
        assert "model=hearth-tiny" in loading
        assert "conversations are kept" in kept
        assert f"directory={tmp_path / 'new' / 'kv'}" in kept
        waits = "; hearth-tiny is still being loaded, and requests wait for that"
        ready = f"Hearth is ready at {new.url} with hearth-tiny{waits} - try: curl "
        assert new.ready_line.startswith(ready)
        assert new.next_line() == "hearth-tiny is loaded"
        assert " now=" not in new.stderr


def test_the_ready_line_says_where_and_what_and_its_command_works(server: RunningServer) -> None:
    line = server.ready_line
    assert server.url in line
    assert "with tiny, " in line  # the default model first
    assert "hearth-tiny" in line
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = line[line.index("curl ") :]
    assert shlex.split(command)[0] == "curl"
    pasted = subprocess.run(["bash", "-c", command], capture_output=True, check=True, timeout=60)
    assert b'"finish_reason"' in pasted.stdout


def test_the_server_process_has_no_mlx_in_it(server: RunningServer) -> None:
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "uvloop" in maps
    assert "mlx" not in maps
    assert "pydantic" not in maps  # Litestar would import it for handlers that we do not have
    assert "mlx" in Path(f"/proc/{server.worker_pid()}/maps").read_text()


# What stops it from beginning


def refused(home: Path, *flags: str, config: str = "", **variables: str) -> tuple[int, str]:
    """Exit status and message of a server that does not start."""
    with started(home, *flags, config=config, is_fresh=False, **variables) as server:
        return server.process.wait(PATIENCE_S), server.stderr


def test_a_port_that_is_taken_is_named_with_the_remedy(
    tmp_path: Path, server: RunningServer
) -> None:
    """The flag wins over the environment, which names a free port."""
    code, message = refused(tmp_path, "--port", str(server.port))
    assert code == 1, message
    assert f"port {server.port} on 127.0.0.1 is already in use" in message
    assert "--port" in message
    assert "Traceback" not in message


def test_two_that_start_at_once_cannot_have_the_same_port() -> None:
    port = free_port()
    with listen("127.0.0.1", port), pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", port).close()


def test_an_unknown_key_is_named_with_its_file_and_the_nearest(tmp_path: Path) -> None:
    """The flag wins over the environment, which names an empty directory."""
    home = tmp_path / "flag"
    home.mkdir()
    (home / "hearth.toml").write_text("max_bach = 3\n")
    code, message = refused(tmp_path / "variable", "--home", str(home))
    assert code == 2, message
    for word in ("max_bach", str(home / "hearth.toml"), "max_batch"):
        assert word in message
    assert "Traceback" not in message


def test_an_unknown_variable_is_named_with_the_nearest(tmp_path: Path) -> None:
    code, message = refused(tmp_path, HEARTH_MODEL_DIR="/tmp")
    assert code == 2, message
    assert "HEARTH_MODEL_DIR" in message
    assert "HEARTH_MODELS_DIR" in message


def test_a_default_model_that_does_not_exist_is_named(tmp_path: Path, models_dir: Path) -> None:
    code, message = refused(tmp_path, "--default-model", "tinny", HEARTH_MODELS_DIR=str(models_dir))
    assert code == 2, message
    assert "default_model" in message
    assert "Did you mean tiny" in message
    assert workers_of(tmp_path) == []


def test_a_model_that_cannot_be_loaded_does_not_keep_the_others_from_being_served(
    tmp_path: Path, models_dir: Path
) -> None:
    with running(tmp_path, "--default-model", "broken", config=config(models_dir)) as server:
        assert "; broken is still being loaded" in server.ready_line
        assert server.next_line().startswith("broken could not be loaded: ")
        assert server.post(COMPLETIONS, SHORT).status_code == 200


async def test_the_worker_of_a_server_that_is_killed_while_it_starts_leaves(
    tmp_path: Path, models_dir: Path
) -> None:
    gates, home = Gates(tmp_path / "gates", ("mlx.core",)), tmp_path / "home"
    with started(home, config=config(models_dir), is_fresh=True, **gates.variables) as server:
        await gates.reached("mlx.core")
        assert workers_of(home)
        assert status(server, "/health/ready") != 200
        server.process.kill()
        await until(lambda: not workers_of(home), "its end", 30)


# Figures and schema


def test_metrics_count_requests_and_tokens_exactly(server: RunningServer) -> None:
    content_type = server.get("/metrics").headers["content-type"]
    assert content_type.startswith("text/plain; version=")
    figures = {
        "hearth_requests_total": {"route": COMPLETIONS, "method": "POST", "status": "200"},
        "hearth_request_seconds_count": {"route": COMPLETIONS},
        "hearth_prompt_tokens_total": {"model": "tiny"},
        "hearth_output_tokens_total": {"model": "tiny"},
        "hearth_time_to_first_token_seconds_count": {"model": "tiny"},
        "hearth_worker_starts_total": {"model": "tiny"},
    }
    server.post(COMPLETIONS, SHORT)  # its model is loaded now
    before = {name: server.figure(name, **labels) for name, labels in figures.items()}
    usage = server.post(COMPLETIONS, SHORT | {"ignore_eos": True, "max_tokens": 5}).json()["usage"]
    after = {name: server.figure(name, **labels) for name, labels in figures.items()}
    grown = [after[name] - before[name] for name in figures]
    assert grown == [1, 1, usage["prompt_tokens"], 5, 1, 0]
    assert after["hearth_worker_starts_total"] > 0
    assert server.figure("hearth_running", model="tiny") == 0
    assert server.figure("hearth_model_state", model="tiny", state="ready") == 1


def test_who_probes_for_metrics_before_scraping_is_told_their_type(server: RunningServer) -> None:
    answer = httpx.head(f"{server.url}/metrics")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == server.get("/metrics").headers["content-type"]


def test_metrics_keep_no_path_that_a_client_made_up(server: RunningServer) -> None:
    server.get("/made/up/by-a-client")
    text = server.get("/metrics").text
    assert "by-a-client" not in text
    assert 'route="unmatched"' in text


@pytest.mark.parametrize("name", ["swagger", "redoc", "elements", "rapidoc", "scalar", "no.json"])
def test_no_page_is_served_that_another_server_would_have_to_complete(
    server: RunningServer, name: str
) -> None:
    assert server.get("/schema").headers["content-type"].startswith("application/vnd.oai.openapi")
    assert server.get(f"/schema/{name}").status_code == 404


def test_openapi_describes_the_routes_and_what_they_really_answer(server: RunningServer) -> None:
    schema = server.get("/schema/openapi.json").json()
    assert schema["openapi"].startswith("3.")
    assert {COMPLETIONS, "/v1/chat/completions", "/v1/models", "/v1/models/{model_id}"} <= set(
        schema["paths"]
    )
    components = schema["components"]["schemas"]
    names = set(re.findall(r'"#/components/schemas/(\w+)"', server.get("/schema").text))
    assert names <= components.keys()
    assert "messages" in components["ChatRequest"]["required"]
    answers = schema["paths"]["/v1/chat/completions"]["post"]["responses"]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for status_code, changes in ((200, {}), (400, {"n": 0}), (404, {"model": "nobody"})):
        response = server.post("/v1/chat/completions", body | changes)
        assert response.status_code == status_code
        content = answers[str(status_code)]["content"]["application/json"]
        assert_fits(response.json(), content["schema"], components)


def assert_fits(value: Any, schema: Any, components: Any) -> None:
    """Objects have the properties that are required and none that are not described."""
    if "$ref" in schema:
        schema = components[schema["$ref"].rsplit("/", 1)[1]]
    for one in schema.get("oneOf", [schema]):
        if isinstance(value, dict) and "properties" in (one := resolved(one, components)):
            assert set(one.get("required", ())) <= value.keys() <= one["properties"].keys()
            for key, inner in value.items():
                assert_fits(inner, one["properties"][key], components)
        elif isinstance(value, list) and "items" in one:
            for inner in value:
                assert_fits(inner, one["items"], components)


def resolved(schema: Any, components: Any) -> Any:
    return components[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema


# End


@contextmanager
def expendable(
    tmp_path: Path, models_dir: Path, more: str = ""
) -> Generator[tuple[RunningServer, psutil.Process]]:
    """A server to be ended by the test, and its worker, which must be gone then."""
    with running(tmp_path, config=config(models_dir, more)) as server:
        worker = psutil.Process(server.worker_pid())
        yield server, worker
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


async def test_a_signal_lets_running_answers_finish_and_closes_idle_connections(
    tmp_path: Path, models_dir: Path
) -> None:
    with (
        expendable(tmp_path, models_dir) as (server, _),
        socket.create_connection(("127.0.0.1", server.port), 10) as idle,
    ):
        idle.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while b'{"status":"live"}' not in answer:
            answer += idle.recv(1000)
        async with streaming(server, COMPLETIONS, LONG | {"max_tokens": 1000}) as stream:
            await stream.next_event()
            server.process.send_signal(signal.SIGTERM)
            await until(lambda: status(server, "/health/live") == 0, "nobody new is let in")
            events = await stream.rest()
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(PATIENCE_S) == 0
        assert idle.recv(1000) == b""
        assert "Traceback" not in server.stderr


async def test_an_answer_that_takes_longer_than_the_grace_ends_with_an_error(
    tmp_path: Path, models_dir: Path
) -> None:
    with expendable(tmp_path, models_dir, "stop_timeout_s = 0.5") as (server, _):
        async with streaming(server, COMPLETIONS, LONG) as stream:
            await stream.next_event()
            server.process.send_signal(signal.SIGTERM)
            events = await stream.rest()
        assert events[-1]["error"]["type"] == "server_error"
        assert "stopp" in events[-1]["error"]["message"], events[-1]
        assert server.process.wait(PATIENCE_S) == 0
        assert "Traceback" not in server.stderr


async def test_a_second_signal_waits_for_nothing(tmp_path: Path, models_dir: Path) -> None:
    with expendable(tmp_path, models_dir) as (server, _):
        async with streaming(server, COMPLETIONS, LONG) as stream:
            await stream.next_event()
            server.process.send_signal(signal.SIGINT)
            await until(lambda: status(server, "/health/live") == 0, "the first one is heeded")
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGINT)
            server.process.wait(PATIENCE_S)
            # Who had waited for the answer would have sent all of it.
            with suppress(httpx.RemoteProtocolError):
                await stream.rest()
            assert "[DONE]" not in stream.events
        assert server.process.returncode == 0
        assert "Traceback" not in server.stderr


def state_of(server: RunningServer, model: str) -> str | None:
    models = server.get("/running").json()["models"]
    return next((one["state"] for one in models if one["id"] == model), None)


async def reach_load(server: RunningServer) -> None:
    await until(lambda: state_of(server, "twin") in ("spawning", "loading"), "it loads")


async def reach_prefill(server: RunningServer) -> None:
    await until(lambda: state_of(server, "twin") == "busy", "it is prefilled", 30)


@pytest.mark.parametrize(("reach", "expected"), [(reach_load, 503), (reach_prefill, 200)])
async def test_a_signal_refuses_what_waits_answers_what_runs_and_leaves_nobody_behind(
    tmp_path: Path,
    models_dir: Path,
    reach: Callable[[RunningServer], Awaitable[None]],
    expected: int,
) -> None:
    more = "prefill_slice = 16\nmax_loaded_models = 1"
    prompt = "a kettle hums on the hearth " * 200
    with running(tmp_path, config=config(models_dir, more)) as server, server.slow_loads():
        async with server.client() as client:
            body = LONG | {"model": "twin", "prompt": prompt, "max_tokens": 500}
            asked = asyncio.create_task(client.post(COMPLETIONS, json=body))
            await reach(server)
            workers = workers_of(tmp_path)
            server.process.send_signal(signal.SIGTERM)
            answer = await asked
            assert answer.status_code == expected, answer.text
            if expected == 200:
                assert answer.json()["usage"]["prompt_tokens"] > 500
            else:
                assert_refused(answer)
        assert server.process.wait(PATIENCE_S) == 0
        assert "Traceback" not in server.stderr
        assert [one for one in workers if one.is_running()] == []


def assert_refused(answer: httpx.Response) -> None:
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == "shutting_down"
    assert "stopping" in answer.json()["error"]["message"]


async def test_a_signal_refuses_at_once_who_waits_behind_an_answer_of_another_model(
    tmp_path: Path, models_dir: Path
) -> None:
    more = "max_loaded_models = 1"
    with running(tmp_path, config=config(models_dir, more)) as server:
        async with streaming(server, COMPLETIONS, LONG) as stream, server.client() as client:
            await stream.next_event()
            asked = asyncio.create_task(client.post(COMPLETIONS, json=SHORT | {"model": "twin"}))
            await until(lambda: server.figure("hearth_waiting", model="twin") == 1, "it waits")
            server.process.send_signal(signal.SIGTERM)
            assert_refused(await asked)
            # The answer that runs is not at its end yet, and is not cut.
            num_before = len(stream.events)
            events = await stream.rest()
        assert events[-1] == "[DONE]"
        assert len(events) > num_before
        assert server.process.wait(PATIENCE_S) == 0


async def test_a_signal_while_a_model_writes_its_kv_loses_none_of_it(
    tmp_path: Path, models_dir: Path
) -> None:
    """The worker stands still when it is asked to leave, so it has not yet written anything."""
    more = "max_loaded_models = 1\nblock_size = 16\nprewarm_share = 0"
    said = {"model": "tiny", "messages": [{"role": "user", "content": "a kettle hums " * 200}]}
    with running(tmp_path, config=config(models_dir, more)) as server:
        before = server.post(CHAT, said | {"max_tokens": 2}).json()["usage"]
        worker = psutil.Process(server.worker_pid())
        worker.suspend()
        async with server.client() as client:
            asked = asyncio.create_task(client.post(COMPLETIONS, json=SHORT | {"model": "twin"}))
            await until(lambda: state_of(server, "tiny") == "flushing", "it is asked to leave")
            server.process.send_signal(signal.SIGTERM)
            await until(lambda: status(server, "/health/live") == 0, "the signal is heeded")
            assert_refused(await asked)
            worker.resume()
        assert server.process.wait(PATIENCE_S) == 0
        assert "Traceback" not in server.stderr
        assert not worker.is_running()
    with running(tmp_path, config=config(models_dir, more)) as server:
        after = server.post(CHAT, said | {"max_tokens": 2}).json()
        cached = after["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == before["prompt_tokens"] - 1
        assert after["hearth"]["cache"]["tier"] == "warm"


def test_what_happens_while_a_server_leaves_fits_into_the_time_that_it_is_given() -> None:
    """The service files give 120 s; every inner bound is inside the next outer one."""
    settings = Settings(home=Path("/nowhere"))
    limits_s = rules_of(settings).limits_s
    assert limits_s["flushing"] > stop_bound_s(settings.stop_timeout_s, 2 << 30)
    assert limits_s["draining"] > settings.request_deadline_s
    assert settings.stop_timeout_s + limits_s["flushing"] < SERVICE_STOP_S


async def test_what_waits_while_its_conversation_is_deleted_is_answered_and_not_kept(
    tmp_path: Path, models_dir: Path
) -> None:
    more = "max_loaded_models = 1\nblock_size = 16\n"
    body = {"model": "twin", "prompt": "kettles hum on the hearth " * 20, "max_tokens": 4}
    body |= {"session_id": "gone", "temperature": 0}
    where = {"conversation": "gone"}
    with running(tmp_path, config=config(models_dir, more)) as server:
        async with server.client() as client:
            assert (await client.post(COMPLETIONS, json=body)).status_code == 200
            async with streaming(server, COMPLETIONS, LONG | {"session_id": "stays"}) as stream:
                await stream.next_event()
                asked = asyncio.create_task(client.post(COMPLETIONS, json=body))
                await until(lambda: server.figure("hearth_waiting", model="twin") == 1, "it waits")
                deleted = await client.delete("/admin/cache/conversations", params=where)
                assert deleted.status_code == 200, deleted.text
            answer = await asked
            assert answer.status_code == 200, answer.text
            cache = answer.json()["hearth"]["cache"]
            assert (cache["durable_tokens"], cache["reason"]) == (0, "deleted")
            again = await client.delete("/admin/cache/conversations", params=where)
            assert again.status_code == 404, again.text
            # Who asks after that begins anew.
            answer = await client.post(COMPLETIONS, json=body)
            assert answer.json()["hearth"]["cache"]["cached_tokens"] == 0
            again = await client.delete("/admin/cache/conversations", params=where)
            assert again.status_code == 200, again.text
