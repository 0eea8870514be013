"""Who is to blame for the end of a worker, decided purely: nobody, unless nothing else explains it.

A model that is blamed is not tried again for a while. A request that is blamed is suspect: it is
tried alone, and refused when another worker dies of it (`failures.Quarantine`).
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Literal, NamedTuple

from runtime.errors import MachineFailed, WorkerCause, WorkerDied, WorkerError
from runtime.supervisor.crashes import name_of_signal
from runtime.types import Struct
from runtime.wire import EXIT_SANDBOX_LOST

_SENT = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGALRM,
        signal.SIGPIPE,
    }
)
"""No worker meets one of them by what it computes: somebody sent it, or went away."""
_OF_LIMITS = frozenset({signal.SIGXCPU, signal.SIGXFSZ})
"""The system sends them where a limit of this account's (ulimit) is used up."""


class Culprits(NamedTuple):
    """What follows for the model, and whether what was computed becomes suspect."""

    model: Literal["nobody", "machine", "crash", "unfit"]
    """`nobody`: requests wait for another process; `machine`: they are told what it lacks."""
    requests: bool


BLAMED: Mapping[WorkerCause, Culprits] = {
    "not_started": Culprits("machine", False),  # files, processes or memory of this machine
    "never_up": Culprits("machine", False),  # its imports failed before it was told of a model
    "lacking": Culprits("machine", False),  # files, threads, memory or room, as it says itself
    "limit": Culprits("machine", False),  # a limit of this account's was used up
    "helper_lost": Culprits("nobody", False),  # its sandbox was ended by somebody
    "told_to_end": Culprits("nobody", False),  # a signal that only others send
    "out_of_memory": Culprits("crash", True),  # loaded again at once it would take it again
    "crashed": Culprits("crash", True),
    "hung": Culprits("crash", True),
    "unfit": Culprits("unfit", False),  # its files cannot be loaded, or not in time
}
"""By what a worker ended of."""


class WorkerEnd(Struct, frozen=True):
    """How a process ended by itself. `returncode` is as of `subprocess`; None while it still runs.

    `was_up`: it had said that it is there. `was_out_of_memory`: it was killed for it, or an
    allocation failed. `is_lacking`: its last words are that the machine gives it no more.
    """

    returncode: int | None
    was_up: bool = True
    was_out_of_memory: bool = False
    is_lacking: bool = False


def cause_of(end: WorkerEnd) -> WorkerCause:
    """What a process ended of that nobody here had asked to, or had given up."""
    code = end.returncode
    number = -code if code is not None and code < 0 else None
    if code == EXIT_SANDBOX_LOST:
        return "helper_lost"
    if number in _OF_LIMITS:
        return "limit"
    if end.was_out_of_memory:
        return "out_of_memory"
    if number in _SENT:
        return "told_to_end"
    if not end.was_up and number is None:  # its imports failed
        return "never_up"
    return "lacking" if end.is_lacking else "crashed"


def sentence_of(end: WorkerEnd) -> str:
    """How a process ended, as the rest of a sentence about it."""
    code = end.returncode
    if code is None:
        return "closed its connection"
    if code == EXIT_SANDBOX_LOST:
        return (
            "ended because another program ended its sandbox, the process beside it that reads "
            "prompts: have whatever ends processes on this machine leave those of Hearth alone"
        )
    if end.was_out_of_memory and code == -signal.SIGKILL:
        return "was killed by the system, which was out of memory"
    how = f"was killed by {name_of_signal(code)}" if code < 0 else f"ended with exit status {code}"
    if not end.was_up:
        return f"{how} before any model was loaded"
    if end.is_lacking:
        return f"{how}, as the machine has no more files, threads, memory or room on disk for it"
    return how


def died(message: str, cause: WorkerCause) -> WorkerError:
    """The error of a worker that ended so."""
    if BLAMED[cause].model == "machine":
        return MachineFailed(message, cause)
    error = WorkerDied(message)
    error.cause = cause
    return error
