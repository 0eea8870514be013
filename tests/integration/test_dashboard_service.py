"""The dashboard's figures while they are given to the store."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from api.dashboard.service import Dashboard
from api.http.chains import Chains
from api.http.gate import Gate
from api.http.kv_access import KvAccess
from api.observe.metrics import Metrics
from runtime.cache.contents import KvContents
from runtime.cache.history import History
from runtime.config.settings import Settings
from runtime.models.catalog import Catalog
from runtime.prewarm.prewarm import Prewarm
from runtime.types import Usage
from tests.asking import supervising_with_store
from tests.waiting import until


async def test_what_is_just_given_to_the_store_is_counted_once(tmp_path: Path):
    settings = Settings(home=tmp_path)
    async with supervising_with_store(tmp_path, kv_disk=True) as (supervisor, kv):
        metrics = Metrics(supervisor.status, kv.figures)
        prewarm = Prewarm(settings, supervisor, kv, lambda _: ())
        catalog = Catalog(settings)
        gate = Gate(settings, catalog, supervisor, kv, metrics, prewarm)
        history = History(tmp_path)
        stored = Chains(history, settings, kv.is_deleted)
        access = KvAccess(catalog, kv, KvContents(kv, settings), prewarm, stored)
        desk = Dashboard(gate, access, history)
        await until(lambda: kv.store is not None, "the store is open")
        await desk.snapshot()
        assert kv.store is not None
        may_write = threading.Event()
        busy = kv.store.database.submit(lambda _: may_write.wait())
        metrics.savings.observe("m", Usage(num_prompt_tokens=100))
        keeping = asyncio.create_task(desk.keep())
        await asyncio.sleep(0)
        looking = asyncio.create_task(desk.snapshot())
        await asyncio.wait([looking], timeout=0.2)
        may_write.set()
        assert (await looking).saved_total.prompt_tokens == 100
        await keeping
        assert (await desk.snapshot()).saved_total.prompt_tokens == 100
        busy.result()
