"""What forks the processes of tests outlives whoever asks it for one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.forked_worker import nursery
from tests.forking import ordered


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
def test_a_server_that_is_killed_while_its_worker_is_forked_takes_no_others_with_it():
    with Path(os.devnull).open("r+b") as nothing:
        for _ in range(5):
            ordered(nursery().address, ["0"], os.environ, [nothing.fileno()] * 4).close()
    nursery().wait_until_ready()
