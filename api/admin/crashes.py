"""`/admin/crashes`: what is known of workers that were lost. For this machine only."""

from __future__ import annotations

import asyncio

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath

from api.admin.cache import operator_only
from api.http.gate import Gate
from runtime.errors import UnknownCrash
from runtime.supervisor.crashes import Crashes, CrashRecord


class CrashSummary(msgspec.Struct, gc=False):
    """One lost worker. `at_s` is seconds since 1970; `message` is what its requests were told."""

    id: str
    at_s: float
    model: str
    code: str
    message: str
    phase: str
    signal: str | None
    exit_status: int | None


class CrashListing(msgspec.Struct, gc=False):
    """The latest first. There are no more than are kept."""

    crashes: list[CrashSummary]


@get("/admin/crashes", tags=["Admin"], guards=[operator_only])
async def list_crashes(gate: NamedDependency[Gate]) -> CrashListing:
    """Every worker that was lost and is still on record, the latest first."""
    records = await asyncio.to_thread(_crashes(gate).records)
    return CrashListing(
        [
            CrashSummary(
                id=one.id,
                at_s=one.at_s,
                model=one.model,
                code=one.code,
                message=one.message,
                phase=one.phase,
                signal=one.signal,
                exit_status=one.exit_status,
            )
            for one in records
        ]
    )


@get("/admin/crashes/{crash_id:str}", tags=["Admin"], guards=[operator_only])
async def get_crash(gate: NamedDependency[Gate], crash_id: FromPath[str]) -> CrashRecord:
    """Everything that is known of one of them: what it did, memory, stacks, last lines."""
    record = await asyncio.to_thread(_crashes(gate).find, crash_id)
    if record is None:
        raise UnknownCrash(crash_id)
    return record


def _crashes(gate: Gate) -> Crashes:
    return Crashes(gate.settings.home / "crashes")


HANDLERS = [list_crashes, get_crash]
