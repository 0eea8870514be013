"""What handlers are given: the way from a checked request to an answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec
from litestar.types import Scope

from api.answer import Answer
from api.errors import BodyTooLarge
from api.limits import bounds_of, check_size, narrowed
from api.lineage import tenant_of
from api.metrics import Metrics, WaitCollector
from api.record import RequestRecord, record_of
from runtime.catalog import Catalog, Refused
from runtime.collection import GarbageCollection
from runtime.errors import ContextTooLong, StoreUnavailable, UnknownConversation
from runtime.generation import Generation
from runtime.housekeeping import Limits
from runtime.inventory import Inventory, Meant, meant, total, whom
from runtime.inventory_views import CollectedView, RemovalView
from runtime.kv_figures import KvFigures
from runtime.kv_store import KvStore
from runtime.model_status import ModelStatus, without_use
from runtime.prewarm import Prewarm
from runtime.progress import Watch
from runtime.settings import Settings
from runtime.store_life import ColdStatus, KvStatus
from runtime.supervisor import Supervisor
from runtime.types import GenerateRequest, ModelSpec
from store.keyed_names import Whom

T = TypeVar("T")


class Gate:
    """The runtime as handlers see it. There is one for the whole server."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        supervisor: Supervisor,
        kv: KvStore,
        metrics: Metrics,
        prewarm: Prewarm,
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self._catalog = catalog
        self.supervisor = supervisor
        self._kv = kv
        self._prewarm = prewarm
        self._answers: WeakValueDictionary[str, Answer] = WeakValueDictionary()
        metrics.add(WaitCollector(self.longest_waits_s))

    @property
    def is_ready(self) -> bool:
        """Every model to be loaded at boot was dealt with."""
        return self.supervisor.is_ready

    @property
    def cache_status(self) -> KvStatus:
        """Whether KV is kept on disk, and why not."""
        return self._kv.status

    @property
    def cold_status(self) -> ColdStatus:
        """Whether KV rests in a cold store that answers, and why it does not."""
        return self._kv.cold

    def figures(self) -> KvFigures:
        """What is counted of KV; on disk, as of the last `refresh_figures`."""
        return self._kv.figures()

    def open_answers(self) -> list[tuple[str, Answer]]:
        """Every HTTP request that is being answered, by its id."""
        return [(name, one) for name, one in self._answers.items() if one.num_open]

    def longest_waits_s(self) -> dict[str, float]:
        """Of those requests of each model of which nothing was computed yet: the oldest's age."""
        now_s = time.monotonic()
        waits_s: dict[str, float] = {}
        for _, one in self.open_answers():
            if one.is_waiting:
                waits_s[one.model] = max(waits_s.get(one.model, 0.0), now_s - one.since_s)
        return waits_s

    def bring_slot(self, model: bytes, slot_id: str) -> None:
        """Have what ends with a slot in its model's memory soon, if that is loaded."""
        self._kv.memory.bring({model: [slot_id]})

    async def refresh_figures(self) -> None:
        """Count what is on disk."""
        await self._kv.refresh()

    async def tend(self, work: Callable[[Inventory], T]) -> T:
        """Have something done to what is on disk, in a thread.

        Raises:
            StoreUnavailable: there is no store, or it fails.
        """
        return await self._kv.tend(lambda store, on_gone: work(Inventory(store, on_gone)))

    async def hot(self, slots: Mapping[bytes, Sequence[str]]) -> set[str]:
        """Those of these slots, by model hash, that are in the memory of a worker now."""
        return await self._kv.memory.hot(slots)

    async def hot_ends(self, ends: Iterable[tuple[bytes, str | None]]) -> set[str]:
        """Of conversations, by model hash and the slot they end in: those slots that are hot."""
        slots: dict[bytes, list[str]] = {}
        for model, leaf in ends:
            if leaf is not None:
                slots.setdefault(model, []).append(leaf)
        return await self.hot(slots)

    async def bring(self, session_id: str, spec: ModelSpec) -> int:
        """Have a conversation's KV in memory soon; its tokens, 0 where there is nothing to bring.

        Raises:
            StoreUnavailable: there is no store, or it fails.
        """
        found = await self.tend(lambda inventory: inventory.of_sessions([session_id]))
        mine = self._kv.memory.hash_of(spec.id)
        for one in found[session_id]:
            if one.model == mine and one.leaf is not None:
                self._kv.memory.bring({one.model: [one.leaf]})
                return one.view.num_tokens
        return 0

    async def remove_conversation(self, name: str) -> RemovalView:
        """Delete a conversation everywhere: on disk, in the workers' memory, in what was learned.

        Raises:
            UnknownConversation: nothing goes by that name.
            StoreUnavailable: there is no store, or it fails.
        """
        self._prewarm.forget(session=name)
        num_forgotten = await self._kv.forget(await self._whom(name))
        try:
            return await self.tend(lambda inventory: inventory.remove_conversation(name))
        except (UnknownConversation, StoreUnavailable) as error:
            is_all = isinstance(error, UnknownConversation) or not self.settings.kv_disk
            if num_forgotten and is_all:
                return RemovalView(num_conversations=1, num_slots=0, is_cut=True)
            raise

    async def _whom(self, name: str) -> Whom:
        """As `inventory.whom`; what the store does not know may be in a worker's memory."""
        with suppress(UnknownConversation, StoreUnavailable):
            return await self.tend(lambda inventory: whom(inventory, name))
        return Whom(session_id=name)

    async def remove_model(self, name: str) -> RemovalView:
        """Delete what was asked of a model by this name, or all of weights by their hash.

        Raises:
            UnknownModel: neither is there such a model, nor was there.
            StoreUnavailable: there is no store, or it fails.
        """
        names, hashes = await self.meant(name)
        if hashes:
            return await self._remove_weights(hashes)
        self._prewarm.forget(models=tuple(names))
        views: list[RemovalView] = []
        for one in sorted(names):
            await self._kv.forget(Whom(model=one))
            views.append(await self.tend(lambda inventory, one=one: inventory.remove_name(one)))
        return total(views)

    async def meant(self, name: str) -> Meant:
        """What of the store somebody means who names a model like that.

        Raises:
            UnknownModel: neither is there such a model, nor was there.
            StoreUnavailable: there is no store, or it fails.
        """
        configured, known = self._catalog.look_up(name)
        return await self.tend(lambda inventory: meant(inventory, name, configured, known))

    async def remove_all(self) -> RemovalView:
        """Delete everything there is. Raises StoreUnavailable."""
        self._prewarm.forget(models=None)
        await self._kv.forget(Whom())
        return await self.tend(lambda inventory: inventory.remove_all())

    async def _remove_weights(self, models: Collection[bytes]) -> RemovalView:
        self._prewarm.forget(models=None)
        await self._kv.forget(Whom(), models)
        return await self.tend(lambda inventory: inventory.remove_models(models))

    async def identify(self, spec: ModelSpec) -> bytes:
        """The model hash of a model as it is now.

        Raises:
            InterchangeFailed: its files cannot be read.
            StoreUnavailable: there is no store, or it fails.
        """
        form = self.settings.kv_form_of(spec.id)
        return await self.tend(lambda inventory: inventory.identify(spec, form))

    async def collect_garbage(self, watch: Watch, should_stop: Callable[[], bool]) -> CollectedView:
        """Do now what is done to the store now and then.

        Raises:
            StoreUnavailable: there is no store, it fails, or the server is stopping.
        """
        loaded = self._kv.loaded_models()
        collection = GarbageCollection(Limits.of(self.settings), loaded, watch, should_stop)
        await self._kv.chore(collection.run)
        if collection.outcome is None:
            raise StoreUnavailable(f"It was not done to the end: {self.cache_status.message}.")
        return collection.outcome

    def tell_slots(self) -> None:
        """Have the workers look at what is on disk again."""
        self._kv.on_slots()

    def spec(self, name: str | None) -> ModelSpec:
        """The model of that name; the default one when none is named.

        Raises:
            UnknownModel: there is no such model.
        """
        return self._catalog.want(name or self._catalog.default_name)

    def refused_for(self, scope: Scope) -> Mapping[str, Refused]:
        """The models that cannot be used, and why; a tenant is not told where things lie."""
        refused = self._catalog.refused
        if not tenant_of(scope):
            return refused
        return {name: one._replace(reason=one.public_reason) for name, one in refused.items()}

    def is_loaded(self, spec: ModelSpec) -> bool:
        """Whether a request need not wait for the model to be loaded."""
        states = (one.state for one in self.status() if one.spec.id == spec.id)
        return next(states, "cold") in ("ready", "busy")

    def status(self) -> tuple[ModelStatus, ...]:
        """Every model that can be named."""
        return self.supervisor.status()

    def status_for(self, scope: Scope) -> tuple[ModelStatus, ...]:
        """The same for one of several tenants, who is not told what the others do."""
        status = self.status()
        if tenant_of(scope) and len(self.settings.api_keys) > 1:
            return tuple(without_use(one) for one in status)
        return status

    async def count(self, request: GenerateRequest) -> int:
        """The number of tokens of the request's prompt, which is exact unless it is far too long.

        Raises:
            HearthError: the prompt is refused for something else, or its worker failed.
        """
        check_size(request)
        own_id = f"{request.request_id}-{secrets.token_hex(6)}"  # aborting it must meet no other
        counted = msgspec.structs.replace(
            request, request_id=own_id, work="count", keep_alive_s=None
        )
        generation = self.supervisor.submit(counted)
        try:
            return await generation.accepted()
        except ContextTooLong as error:
            return error.num_tokens
        finally:
            generation.abort()

    def has_sight(self) -> bool:
        """Whether any model that can be named sees."""
        return any(spec.sees for spec in self._catalog.models())

    def check_body(self, scope: Scope, spec: ModelSpec) -> None:
        """Refuse a body that only a model that sees may be sent.

        Raises:
            BodyTooLarge: it has more bytes than text may have.
        """
        bounds = bounds_of(scope)
        if record_of(scope).num_body_bytes > bounds.body_bytes and not spec.sees:
            raise BodyTooLarge(bounds.body_bytes, bounds.body_setting)

    def submit(self, scope: Scope, requests: Sequence[GenerateRequest]) -> Answer:
        """Submit requests for one model, to be answered together. The answer must be closed.

        Raises:
            RequestRejected: one of them was refused; none of them is kept.
            BodyTooLarge: only a model that sees may be sent as much.
        """
        model = requests[0].model
        self.check_body(scope, self.spec(model))
        requests = [narrowed(one, bounds_of(scope).limits) for one in requests]
        for request in requests:
            check_size(request)
        with ExitStack() as unless_all:
            generations: list[Generation] = []
            for request in requests:
                # Whatever an adapter made of the request: nobody reads another's KV.
                cache = msgspec.structs.replace(request.cache, tenant=tenant_of(scope))
                own = msgspec.structs.replace(request, cache=cache)
                generation = self.supervisor.submit(own)
                unless_all.callback(generation.abort)
                generations.append(generation)
            unless_all.pop_all()
        watch = self._prewarm.watch(generations[0].request)
        record = record_of(scope)
        answer = Answer(
            generations, self.metrics.meter(model, watch), lambda: self._remember(record)
        )
        record.model, record.tally, record.generations = model, answer.tally, generations
        self._answers[record.request_id] = answer
        return answer

    def _remember(self, record: RequestRecord) -> None:
        if (row := record.row()) is not None:
            self._kv.requests.add(row)

    def cancel(self, request_id: str) -> int:
        """End a request by the id of its answer or of the HTTP request; its open prompts.

        Raises:
            UnknownRequest: none of that id is open.
        """
        answer = self._answers.get(request_id)
        num_open = answer.num_open if answer is not None else 0
        if answer is None or not num_open:
            return self.supervisor.cancel(request_id)
        answer.close()
        return num_open
