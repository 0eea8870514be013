"""What costs a worker hours to take in is refused or given up, and nobody else waits for it."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from typing_extensions import override

from runtime.errors import InvalidRequest
from runtime.supervisor.generation import Generation
from runtime.supervisor.process import WorkerProcess
from runtime.supervisor.supervisor import Supervisor
from runtime.types import ChatPrompt, Constraint, GenerateRequest, Message, Prompt, Tool
from runtime.wire import Accepted, Event, Heartbeat, Ready
from tests.asking import answer, ask, request, status_of, supervising, worker_of
from tests.lone_worker import lone_settings, lone_worker
from tests.tiny_models import CHAT_TEMPLATE, write_model
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOOPS = """\
{%- for message in messages if message.content.startswith('qvloop') -%}
    {%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor -%}
{%- endfor -%}
{%- for message in messages if message.content.startswith('qvgrow') -%}
    {{- 'x' * (10 ** 11) -}}
{%- endfor -%}
"""


def allofs(count: int, first: int = 97) -> Constraint:
    """A kilobyte whose automaton has two to the power of `count` states."""
    patterns = [{"pattern": f".*{chr(first + i)}.*"} for i in range(count)]
    return Constraint(kind="json_schema", text=json.dumps({"type": "string", "allOf": patterns}))


def multiples(*factors: int) -> Constraint:
    """Less than that, and gigabytes of memory before a limit of llguidance's is looked at."""
    parts = [{"multipleOf": factor} for factor in factors]
    return Constraint(kind="json_schema", text=json.dumps({"type": "integer", "allOf": parts}))


def chat(text: str, **fields: Any) -> ChatPrompt:
    return ChatPrompt(messages=(Message(role="user", text=text),), **fields)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    model = home / "models" / "m"
    write_model(model)
    (model / "chat_template.jinja").write_text(LOOPS + CHAT_TEMPLATE)
    return home


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def supervisor(home: Path) -> AsyncGenerator[Supervisor]:
    async with supervising(home) as supervisor:
        yield supervisor


async def refusal_of(generation: Generation) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await answer(generation)
    return caught.value


def lanes(supervisor: Supervisor) -> list[psutil.Process]:
    """The processes in which the worker has work done."""
    worker = worker_of(supervisor).pid
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if process.pid != worker and os.getpgid(process.pid) == worker:
                found.append(process)
    return found


def busy(supervisor: Supervisor, at_least_s: float = 0.3) -> list[psutil.Process]:
    """The lanes that have computed for so long."""
    return [one for one in lanes(supervisor) if one.cpu_times().user > at_least_s]


@pytest.mark.parametrize(
    ("prompt", "fields", "param", "why"),
    [
        pytest.param(
            *(chat("a"), {"constraint": allofs(18)}, "response_format", "takes more than"),
            id="schema",  # seconds or memory, whichever this machine has it run out of first
        ),
        pytest.param(
            *(chat("a"), {"constraint": multiples(7, 11, 13, 17, 19, 23)}, "response_format"),
            "takes more than",
            marks=pytest.mark.soak,
        ),
        pytest.param(chat("qvloop"), {}, "messages", "s of computing", id="endless template"),
        pytest.param(chat("qvgrow"), {}, "messages", "memory", id="growing template"),
        pytest.param(
            chat("a", tools=(Tool(name="t", parameters=allofs(19).text, is_strict=True),)),
            {},
            "tools[0]",
            "s of computing",
            marks=pytest.mark.soak,
        ),
    ],
)
async def test_what_takes_too_much_is_refused_and_others_are_answered_meanwhile(
    supervisor: Supervisor, prompt: Prompt, fields: dict[str, Any], param: str, why: str
):
    await ask(supervisor, chat("b"))
    pid = worker_of(supervisor).pid
    heavy = asyncio.create_task(refusal_of(supervisor.submit(request(prompt, **fields))))
    await ask(supervisor, chat("c"), constraint=Constraint(kind="json_object"), max_tokens=8)
    refused = await heavy
    assert refused.param == param
    assert why in refused.message
    assert worker_of(supervisor).pid == pid


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [(chat("qvloop"), {}), (chat("a"), {"constraint": multiples(7, 11, 13, 17, 29)})],
)
async def test_nothing_is_worked_on_for_a_client_that_has_left(
    supervisor: Supervisor, prompt: Prompt, fields: dict[str, Any]
):
    await ask(supervisor, chat("b"))
    pid = worker_of(supervisor).pid
    generation = supervisor.submit(request(prompt, **fields))
    await until(lambda: busy(supervisor), "it is worked on")
    worked = busy(supervisor)
    generation.abort()
    await until(lambda: not any(one.is_running() for one in worked), "the work is ended")
    assert (await ask(supervisor, chat("c"))).finished
    assert worker_of(supervisor).pid == pid


