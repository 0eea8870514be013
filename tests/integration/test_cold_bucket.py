"""A bucket as the cold store, over the network: what rests there comes back, whatever fails.

`HEARTH_TEST_S3=http://host:port/bucket` has the first tests run against a real service as well,
with the credentials that `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` name.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Generator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from api.observe.store_metrics import KvCollector
from runtime.cache.maintenance import StoreLimits, expire
from runtime.cache.owned import OpenStore
from runtime.cache.service import KvStore
from runtime.cache.store_opening import open_store
from runtime.types import TokenPrompt
from store import slots
from store.cold import ColdStore, open_cold
from store.disk import disk_bytes
from store.errors import SlotMissing, StoreFailed
from store.recovery import Recovery
from store.types import SlotRow, TensorData
from tests.integration.test_kv_store import (
    prompt,
    repeat,
    reused,
    saved,
    serving,
    stored_tokens,
)
from tests.running_server import hearth, running
from tests.s3_service import BUCKET, KEY, Service
from tests.slot_samples import holds, publish_sample, sample, slot_id
from tests.tiny_models import write_model
from tests.waiting import until

REAL = os.environ.get("HEARTH_TEST_S3")


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str, key: str = KEY) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-ours")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Generator[Service]:
    service = Service()
    with service.running() as endpoint:
        use(monkeypatch, endpoint)
        yield service


@pytest.fixture(params=["ours", "real"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """The address of a bucket that nobody else uses now."""
    with ExitStack() as ending:
        endpoint, _, name = (REAL or "").rpartition("/")
        if request.param == "ours":
            endpoint, name = ending.enter_context(Service().running()), BUCKET
        elif not REAL:
            pytest.skip("HEARTH_TEST_S3 does not name a bucket: only our own service is asked")
        use(monkeypatch, endpoint, os.environ.get("AWS_ACCESS_KEY_ID", KEY))
        yield f"s3://{name}/{uuid.uuid4().hex}"


def big_sample(root: Path, number: int) -> Path:
    """A slot of several parts that do not become smaller."""
    header, ids, tensors = sample(number)
    data = random.Random(5).randbytes(12 << 20)
    tensors.append(TensorData("big", "U8", (len(data),), memoryview(data)))
    return slots.publish(slots.stage(root, header, ids, tensors))


def test_what_was_demoted_comes_back(tmp_path: Path, bucket: str):
    cold = open_cold(tmp_path, bucket)
    path = big_sample(tmp_path, 1)
    before = path.read_bytes()
    told = cold.demote(path)
    assert list(cold.slots()) == [told]
    slots.remove(path)
    assert cold.promote(tmp_path, slot_id(1)).path.read_bytes() == before
    assert cold.delete(slot_id(1))
    assert not cold.delete(slot_id(1))
    assert not list(cold.slots())
    with pytest.raises(SlotMissing):
        cold.promote(tmp_path, slot_id(1))


def fails_everywhere(cold: ColdStore, root: Path) -> list[str]:
    """Nothing is a miss, nothing is left behind; what is said."""
    path = publish_sample(root, 1)
    said: list[str] = []
    calls = (
        lambda: cold.demote(path),
        lambda: cold.promote(root, slot_id(1)),
        lambda: cold.delete(slot_id(1)),
        lambda: list(cold.slots()),
    )
    for call in calls:
        with pytest.raises(StoreFailed) as error:
            call()
        said.append(str(error.value))
    assert holds(path, 1)
    assert not list(root.rglob(".tmp-*"))
    return said


def test_a_bucket_that_is_not_there_is_no_miss(tmp_path: Path, bucket: str):
    said = fails_everywhere(
        open_cold(tmp_path, f"s3://not-{bucket.removeprefix('s3://')}"), tmp_path
    )
    assert all("bucket" in one for one in said)


def test_credentials_that_are_wrong_are_no_miss_and_are_not_said(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another-key-id")
    said = fails_everywhere(open_cold(tmp_path, f"s3://{BUCKET}/x"), tmp_path)
    assert all("InvalidAccessKeyId" in one or "PermissionDenied" in one for one in said)
    assert not any("another-key-id" in one or "a-secret" in one for one in said)


def test_a_service_that_goes_away_while_a_slot_is_read_is_no_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    service = Service()
    with service.running() as endpoint:
        use(monkeypatch, endpoint)
        cold = open_cold(tmp_path, f"s3://{BUCKET}/x")
        path = big_sample(tmp_path, 1)
        before = path.read_bytes()
        cold.demote(path)
        slots.remove(path)
        service.left_bytes = 3 << 20
        with pytest.raises(StoreFailed):
            cold.promote(tmp_path, slot_id(1))
        assert not [one for one in tmp_path.rglob("*") if one.is_file()]
        service.left_bytes = len(before) * 2
        assert cold.promote(tmp_path, slot_id(1)).path.read_bytes() == before


def stored(root: Path, bucket: str) -> tuple[OpenStore, SlotRow]:
    """A store with a slot whose time is over."""
    store = open_store(root, bucket)
    header, ids, tensors = sample(1)
    path = slots.publish(slots.stage(store.root, header, ids, tensors))
    long_ago_s = store.clock.now_s() - 30 * 86_400.0
    row = SlotRow(header=header, disk_bytes=disk_bytes(path), last_used_s=long_ago_s)
    store.index.insert([row]).result()
    return store, row


def expired(store: OpenStore) -> list[str]:
    """What goes to the cold store, or away, as its time is over."""
    limits = StoreLimits(None, 1 << 40, 1e12)
    return [name for news in expire(store, limits) for name in news.ids]


def tiers(store: OpenStore) -> list[str]:
    return [place.tier for place in store.index.places()]


def recover(store: OpenStore) -> Recovery:
    recovery = Recovery(store.root, store.database, store.cold, time.time())
    recovery.run()
    return recovery


def test_a_store_demotes_and_promotes(tmp_path: Path, bucket: str):
    store, row = stored(tmp_path / "kv", bucket)
    assert expired(store) == [row.header.id]
    path = slots.slot_path(store.root, row.header.id)
    assert (tiers(store), path.exists()) == (["cold"], False)
    assert not recover(store).report.has_changed
    assert store.promote(row.header.id)
    assert (tiers(store), holds(path, 1)) == (["warm"], True)
    store.close()


def test_while_the_bucket_is_away_a_store_keeps_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    service = Service()
    with service.running() as endpoint:
        use(monkeypatch, endpoint)
        store, row = stored(tmp_path / "kv", f"s3://{BUCKET}/x")
        assert expired(store) == [row.header.id]
    port = int(endpoint.rpartition(":")[2])
    with pytest.raises(StoreFailed, match="error sending request"):
        store.promote(row.header.id)
    found = publish_sample(store.root, 2)
    report = recover(store).report
    assert report.num_adopted == 1, "the fast disk is put in order all the same"
    assert expired(store) == []
    assert sorted(tiers(store)) == ["cold", "warm"]
    with service.running(port):
        assert store.cold is not None
        store.cold.probe()
        assert store.promote(row.header.id)
    assert holds(slots.slot_path(store.root, row.header.id), 1)
    assert holds(found, 2)
    store.close()


def test_a_store_keeps_everything_when_the_bucket_was_deleted(tmp_path: Path, service: Service):
    store, row = stored(tmp_path / "kv", "s3://another-bucket/x")
    assert expired(store) == []
    assert tiers(store) == ["warm"]
    assert holds(slots.slot_path(store.root, row.header.id), 1)
    store.close()


def shown(kv: KvStore) -> list[str]:
    """What Prometheus is told of the cold store."""
    registry = CollectorRegistry()
    registry.register(KvCollector(kv.figures))
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if line.startswith("hearth_kv_cold")]


async def test_nobody_waits_for_a_bucket_that_is_silent(tmp_path: Path, service: Service):
    """It lets everybody in and answers nobody; there are conversations of several slots each."""
    write_model(tmp_path / "models" / "m")
    said = [prompt(seed) for seed in range(3)]
    settings = {"cold_store": f"s3://{BUCKET}/x", "prewarm": False}
    async with serving(tmp_path, **settings) as (supervisor, kv):
        for tokens in (one.token_ids[:end] for one in said for end in (500, 1500)):
            await reused(supervisor, TokenPrompt(token_ids=tokens), ttl_s=0.1)
        store = await saved(kv, len(said) * 1500)
        work = partial(expire, limits=StoreLimits(None, 10**9, 1e6))
        await repeat(kv, work, lambda: not stored_tokens(store))
        cold = set(store.index.places())
    async with serving(tmp_path, **settings) as (supervisor, kv):
        await until(lambda: kv.cold.state == "ok", "the store is open")
        store = kv.store
        assert store is not None
        with service.silent():
            use = await reused(supervisor, said[0])
            assert (use.tier, use.reason) == ("none", "slower_than_prefill")
            await until(lambda: kv.cold.state == "away", "it is noticed", 60)
            assert shown(kv) == ["hearth_kv_cold_away 1.0"]
            service.asked.clear()
            use = await reused(supervisor, said[1])
            assert (use.tier, use.reason) == ("none", "away")
            assert not any(service.asked), "nobody tries the other slots"
            assert cold <= set(store.index.places()), "all are kept"
            assert kv.status.state == "ok"
        await until(lambda: kv.cold.state == "ok", "somebody asks whether it is back", 60)
        assert shown(kv) == ["hearth_kv_cold_away 0.0"]
        await reused(supervisor, said[2])
        await until(lambda: store.counts["promoted"] >= 2, "it is used again")


async def test_who_looks_is_told_that_the_bucket_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    service = Service()
    with service.running() as endpoint:
        use(monkeypatch, endpoint)
    with running(tmp_path, config=f'cold_store = "s3://{BUCKET}/x"\n') as server:

        def cold() -> str:
            return server.get("/health/ready").json()["cold"]

        await until(lambda: cold() == "away", "it was looked into")
        assert server.figure("hearth_kv_cold_away") == 1
        told = hearth("status", HEARTH_HOME=str(tmp_path), HEARTH_PORT=str(server.port)).stdout
        assert "cold     away: the bucket fails at hearth-owner.json: error sending request" in told
        with service.running(int(endpoint.rpartition(":")[2])):
            await until(lambda: cold() == "ok", "it is back")
        assert server.figure("hearth_kv_cold_away") == 0
