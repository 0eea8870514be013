"""What can be configured of how a model is computed: on how many ranks, and how KV is kept."""

from __future__ import annotations

from typing import Literal, NamedTuple

from runtime.types import Struct

LOOPBACK = "127.0.0.1"

Split = Literal["tensor", "pipeline"]
"""By heads and columns of every layer, or by layers."""

BACKENDS = ("ring", "nccl", "jaccl", "jaccl-ring")
"""Those of mlx.launch whose processes we can start."""


class Ranks(Struct, frozen=True):
    """One host for each rank, rank 0's first, as the others reach it.

    Without a `backend` the worker takes that of mlx.launch; without a `split` what the model has.
    """

    hosts: tuple[str, ...]
    backend: str | None = None
    split: Split | None = None

    @property
    def num_here(self) -> int:
        """How many of them are processes of this machine; rank 0 always is."""
        return 1 + self.hosts[1:].count(LOOPBACK)

    @property
    def are_here(self) -> bool:
        """All of them are on this machine."""
        return self.num_here == len(self.hosts)


def backend_problem(backend: str | None) -> str | None:
    """Why this cannot be a model's backend, or None."""
    if backend is None or backend in BACKENDS:
        return None
    if backend == "mpi":
        return 'backend = "mpi" cannot be used: mpirun would have to start the server; use "ring"'
    return f'backend = "{backend}" is none of {", ".join(BACKENDS)}'


class KvForm(NamedTuple):
    """How KV is kept, beside what the weights say: its precision, and on how many ranks.

    `split` is None where the model decides how it is shared out among them. With `kv_bits` it is
    quantised once a conversation has `kv_start` tokens, a whole number of blocks.
    """

    kv_bits: int | None = None
    num_ranks: int = 1
    split: Split | None = None
    kv_start: int = 0