@pytest.mark.soak
async def test_many_at_once_hold_up_nobody_and_only_they_are_refused(supervisor: Supervisor):
    """More of them than there are lanes, each another one, so that nothing is known of any."""
    await ask(supervisor, chat("b"))
    pid = worker_of(supervisor).pid
    bombs = [
        supervisor.submit(request(chat("a"), constraint=allofs(17, 100 + i))) for i in range(4)
    ]
    refusals = [asyncio.create_task(refusal_of(bomb)) for bomb in bombs]
    said = [await ask(supervisor, chat(f"innocent {i}"), max_tokens=4) for i in range(6)]
    assert all(one.finished.usage.num_output_tokens for one in said)
    assert not all(one.done() for one in refusals)
    assert {(await one).param for one in refusals} == {"response_format"}
    again = await refusal_of(supervisor.submit(request(chat("a"), constraint=allofs(17, 100))))
    assert "too heavy to enforce" in again.message
    status = status_of(supervisor)
    assert (worker_of(supervisor).pid, status.num_crashes) == (pid, 0)


async def test_a_worker_that_is_killed_leaves_no_process_that_works_on(supervisor: Supervisor):
    await ask(supervisor, chat("b"))
    generation = supervisor.submit(request(chat("qvloop")))
    await until(lambda: busy(supervisor), "it is worked on")
    worked, worker = busy(supervisor), worker_of(supervisor)
    generation.abort()
    worker.kill()
    await until(lambda: not any(one.is_running() for one in worked), "the work is ended")


class Heard(WorkerProcess):
    """A worker, and what it said."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.said: list[Event] = []
        self.works_for: tuple[str, ...] | None = None
        """What is being taken in as it becomes ready."""

    @override
    def on_event(self, event: Event) -> None:
        self.said.append(event)
        if isinstance(event, Ready) and self._child is not None:
            self.works_for = self._child.page.read("intake")
        super().on_event(event)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LOOPS.replace("qvloop", ".") + CHAT_TEMPLATE])
async def test_a_worker_has_taken_in_a_first_prompt_before_it_is_ready(
    tmp_path: Path, template: str
):
    write_model(tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text(template)
    settings = lone_settings(tmp_path)
    async with lone_worker(settings, tmp_path / "m", kind=Heard) as worker:
        process = worker.process
        assert isinstance(process, Heard)
        before = process.said[: [type(one) for one in process.said].index(Ready)]
        phases = [one.phase for one in before if isinstance(one, Heartbeat)]
        assert process.ready is not None
        if template == CHAT_TEMPLATE:
            assert process.ready.template is not None, "it is known from the first prompt"
        else:
            assert phases[-1] == "idle", "the first prompt takes some heartbeats after warming"
        assert process.works_for == (), "it is over"
        asked = GenerateRequest(request_id="a", model="m", prompt=chat("hello"), max_tokens=2)
        assert len((await answer(worker.submit(asked))).pieces) > 0
        assert not [
            one for one in process.said if isinstance(one, Accepted) and one.request_id != "a"
        ]
