"""What handlers are given: the way from a checked request to an answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from weakref import WeakValueDictionary

import msgspec
from litestar.datastructures import Headers
from litestar.types import Scope

from api.http.answer import Answer
from api.http.caller import caller_in, tenant_of
from api.http.errors import BodyTooLarge
from api.http.hints import hints_in, with_hints
from api.http.limits import bounds_of, check_size, narrowed
from api.http.streams import KeptStreams
from api.http.summarised import SummarisedAnswer
from api.observe.metrics import Meter, Metrics, WaitCollector
from api.observe.record import RequestRecord, record_of
from runtime.cache.service import KvStore
from runtime.config.settings import Settings
from runtime.errors import ContextTooLong
from runtime.keys import ANYONE, needs_of, plain
from runtime.models.catalog import Catalog, Refused
from runtime.prewarm.growing import Following
from runtime.prewarm.prewarm import Prewarm
from runtime.supervisor.generation import Generation
from runtime.supervisor.status import ModelStatus, without_use
from runtime.supervisor.supervisor import Supervisor
from runtime.types import GenerateRequest, ModelSpec


class Gate:
    """Models and requests as handlers see them. There is one for the whole server."""

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
        self._needs = needs_of(settings.api_keys, settings.admin_key)
        num_keys = len(settings.api_keys)
        self.streams = KeptStreams(num_tenants=num_keys + 1 if num_keys else 1)  # and the admin
        self._answers: WeakValueDictionary[str, Answer] = WeakValueDictionary()
        metrics.add(WaitCollector(self.longest_waits_s))

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
        return any(one.is_loaded for one in self.supervisor.status() if one.spec.id == spec.id)

    def may_see_sums(self, scope: Scope) -> bool:
        """Whether who asks may be told of all callers together: not one of several."""
        return self._needs.sums != "admin key" or caller_in(scope).is_admin

    def is_let_in(self, scope: Scope) -> bool:
        """Whether who asks a route that needs no key may be told what the others tell."""
        return self._needs.use == "nothing" or caller_in(scope) != ANYONE

    def status_for(self, scope: Scope) -> tuple[ModelStatus, ...]:
        """The models; one of several tenants is not told what the others do."""
        status = self.supervisor.status()
        return status if self.may_see_sums(scope) else tuple(map(without_use, status))

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

    def submit(
        self,
        scope: Scope,
        requests: Sequence[GenerateRequest],
        following: Following | None = None,
    ) -> Answer:
        """Submit requests for one model, to be answered together. The answer must be closed.

        The answer to a single request may be a summary, with which `following` goes on: that is
        computed while the summary is written.

        Raises:
            RequestRejected: one of them was refused; none of them is kept.
            BodyTooLarge: only a model that sees may be sent as much.
        """
        model, bounds = requests[0].model, bounds_of(scope)
        record, tenant = record_of(scope), tenant_of(scope)
        if record.num_body_bytes > bounds.body_bytes:
            self.check_body(scope, self.spec(model))
        requests = [narrowed(one, bounds.limits) for one in requests]
        hints = hints_in(Headers.from_scope(scope))
        for request in requests:
            check_size(request)
        with ExitStack() as unless_all:
            generations: list[Generation] = []
            for request in requests:
                # Whatever an adapter made of the request: nobody reads another's KV.
                cache = with_hints(request.cache, hints)
                cache = msgspec.structs.replace(cache, tenant=tenant)
                own = msgspec.structs.replace(request, cache=cache)
                generation = self.supervisor.submit(own, record.received)
                unless_all.callback(generation.abort)
                generations.append(generation)
            unless_all.pop_all()
        watch = self._prewarm.watch(generations[0].request)
        meter = self.metrics.meter(model, watch)
        growing = None
        if following is not None:
            growing = self._prewarm.growing.begin(generations[0], following)

        def closed() -> None:
            if growing is not None:
                growing.close()
            self._remember(record)

        answer = self._answer(generations, meter, closed)
        answer.listener = growing.hear if growing is not None else None
        last = generations[0].request.cache
        if last.is_last and last.session_id is None:
            answer.tally.ignored.append("release (it names no conversation)")
        record.model, record.tally, record.generations = model, answer.tally, generations
        self._answers[record.request_id] = answer
        return answer

    def _answer(
        self,
        generations: list[Generation],
        meter: Meter,
        on_closed: Callable[[], None] = lambda: None,
    ) -> Answer:
        """The answer of these, for which what goes of a conversation is summed up first if that is
        wanted.
        """
        request = generations[0].request
        if request.overflow != "summarise" or request.work != "generate":
            return Answer(generations, meter, on_closed)

        received = generations[0].received

        def submit(part: GenerateRequest) -> Generation:
            return self.supervisor.submit(part, received)

        def ask(summary: GenerateRequest) -> Answer:
            return self._answer([submit(summary)], self.metrics.meter(summary.model))

        return SummarisedAnswer(generations, meter, submit, ask, on_closed)

    def foresee(self, scope: Scope, request: GenerateRequest) -> str | None:
        """Have computed what a client is about to ask after a compaction, when nothing else is to
        be done; its id at `/v1/prewarm`, None where it is not computed.
        """
        warming = self._prewarm.foresee(request, record_of(scope).received)
        return plain(warming.id) if warming is not None else None

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
