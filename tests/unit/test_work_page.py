"""For whom a process worked is known after its death, whenever that was."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from runtime.work_page import WorkPage, new_page

WORKS = """
import sys
from runtime.work_page import WorkPage
page = WorkPage(int(sys.argv[1]))
few, many = ["a"], [f"request-{number}" for number in range(200)]
page.say("intake", ["b"])
page.say("engine", few)
print("works", flush=True)
while True:
    page.say("engine", many)
    page.say("engine", few)
"""


@pytest.fixture
def fd():
    fd = new_page()
    yield fd
    os.close(fd)


def test_nobody_is_worked_for_at_first(fd: int):
    page = WorkPage(fd)
    assert (page.read("intake"), page.read("engine")) == ((), ())


def test_each_part_says_for_whom_it_works_until_it_says_otherwise(fd: int):
    worker, server = WorkPage(fd), WorkPage(fd)
    worker.say("intake", ["é"])
    worker.say("engine", ["b", "c"])
    assert (server.read("intake"), server.read("engine")) == (("é",), ("b", "c"))
    worker.say("engine", [])
    assert (server.read("intake"), server.read("engine")) == (("é",), ())


def test_of_more_requests_than_fit_the_first_ones_stand_there(fd: int):
    page = WorkPage(fd)
    page.say("intake", ["i"])
    page.say("engine", [f"{number:036}" for number in range(1000)])
    assert page.read("engine")[:400] == tuple(f"{number:036}" for number in range(400))
    assert page.read("intake") == ("i",)


@pytest.mark.parametrize("seed", range(6))
def test_what_a_killed_process_said_last_is_read_whole(fd: int, seed: int):
    few, many = ("a",), tuple(f"request-{number}" for number in range(200))
    command = [sys.executable, "-c", WORKS, str(fd)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[fd]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"works\n"
        page = WorkPage(fd)
        for _ in range(300 * seed):  # so that it dies at different moments
            page.read("engine")
        process.kill()
    assert page.read("engine") in {few, many}
    assert page.read("intake") == ("b",)
