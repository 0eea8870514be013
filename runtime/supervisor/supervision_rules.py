"""What the settings mean for supervision: limits of states and queues, defaults of requests."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from runtime.config.settings import ModelSettings, Settings
from runtime.prompt.thinking import EFFORT
from runtime.supervisor.failures import BACKOFF_S, BREAKER_S
from runtime.supervisor.health import LOAD_STALL_S
from runtime.supervisor.lifecycle import ModelState
from runtime.supervisor.scheduler import SchedulerLimits
from runtime.timeouts import stop_bound_s
from runtime.types import ChatPrompt, GenerateRequest, ModelSpec, Thinking

_WEDGED_S = 30.0
_CRASHED_S = 60.0
_MARGIN_S = 10.0
_FLUSH_BYTES = 2 << 30


def with_settings(request: GenerateRequest, spec: ModelSpec, settings: Settings) -> GenerateRequest:
    """The request with what it does not say itself, by the name that it asks."""
    own = settings.model(spec.id)
    cache = request.cache
    if cache.ttl_s is None:
        cache = msgspec.structs.replace(cache, ttl_s=settings.kv_ttl_of(spec.id))
    priority = request.priority or own.priority or "default"
    sampling = request.sampling.over(spec.sampling)
    prompt = request.prompt
    if isinstance(prompt, ChatPrompt):
        prompt = _chat_with(prompt, own)
    return msgspec.structs.replace(
        request,
        model=spec.id,
        prompt=prompt,
        sampling=sampling,
        max_tokens=own.max_tokens if request.max_tokens is None else request.max_tokens,
        is_default_max=request.is_default_max or request.max_tokens is None,
        cache=cache,
        priority=priority,
        context=spec.context,
        rules_off=settings.prompt_rules_off(spec.id),
        speculates=settings.model(spec.id).speculates,
        own_rules=settings.own_rules_for(request.client),
        overflow=request.overflow or own.overflow or "refuse",
    )


def _chat_with(prompt: ChatPrompt, own: ModelSettings) -> ChatPrompt:
    """What a model's settings say of prompts, where this one does not."""
    if prompt.thinking.is_unsaid and own.thinking is not None:
        prompt = msgspec.structs.replace(prompt, thinking=Thinking.switched(own.thinking))
    if own.template:
        said = {EFFORT} if prompt.thinking.effort is not None else set[str]()
        usual = {name: one for name, one in own.template.items() if name not in said}
        kwargs = usual | msgspec.json.decode(prompt.template_kwargs, type=dict[str, object])
        kwargs_json = msgspec.json.encode(kwargs).decode()
        prompt = msgspec.structs.replace(prompt, template_kwargs=kwargs_json)
    return prompt


def rules_of(settings: Settings) -> SchedulerLimits:
    """The limits that the settings give. Each state's outlasts what happens inside it."""
    load_s = settings.load_timeout_s + _MARGIN_S
    stop_s = stop_bound_s(settings.stop_timeout_s, settings.kv_write_queue_bytes or _FLUSH_BYTES)
    limits_s: Mapping[ModelState, float] = {
        "waiting_for_memory": settings.max_wait_s,
        "spawning": LOAD_STALL_S + _MARGIN_S,
        "loading": load_s,
        "warming": load_s,
        "draining": settings.deadline_s + _MARGIN_S,
        "flushing": stop_s + _MARGIN_S,
        "stopping": stop_s + _MARGIN_S,
        "wedged": _WEDGED_S,
        "crashed": _CRASHED_S,
        "backing_off": BACKOFF_S[-1],
        "failed": BREAKER_S,
    }
    return SchedulerLimits(
        limits_s=limits_s,
        max_open=settings.max_queue,
        max_open_per_model=settings.max_queue_per_model or settings.max_queue,
    )
