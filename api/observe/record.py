"""What is known of one HTTP request while it is served, for its line in the log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import msgspec
from litestar.types import Scope

from runtime.cache.deletion_log import Receipt
from runtime.supervisor.generation import Generation
from runtime.types import Finished, Usage
from store.types import RequestRow


class CompactionInfo(msgspec.Struct, gc=False):
    """A summary that takes the place of a conversation. `prewarm` is the id at `/v1/prewarm` of
    what is computed ahead of the next request; null where nothing is.
    """

    prewarm: str | None = None


class SummaryCost(NamedTuple):
    """What summaries of a conversation that did not fit took: how many there were, and tokens,
    which are not in the answer's usage.
    """

    num_summaries: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Tally:
    """Token counts of one answer; a prompt counts once, however many choices it has."""

    num_choices: int = 1
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0
    first_token_s: float | None = None
    """From the submission to the first piece of the answer; None before it."""
    notes: list[str] = field(default_factory=list[str])
    """Machine-readable remarks on the answer, each once."""
    ignored: list[str] = field(default_factory=list[str])
    """What of the request had no effect."""
    compaction: CompactionInfo | None = None
    summaries: SummaryCost | None = None
    finish_reason: str = ""
    """Why the choice that ended last did."""
    _prompts: dict[int, Usage] = field(default_factory=dict[int, Usage])

    def add(self, finished: Finished) -> None:
        """Count a finished choice, whose `index` counts over all prompts, choice by choice."""
        index, usage = finished.index, finished.usage
        self.finish_reason = finished.reason
        self.ignored += [name for name in usage.ignored if name not in self.ignored]
        self.notes += [note for note in finished.notes if note not in self.notes]
        self.num_output_tokens += usage.num_output_tokens
        self.num_reasoning_tokens += usage.num_reasoning_tokens
        self.num_accepted_tokens += usage.num_accepted_tokens
        self.num_rejected_tokens += usage.num_rejected_tokens
        # Choices share one prefill, so the least any of them found in the cache was found there.
        prompt = index // self.num_choices
        known = self._prompts.get(prompt, usage)
        self._prompts[prompt] = min(known, usage, key=lambda one: one.num_cached_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(usage.num_prompt_tokens for usage in self._prompts.values())

    @property
    def num_cached_tokens(self) -> int:
        return sum(usage.num_cached_tokens for usage in self._prompts.values())

    @property
    def num_written_tokens(self) -> int:
        """Tokens of prompts that were computed and are kept."""
        prompts = self._prompts.values()
        return sum(usage.cache.num_written(usage.num_prompt_tokens) for usage in prompts)

    def num_written_tokens_for(self, keep_s: float) -> int:
        """Those of them that are kept for so long at least, as breakpoints say."""
        return sum(
            usage.cache.num_written_for(keep_s, usage.num_prompt_tokens)
            for usage in self._prompts.values()
        )

    @property
    def least_cached(self) -> Usage | None:
        """The prompt of which the smallest part was reused, once one is finished."""
        shares = [(u.num_cached_tokens / u.num_prompt_tokens, u) for u in self._prompts.values()]
        return min(shares, key=lambda pair: pair[0])[1] if shares else None


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request, filled in by whoever learns something about it."""

    request_id: str
    received: Receipt | None = None
    """Of what is deleted from then on nothing that it asks for is kept."""
    started_s: float = field(default_factory=time.perf_counter)
    started_ns: int = field(default_factory=time.time_ns)
    num_body_bytes: int = 0
    status: int = 0
    error_code: str | None = None
    model: str | None = None
    tally: Tally | None = None
    generations: Sequence[Generation] = ()

    def row(self) -> RequestRow | None:
        """What is remembered of it, once it is answered."""
        tally = self.tally
        if tally is None or self.model is None or (usage := tally.least_cached) is None:
            return None
        sent_ns = [one.sent_ns - one.submitted_ns for one in self.generations if one.sent_ns]
        return RequestRow(
            id=self.request_id,
            model=self.model,
            finished_s=time.time(),
            num_prompt_tokens=tally.num_prompt_tokens,
            num_cached_tokens=tally.num_cached_tokens,
            num_output_tokens=tally.num_output_tokens,
            tier=usage.cache.tier,
            reason=usage.cache.reason or "",
            finish_reason=tally.finish_reason,
            queue_ms=max(sent_ns, default=0) / 1e6,
            restore_ms=usage.cache.restore_ms,
            prefill_ms=usage.prefill_ms,
            decode_ms=usage.decode_ms,
            rewrites=rewrites_of(usage),
        )

    def facts(self) -> dict[str, object]:
        """What its line in the log says beside status and time: counts once they are known."""
        facts: dict[str, object] = {"error": self.error_code, "model": self.model}
        if workers := {one.worker_pid for one in self.generations if one.worker_pid}:
            facts["worker"] = ",".join(str(pid) for pid in sorted(workers))
        if (tally := self.tally) is not None:
            if tally.first_token_s is not None:
                facts["first_token_ms"] = round(tally.first_token_s * 1000, 1)
            facts |= self._counts(tally)
            if (usage := tally.least_cached) is not None:
                facts["rewrites"] = rewrites_of(usage) or None
        return {name: value for name, value in facts.items() if value is not None}

    def _counts(self, tally: Tally) -> dict[str, int]:
        """Tokens; of an answer that was cut short those until then, none if it had not begun."""
        if self.error_code is None:
            return {
                "prompt_tokens": tally.num_prompt_tokens,
                "cached_tokens": tally.num_cached_tokens,
                "output_tokens": tally.num_output_tokens,
            }
        taken = [one for one in self.generations if one.accepted_ns is not None]
        if not taken:
            return {}
        return {
            "prompt_tokens": sum(one.num_prompt_tokens for one in taken),
            "cached_tokens": sum(one.cache.num_tokens for one in taken),
            "computed_tokens": sum(one.num_computed_tokens for one in taken),
            "output_tokens": sum(one.num_output_tokens for one in taken),
        }


def rewrites_of(usage: Usage) -> str:
    """The rules that changed a prompt, each with how many places it changed."""
    return ",".join(f"{one.rule}={one.num_places}" for one in usage.prompt_changes)


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request that this scope belongs to."""
    return cast(RequestRecord, scope["state"]["record"])
