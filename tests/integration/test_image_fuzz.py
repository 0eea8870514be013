"""Images of any bytes in parts of any shape: seen or refused, in bounded memory, nothing else."""

from __future__ import annotations

import json

import psutil
import pytest

from tests.image_mutations import requests
from tests.image_requests import WAYS, answered
from tests.running_server import RunningServer
from tests.tiny_vlms import encoded, picture

MOST_GROWTH_BYTES = 400 << 20
"""An image may have 50 million pixels, of which some copies are made; none of them stays."""


class Memory:
    """What the server's processes hold at most."""

    def __init__(self, server: RunningServer) -> None:
        self._own = psutil.Process(server.process.pid)
        self._worker = psutil.Process(server.worker_pid())
        self.start_bytes = self.now_bytes()
        self.peak_bytes = self.start_bytes

    def now_bytes(self) -> int:
        return int(self._own.memory_info().rss + self._worker.memory_info().rss)

    def look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.now_bytes())


def send(server: RunningServer, seeds: range) -> dict[int, int]:
    """How many were answered with which status; the worker that began is the one that ends."""
    worker = server.worker_pid()
    memory = Memory(server)
    statuses: dict[int, int] = {}
    for seed in seeds:
        path, body = requests(seed)
        found = server.request("POST", path, json=body)
        said = f"seed {seed}: {found.status_code} {found.text[:300]} for {json.dumps(body)[:300]}"
        assert found.status_code in (200, 400), said
        assert found.status_code == 200 or found.json()["error"], said
        statuses[found.status_code] = statuses.get(found.status_code, 0) + 1
        if seed % 50 == 0:
            memory.look()
    assert server.worker_pid() == worker
    assert memory.peak_bytes - memory.start_bytes < MOST_GROWTH_BYTES
    return statuses


def test_images_of_any_bytes_are_seen_or_refused(seeing_server: RunningServer):
    way, _ = WAYS["chat"]
    good = way(encoded(picture(9)))
    before = answered(seeing_server, good)
    statuses = send(seeing_server, range(200))
    assert min(statuses[200], statuses[400]) > 20
    assert answered(seeing_server, good) == before


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_thousands_of_images_of_any_bytes_are_seen_or_refused(seeing_server: RunningServer):
    statuses = send(seeing_server, range(200, 5_200))
    assert sum(statuses.values()) == 5_000
