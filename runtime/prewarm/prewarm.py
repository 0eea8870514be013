"""Prewarm: what is going to be asked for is in memory before it is, whenever nothing else is done.

Prompts are named by the configuration, announced by clients, or foreseen. What fails here is
counted and logged; it is never anybody's error.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import closing
from hashlib import blake2b
from typing import Literal

import msgspec
import structlog

from runtime.cache.deletion_log import Receipt
from runtime.cache.service import KvStore
from runtime.config.settings import Settings
from runtime.errors import Aborted, HearthError, QueueTimeout, UnknownModel
from runtime.prewarm.growing import GrowingPrompts
from runtime.prewarm.task import PrewarmTask, Source, TaskTable
from runtime.supervisor.generation import Generation
from runtime.supervisor.lifecycle import Transition
from runtime.supervisor.news import Listener
from runtime.supervisor.supervisor import Supervisor
from runtime.types import ChatPrompt, Failed, Finished, GenerateRequest, Usage
from store.keyed_names import Asker, Whom

Outcome = Literal["hot", "restored", "computed", "preempted", "failed"]

CONFIGURED = "config:"
"""So begins the name of whoever pins what the configuration wants."""

PERIOD_S = 240.0
"""How often to `sweep`."""

_MAX_WAIT_S = 86_400.0
"""So long a prompt waits for its model to be loaded."""

_MAX_FORESEEN = 8
Came = Receipt | None

_log = structlog.stdlib.get_logger("hearth.prewarm")


class Prewarm:
    """Warms one prompt at a time. It belongs to the event loop.

    `pinned` gives the requests that the configuration names for a model, or logs why it cannot.
    """

    def __init__(
        self,
        settings: Settings,
        supervisor: Supervisor,
        kv: KvStore,
        pinned: Callable[[str], Sequence[GenerateRequest]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts: Counter[tuple[Outcome, Source]] = Counter()
        self.tokens: Counter[Source] = Counter()
        self._settings = settings
        self._supervisor = supervisor
        self._kv = kv
        self._pinned = pinned
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._known = TaskTable()
        self._queue: deque[PrewarmTask] = deque()
        self.growing = GrowingPrompts(settings, supervisor.warm, self._spawn)
        self._generation: Generation | None = None
        """Of the one that is being warmed."""
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Listen for models that come up."""
        if self._settings.prewarm:
            self._spawn(self._listen(self._supervisor.news.listen()))
        self._spawn(self._work())

    async def stop(self) -> None:
        """Warm nothing any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # What clients may ask for

    def ask(self, request: GenerateRequest, received: Came = None, *, loads: bool) -> PrewarmTask:
        """Warm a prompt when its model is loaded; with `loads` have it loaded.

        It was asked for with that receipt, or now.

        Raises:
            Overloaded: as many are open as may be.
            RequestRejected: the model cannot be loaded now.
        """
        self._known.check_room(self._settings.max_queue)
        is_loaded = self._is_loaded(request.model)
        wish = self._supervisor.load(request.model) if loads and not is_loaded else None
        warming = self._add(request, "request", received or self._kv.receive())
        if wish is not None:
            self._spawn(self._loaded(warming, wish.granted()))
        elif not is_loaded:
            warming.state = "waiting"
        return warming

    def foresee(self, request: GenerateRequest, received: Came = None) -> PrewarmTask | None:
        """Warm what follows a compaction, one for each conversation; None where that is off."""
        is_off = not self._settings.prewarm or request.cache.mode == "off"
        if is_off or not self._is_loaded(request.model):
            return None
        self._end_all(self._known.foreseen_of(request.cache.session_id))
        is_full = len(self._known.foreseen()) >= _MAX_FORESEEN
        return None if is_full else self._add(request, "compaction", received)

    def _end_all(self, tasks: Iterable[PrewarmTask]) -> None:
        for warming in tasks:
            self._end(warming)

    def _end(self, warming: PrewarmTask) -> None:
        was_running = warming.state == "running"
        warming.end("cancelled")
        if was_running and self._generation is not None:
            self._generation.abort()

    def find(self, warming_id: str) -> PrewarmTask | None:
        """One that was asked for lately."""
        warming = self._known.get(warming_id)
        refusal = self._kv.pins.refused_pins.get(warming_id)
        if warming is not None and refusal is not None:
            warming.error, warming.is_pinned = refusal.message, False
        return warming

    async def check_pins(self, tenant: str, num_bytes: int) -> None:
        """See that a tenant may pin so much more. Raises PinsFull."""
        await self._kv.pins.check_pins(tenant, num_bytes)

    async def cancel(self, warming_id: str) -> bool:
        """Warm it no more and take its pin back; False when nothing is known of it."""
        warming = self._known.get(warming_id)
        if warming is not None and warming.is_open:
            self._end(warming)
        num_pins = await self._kv.pins.take_back(warming_id)
        return warming is not None or num_pins > 0

    # What others ask

    def watch(self, request: GenerateRequest) -> Callable[[], None]:
        """A request was taken in; to be told once it has finished."""
        foreseen = self._known.foreseen_of(request.cache.session_id)
        # What is being computed of it already is taken up by this request.
        self._end_all(one for one in foreseen if one.state != "running")
        return lambda: self._end_all(one for one in foreseen if one.is_open)

    def forget(self, whom: Whom) -> None:
        """What goes on from what is deleted is not warmed any more."""
        foreseen = self._known.foreseen()
        self._end_all(one for one in foreseen if self._means(whom, one.request))
        self.growing.forget(lambda request: self._means(whom, request))

    async def sweep(self) -> None:
        """Try again what had to make way."""
        for warming in self._known:
            if warming.state == "waiting" and self._clock() - warming.since_s > _MAX_WAIT_S:
                self._fail(warming, QueueTimeout(f"{warming.model} was not loaded in time."))
        if self._settings.prewarm:
            self._release()

    # Inside

    async def _listen(self, listener: Listener[Transition]) -> None:
        with closing(listener):
            while not listener.is_closed:
                batch = await listener.next()
                for step in batch.items if batch is not None else ():
                    await self._on_step(step)

    async def _on_step(self, step: Transition) -> None:
        if step.event != "up" or step.after != "ready":
            return
        wanted: set[tuple[str, str]] = set()
        for model in self._supervisor.names_of(step.model):
            wanted |= await self._want(model)
        self._release()
        await self._kv.pins.unpin_all(
            step.model,
            lambda source, name: source.startswith(CONFIGURED) and (source, name) not in wanted,
        )

    async def _want(self, model: str) -> set[tuple[str, str]]:
        """Queue what one name of a model that came up wants warm; its pins and itself."""
        self._known.take_back(model)
        wanted: set[tuple[str, str]] = set()
        found = await asyncio.to_thread(self._pinned, model)
        pins = await asyncio.to_thread(lambda: list(map(self._source_of, found)))
        for request, pin in zip(found, pins, strict=True):
            wanted.add((pin, model))
            cache = msgspec.structs.replace(request.cache, pin=pin)
            self._add(msgspec.structs.replace(request, cache=cache), "config")
        return wanted

    def _source_of(self, request: GenerateRequest) -> str:
        """Who pins a prompt of the configuration: another one for each text and model, which says
        nothing of it to who has no secret.

        It takes as long as the prompt is.
        """
        assert isinstance(request.prompt, ChatPrompt)
        tenant = request.cache.tenant
        content = (request.prompt, "", tenant) if tenant else (request.prompt, "")
        packed = msgspec.msgpack.encode(content)
        mark = blake2b(packed, digest_size=16, key=self._secret).hexdigest()
        return f"{CONFIGURED}{request.model}:{mark}"

    def _means(self, whom: Whom, request: GenerateRequest) -> bool:
        """Whether a deletion means a request, as far as that is known without its tokens."""
        return whom.means(Asker(request.model, request.cache.session_id), self._secret)

    @property
    def _secret(self) -> bytes:
        store = self._kv.store
        return store.secret if store is not None else self._key

    def _release(self) -> None:
        """What waits for a model that is loaded now."""
        for warming in self._known:
            if warming.state == "waiting" and self._is_loaded(warming.model):
                self._enqueue(warming)

    def _add(self, asked: GenerateRequest, source: Source, came: Came = None) -> PrewarmTask:
        warming = self._known.add(asked, source, self._clock(), came)
        self._enqueue(warming)
        return warming

    def _enqueue(self, warming: PrewarmTask) -> None:
        warming.state = "queued"
        self._queue.append(warming)
        self._wake.set()

    async def _loaded(self, warming: PrewarmTask, granted: Coroutine[None, None, None]) -> None:
        warming.state = "waiting"
        try:
            await granted
        except HearthError as error:
            self._fail(warming, error)
        else:
            self._release()

    async def _work(self) -> None:
        while True:
            while self._queue:
                warming = self._queue.popleft()
                warming.end_if_late(self._clock())
                if warming.state == "queued":
                    await self._warm_up(warming)
            self._wake.clear()
            await self._wake.wait()

    async def _warm_up(self, warming: PrewarmTask) -> None:
        try:
            generation = self._supervisor.warm(warming.request, warming.received)
            if generation is None:
                warming.put_off()
                return
            warming.state = "running"
            self._generation = generation
            await self._follow(warming, generation)
        except Aborted:
            if warming.state == "running":
                self.counts["preempted", warming.source] += 1
                warming.put_off()
        except HearthError as error:
            self._fail(warming, error)

    async def _follow(self, warming: PrewarmTask, generation: Generation) -> None:
        """Raises HearthError when it fails, Aborted when it had to make way."""
        started_s = time.monotonic()
        try:
            await generation.accepted()
            if (usage := await _used(generation)) is not None:
                self._complete(warming, usage, (time.monotonic() - started_s) * 1000)
        finally:
            self._generation = None
            generation.abort()

    def _complete(self, warming: PrewarmTask, usage: Usage, elapsed_ms: float) -> None:
        cache = usage.cache
        warming.end("completed")
        warming.num_tokens, warming.num_cached_tokens = usage.num_prompt_tokens, cache.num_tokens
        warming.tier, warming.elapsed_ms = cache.tier, elapsed_ms
        outcome = _outcome_of(usage)
        self.counts[outcome, warming.source] += 1
        self.tokens[warming.source] += usage.num_prompt_tokens
        _log.debug("prewarmed", model=warming.model, source=warming.source, outcome=outcome)

    def _fail(self, warming: PrewarmTask, error: HearthError) -> None:
        """Whoever asked is told why; the log has the code, as a message may quote the prompt."""
        warming.end("failed")
        warming.error = error.message
        self.counts["failed", warming.source] += 1
        _log.warning("not prewarmed", model=warming.model, source=warming.source, why=error.code)

    def _is_loaded(self, model: str) -> bool:
        try:
            return self._supervisor.status_of(model).is_loaded
        except UnknownModel:  # its files are gone; they may come back
            return False

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _used(generation: Generation) -> Usage | None:
    """What it used, when it has ended. Raises HearthError when it fails, Aborted when it had to
    make way.
    """
    usage: Usage | None = None
    while chunks := await generation.next_chunks():
        match chunks[-1]:
            case Failed(code=Aborted.code, message=message):
                raise Aborted(message)
            case Failed(code=code, message=message):
                error = HearthError(message)
                error.code = code
                raise error
            case Finished(usage=used):
                usage = used
            case _:
                pass
    return usage


def _outcome_of(usage: Usage) -> Outcome:
    cache = usage.cache
    if cache.reason is None or cache.num_tokens * 2 > usage.num_prompt_tokens:
        return "hot" if cache.tier == "hot" else "restored"
    return "computed"
