"""Who is blamed for the end of a worker: nobody, unless nothing else explains it."""

from __future__ import annotations

import errno
import signal
from typing import get_args

import pytest

from runtime.errors import MachineFailed, WorkerCause, WorkerDied
from runtime.scarcity import is_scarcity, says_so
from runtime.supervisor.blame import BLAMED, Culprits, WorkerEnd, cause_of, died, sentence_of
from runtime.supervisor.failures import LOST_LIMIT, CrashHistory, Verdict
from runtime.wire import EXIT_SANDBOX_LOST


def test_every_cause_has_its_row_and_only_a_crash_and_a_hang_are_held_against_requests():
    assert set(BLAMED) == set(get_args(WorkerCause))
    suspects = {cause for cause, culprits in BLAMED.items() if culprits.requests}
    assert suspects == {"out_of_memory", "crashed", "hung"}
    assert BLAMED["crashed"] == Culprits("crash", requests=True)


@pytest.mark.parametrize(
    ("end", "cause", "said"),
    [
        (WorkerEnd(-signal.SIGSEGV), "crashed", "was killed by SIGSEGV"),
        (WorkerEnd(-signal.SIGKILL), "crashed", "was killed by SIGKILL"),
        (WorkerEnd(1), "crashed", "ended with exit status 1"),
        (WorkerEnd(None), "crashed", "closed its connection"),
        (WorkerEnd(-signal.SIGTERM), "told_to_end", "was killed by SIGTERM"),
        (WorkerEnd(-signal.SIGHUP), "told_to_end", "was killed by SIGHUP"),
        (WorkerEnd(-signal.SIGPIPE), "told_to_end", "was killed by SIGPIPE"),
        (WorkerEnd(-signal.SIGXCPU), "limit", "was killed by SIGXCPU"),
        (WorkerEnd(1, was_up=False), "never_up", "before any model was loaded"),
        (WorkerEnd(-signal.SIGSEGV, was_up=False), "crashed", "was killed by SIGSEGV before"),
        (WorkerEnd(EXIT_SANDBOX_LOST), "helper_lost", "another program ended its sandbox"),
        (WorkerEnd(1, is_lacking=True), "lacking", "no more files, threads, memory or room"),
        (
            WorkerEnd(-signal.SIGKILL, was_out_of_memory=True),
            "out_of_memory",
            "was killed by the system, which was out of memory",
        ),
    ],
)
def test_how_it_ended_tells_the_cause_and_the_sentence(
    end: WorkerEnd, cause: WorkerCause, said: str
):
    assert cause_of(end) == cause
    assert said in sentence_of(end)
    error = died("It is gone.", cause)
    assert error.cause == cause
    is_machine = BLAMED[cause].model == "machine"
    assert type(error) is (MachineFailed if is_machine else WorkerDied)


def test_what_others_did_never_opens_the_breaker():
    history = CrashHistory()
    for _ in range(9):
        assert history.lost_to_others(0.0) == Verdict(hold_s=1.0, is_final=False)
        history.came_up()
    assert history.machine_lacks() == Verdict(hold_s=5.0, is_final=True)
    assert history.crashed(0.0, 0.0, 0.0) == Verdict(hold_s=0.0, is_final=False)


def test_a_model_that_others_let_never_come_up_is_not_loaded_for_ever():
    history = CrashHistory()
    verdicts = [history.lost_to_others(0.0) for _ in range(2 * LOST_LIMIT)]
    held, given_up = Verdict(hold_s=1.0, is_final=False), Verdict(hold_s=5.0, is_final=True)
    assert verdicts == 2 * [*[held] * (LOST_LIMIT - 1), given_up]


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (OSError(errno.EMFILE, "Too many open files"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (MemoryError(), True),
        (BrokenPipeError(), True),
        (RuntimeError("can't start new thread"), True),
        (OSError(errno.ENOENT, "No such file or directory"), False),
        (ValueError("not a model"), False),
    ],
)
def test_what_the_machine_lacks_is_told_from_what_is_wrong(error: Exception, is_one: bool):
    assert is_scarcity(error) is is_one
    wrapped = ValueError("cannot load")
    wrapped.__cause__ = error
    assert is_scarcity(wrapped) is is_one


def test_the_last_error_that_was_printed_counts_and_not_one_before_it():
    lacks = "OSError: [Errno 24] Too many open files: '/dev/null'"
    assert says_so(["Traceback (most recent call last):", lacks])
    assert not says_so([lacks, "ValueError: rope"])
    assert not says_so([])
