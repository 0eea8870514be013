"""Prewarm: what is going to be asked for is in memory before it is, whenever nothing else is done.

Pinned prefixes come from the configuration or from clients, learned ones from what is asked. What
fails here is counted and logged; it is never anybody's error.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import closing
from typing import Literal

import msgspec
import structlog

from runtime.cache.deletion_log import Models, Receipt
from runtime.cache.either import KvStore
from runtime.config.settings import Settings
from runtime.errors import Aborted, HearthError, QueueTimeout, UnknownModel
from runtime.prewarm.growing import GrowingPrompts
from runtime.prewarm.prefix_registry import CONFIGURED, Answered, PrefixRegistry
from runtime.prewarm.prefixes import KEEP_ALIVE_SHARE, warming_of
from runtime.prewarm.task import PrewarmTask, Source, TaskTable
from runtime.supervisor.generation import Generation
from runtime.supervisor.lifecycle import Transition
from runtime.supervisor.news import Listener
from runtime.supervisor.supervisor import Supervisor
from runtime.types import Failed, Finished, GenerateRequest, Usage
from store.keyed_names import Whom

Outcome = Literal["hot", "restored", "computed", "preempted", "failed"]

_PERIOD_S = 240.0
"""80 % of the five minutes that clients call a short time."""

_MIN_PERIOD_S = 1.0

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
        self.num_hits = 0
        self._settings = settings
        self._supervisor = supervisor
        self._kv = kv
        self._pinned = pinned
        self._clock = clock
        self._book = PrefixRegistry(settings, kv)
        self._known = TaskTable()
        self._queue: deque[PrewarmTask] = deque()
        self.growing = GrowingPrompts(settings, supervisor.warm, self._spawn)
        self._generation: Generation | None = None
        """Of the one that is being warmed."""
        self._warm: dict[str, set[str]] = {}
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def period_s(self) -> float:
        """How often to `sweep`: before the shortest of the usual times is over."""
        lives_s = map(self._settings.kv_ttl_of, ["", *self._settings.models])
        life_s = min(filter(None, lives_s), default=_PERIOD_S / KEEP_ALIVE_SHARE)
        return max(min(_PERIOD_S, life_s * KEEP_ALIVE_SHARE), _MIN_PERIOD_S)

    def start(self) -> None:
        """Listen for models that come up."""
        if self._settings.prewarm:
            self._spawn(self._listen(self._supervisor.news.listen()))
        self._spawn(self._work())

    async def stop(self) -> None:
        """Warm nothing any more; remember what was learned."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._book.save()

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

    # What is learned

    def watch(self, request: GenerateRequest, received: Came = None) -> Callable[[Usage], None]:
        """To be told what a request used, once it has finished; it came with that receipt, or now.

        What was deleted since is not learned, however late its client reads the end of its answer.
        """
        came = received or self._kv.receive()
        foreseen = self._known.foreseen_of(request.cache.session_id)
        # What is being computed of it already is taken up by this request.
        self._end_all(one for one in foreseen if one.state != "running")

        def finished(usage: Usage) -> None:
            self._end_all(one for one in foreseen if one.is_open)
            if usage.cache.reason != "deleted":
                answered = Answered(request, came, usage.head)
                self._book.note(answered, time.time(), lambda name: count(name, usage))

        def count(name: str, usage: Usage) -> None:
            if name in self._warm.get(request.model, ()) and usage.num_cached_tokens:
                self.num_hits += 1

        return finished

    def forget(self, whom: Whom, models: Models = None) -> None:
        """What is deleted is not learned from any more, nor warmed again."""
        self._book.forget(whom, models)
        self._end_all(one for one in self._known if one.is_open and _is_gone(self._book, one, whom))
        self.growing.forget(lambda request: self._book.means(whom, request))

    async def forget_stored(self, whom: Whom, models: Models = None) -> None:
        """The same once it is off the disk: nothing comes back that was read from there before."""
        await self._book.forget_stored(whom, models)
        self.forget(whom, models)

    async def sweep(self) -> None:
        """Touch what would expire, try again what had to make way, write down what was learned."""
        await self._book.save()
        for warming in self._known:
            if warming.state == "waiting" and self._clock() - warming.since_s > _MAX_WAIT_S:
                self._fail(warming, QueueTimeout(f"{warming.model} was not loaded in time."))
        if not self._settings.prewarm:
            return
        for model, names in self._warm.items():
            names.intersection_update(self._book.names(model))
            if self._is_loaded(model):
                for prefix in self._book.due(model, time.time(), self.period_s):
                    self._learn(model, prefix.name, "kept")
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
        self._warm[model] = set()
        self._known.take_back(model)
        wanted: set[tuple[str, str]] = set()
        found = await asyncio.to_thread(self._pinned, model)
        pins = await asyncio.to_thread(lambda: list(map(self._book.source_of, found)))
        for request, pin in zip(found, pins, strict=True):
            wanted.add((pin, model))
            cache = msgspec.structs.replace(request.cache, pin=pin)
            self._add(msgspec.structs.replace(request, cache=cache), "config")
        await self._book.open(model)
        for prefix in self._book.learned(model, time.time()):
            self._learn(model, prefix.name, "learned")
        return wanted

    def _learn(self, model: str, name: str, source: Source) -> None:
        prefix = self._book.get(model, name)
        if prefix is not None and not self._known.is_open(model, name):
            self._add(warming_of(prefix, "", model), source).name = name

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
        if warming.name is not None:
            self._warm.setdefault(warming.model, set()).add(warming.name)
            self._book.touched(warming.model, warming.name, time.time())
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


def _is_gone(book: PrefixRegistry, warming: PrewarmTask, whom: Whom) -> bool:
    if warming.name is not None:
        return book.get(warming.model, warming.name) is None
    return warming.is_foreseen and book.means(whom, warming.request)


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
