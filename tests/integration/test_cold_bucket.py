"""A bucket as the cold store, over the network: what rests there comes back, whatever fails.

`HEARTH_TEST_S3=http://host:port/bucket` has the first tests run against a real service as well,
with the credentials that `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` name.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from api.observe.store_metrics import KvCollector
from runtime.cache.service import KvStore
from store.cold import ColdStore, open_cold
from store.errors import SlotMissing, StoreFailed
from tests.integration.test_kv_blocks_kept import NUM_TOKENS, kept, prompt, reused, serving
from tests.running_server import hearth, running
from tests.s3_service import BUCKET, KEY, Service
from tests.tiny_models import write_model
from tests.waiting import until

REAL = os.environ.get("HEARTH_TEST_S3")
NAME = "0123456789abcdef" * 2
NUM_BLOCKS = NUM_TOKENS // 256


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


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_model(tmp_path / "models" / "m")
    return tmp_path


def large(num_bytes: int = 12 << 20) -> list[bytes]:
    """Content that is put in several parts."""
    draw = random.Random(5)
    return [draw.randbytes(1 << 20) for _ in range(num_bytes >> 20)]


def got(cold: ColdStore) -> bytes:
    with cold.get(NAME) as source:
        return b"".join(iter(lambda: source.read(1 << 20), b""))


def test_what_was_put_comes_back(bucket: str):
    cold, content = open_cold(bucket), large()
    told = cold.put(NAME, content)
    assert list(cold.slots()) == [told]
    assert got(cold) == b"".join(content)
    assert cold.delete(NAME)
    assert not cold.delete(NAME)
    assert not list(cold.slots())
    with pytest.raises(SlotMissing):
        got(cold)


def fails_everywhere(cold: ColdStore) -> list[str]:
    """Nothing is a miss; what is said."""
    said: list[str] = []
    calls = (
        lambda: cold.put(NAME, [b"bytes"]),
        lambda: got(cold),
        lambda: cold.delete(NAME),
        lambda: list(cold.slots()),
    )
    for call in calls:
        with pytest.raises(StoreFailed) as error:
            call()
        said.append(str(error.value))
    return said


def test_a_bucket_that_is_not_there_is_no_miss(bucket: str):
    said = fails_everywhere(open_cold(f"s3://not-{bucket.removeprefix('s3://')}"))
    assert all("bucket" in one for one in said)


def test_credentials_that_are_wrong_are_no_miss_and_are_not_said(
    service: Service, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another-key-id")
    said = fails_everywhere(open_cold(f"s3://{BUCKET}/x"))
    assert all("InvalidAccessKeyId" in one or "PermissionDenied" in one for one in said)
    assert not any("another-key-id" in one or "a-secret" in one for one in said)


def test_a_service_that_goes_away_while_a_slot_is_read_is_no_miss(service: Service):
    cold, content = open_cold(f"s3://{BUCKET}/x"), large()
    cold.put(NAME, content)
    service.left_bytes = 3 << 20
    with pytest.raises(StoreFailed):
        got(cold)
    service.left_bytes = 24 << 20
    assert got(cold) == b"".join(content)


async def rest(kv: KvStore, num: int = 1) -> None:
    """Have the store do what it does every minute once so many conversations rest."""
    assert kv.store is not None
    heads = kv.store.heads
    await until(lambda: len(heads.idle()) == num, "they rest")
    await kv.chore(lambda store: store.room.keep())


def num_slots(kv: KvStore, tier: str) -> int:
    assert kv.store is not None
    return sum(num for (_, one), (num, _, _) in kv.store.totals().items() if one == tier)


async def test_what_rests_in_a_bucket_comes_back(home: Path, bucket: str):
    async with serving(home, cold_store=bucket) as (supervisor, kv):
        await reused(supervisor, prompt(1), ttl_s=0.1)
        await kept(kv)
        await rest(kv)
        assert (num_slots(kv, "warm"), num_slots(kv, "cold")) == (0, NUM_BLOCKS)
    async with serving(home, cold_store=bucket, prewarm=False) as (supervisor, kv):
        use = await reused(supervisor, prompt(1))
        assert (use.tier, use.num_tokens >= NUM_BLOCKS * 256) == ("cold", True)


@pytest.mark.usefixtures("service")
async def test_a_store_keeps_everything_when_the_bucket_was_deleted(home: Path):
    async with serving(home, cold_store="s3://another-bucket/x") as (supervisor, kv):
        await reused(supervisor, prompt(1), ttl_s=0.1)
        await kept(kv)
        await rest(kv)
        assert (num_slots(kv, "warm"), num_slots(kv, "cold")) == (NUM_BLOCKS, 0)


def shown(kv: KvStore) -> list[str]:
    """What Prometheus is told of the cold store."""
    registry = CollectorRegistry()
    registry.register(KvCollector(kv.figures))
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if line.startswith("hearth_kv_cold")]


async def test_nobody_waits_for_a_bucket_that_is_silent(home: Path, service: Service):
    """It lets everybody in and answers nobody."""
    settings = {"cold_store": f"s3://{BUCKET}/x", "prewarm": False}
    async with serving(home, **settings) as (supervisor, kv):
        for seed in range(3):
            await reused(supervisor, prompt(seed), ttl_s=0.1)
        await kept(kv, 3)
        await rest(kv, 3)
        assert num_slots(kv, "cold") == 3 * NUM_BLOCKS
    async with serving(home, **settings) as (supervisor, kv):
        await until(lambda: kv.cold.state == "ok", "the store is open")
        store = kv.store
        assert store is not None
        with service.silent():
            use = await reused(supervisor, prompt(0))
            assert (use.tier, use.reason) == ("none", "slower_than_prefill")
            await until(lambda: kv.cold.state == "away", "it is noticed", 60)
            assert shown(kv) == ["hearth_kv_cold_away 1.0"]
            service.asked.clear()
            use = await reused(supervisor, prompt(1))
            assert (use.tier, use.reason) == ("none", "away")
            assert not any(service.asked), "nobody tries the other slots"
            assert num_slots(kv, "cold") >= 2 * NUM_BLOCKS, "what was not computed is kept there"
            assert kv.status.state == "ok"
        await until(lambda: kv.cold.state == "ok", "somebody asks whether it is back", 60)
        assert shown(kv) == ["hearth_kv_cold_away 0.0"]
        assert (await reused(supervisor, prompt(2))).tier == "cold"


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
