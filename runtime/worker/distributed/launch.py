"""How the ranks of a model other than 0 are started and joined.

The worker that the server started is rank 0: its socket cannot pass through mlx.launch, which
closes every descriptor. It starts the others itself with the variables that mlx.launch sets for
a backend, those on other hosts by mlx.launch's own remote script. Knows that module.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec
from mlx._distributed_utils.launch import RemoteProcess

from runtime.ranks import LOOPBACK, Ranks
from runtime.worker.distributed.questions import Questions
from runtime.worker.distributed.records import (
    Answer,
    Broken,
    Channel,
    Joined,
    Loaded,
    Record,
    Reply,
)

CHANNEL = "HEARTH_RANK_CHANNEL"
TOKEN = "HEARTH_RANK_TOKEN"  # noqa: S105
BACKEND = "HEARTH_RANK_BACKEND"
_DEVICES = "MLX_IBV_DEVICES"
_FIRST_PORT = 32323
_JOIN_S = 120.0
_LEAVE_S = 5.0
_POLL_S = 0.2
_COMMAND = ["-P", "-m", "runtime.worker.distributed.follower"]

OnLost = Callable[[str, bool], None]
"""Told why a rank has gone, and whether the next one would go the same way."""


class RanksFailed(RuntimeError):
    """The ranks of a model did not come together."""


class Followers:
    """All ranks but 0. `on_lost` is told, from another thread, why one has gone unasked."""

    def __init__(self, ranks: Ranks, on_lost: OnLost) -> None:
        """Start and join one for each host but the first, this machine as the others reach it.

        Raises:
            RanksFailed: they did not come.
        """
        self._hosts = ranks.hosts
        self._backend = ranks.backend or ("nccl" if mx.cuda.is_available() else "ring")
        if not mx.distributed.is_available(_name(self._backend)):
            why = f"this build of mlx has no {_name(self._backend)}"
            raise RanksFailed(f"{why}; choose another backend, or leave ranks out for this model")
        self._hear_lost = on_lost
        self._local: list[subprocess.Popen[bytes]] = []
        self._remote: list[Any] = []
        self._channels: dict[int, Channel] = {}
        self._loaded: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
        self._questions = Questions(self.send, len(self._hosts) - 1)
        self.ask = self._questions.ask
        self._is_leaving = False
        try:
            self._folder = TemporaryDirectory(prefix="hearth-ranks-", ignore_cleanup_errors=True)
            with self._folder as folder, socket.create_server((self._hosts[0], 0)) as door:
                self.group = self._meet(Path(folder), door)
        except OSError as error:
            raise RanksFailed(f"the ranks cannot meet at {self._hosts[0]}: {error}") from error

    def send(self, record: Record) -> None:
        """Tell all of them; one that has gone is noticed by its silence."""
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.send(record)

    def loaded(self) -> list[Loaded]:
        """What each of them says of its shard, once it has loaded it."""
        return [self._loaded.get() for _ in self._channels]

    def leave(self) -> None:
        """Have them end, and see that they did."""
        self._is_leaving = True
        for channel in self._channels.values():
            channel.close()
        for process in self._local:
            try:
                process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for process in self._remote:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                process.terminate()

    def _on_lost(self, why: str, is_fault: bool) -> None:
        """Whoever is told may end this process at once."""
        self._folder.cleanup()
        self._hear_lost(why, is_fault)

    # Starting

    def _meet(self, folder: Path, door: socket.socket) -> mx.distributed.Group:
        known = _known_by_all(self._backend, self._hosts)
        files = {name: str(folder / name) for name in known.files}
        for name, text in known.files.items():
            Path(files[name]).write_text(text)
        token = secrets.token_hex(16)
        address = f"{self._hosts[0]}:{door.getsockname()[1]}"
        variables = {CHANNEL: address, TOKEN: token, BACKEND: self._backend} | known.variables
        for rank, host in enumerate(self._hosts[1:], 1):
            own = variables | self._device(rank)
            if host == LOOPBACK:
                self._start_local(rank, own | files)
            else:
                self._start_remote(rank, own, known.files)
        self._await(door, token)
        for rank, channel in self._channels.items():
            threading.Thread(target=self._listen, args=(rank, channel), daemon=True).start()
        os.environ.update(known.variables | files | {"MLX_RANK": "0"})
        return join(self._backend)

    def _device(self, rank: int) -> dict[str, str]:
        """Each rank of a host has a GPU of its own; rank 0 has the first."""
        if self._backend != "nccl":
            return {}
        here = (LOOPBACK, self._hosts[0])
        host = self._hosts[rank]
        machine = here if host in here else (host,)
        return {"CUDA_VISIBLE_DEVICES": str(sum(one in machine for one in self._hosts[:rank]))}

    def _start_local(self, rank: int, variables: dict[str, str]) -> None:
        self._local.append(
            subprocess.Popen(
                [sys.executable, *_COMMAND],
                stdin=subprocess.DEVNULL,
                env=dict(os.environ) | variables | {"MLX_RANK": str(rank)},
                # A group of its own: the system ends even a stopped one when rank 0 has gone.
                process_group=0,
            )
        )

    def _start_remote(self, rank: int, variables: dict[str, str], files: dict[str, str]) -> None:
        exports = [f"{name}={value}" for name, value in variables.items()]
        process = RemoteProcess(
            rank, self._hosts[rank], sys.executable, str(Path.cwd()), files, exports, _COMMAND
        )
        self._remote.append(process)
        for pipe in (process.process.stdout, process.process.stderr):
            threading.Thread(target=_pass_on, args=(process, pipe), daemon=True).start()

    def _await(self, door: socket.socket, token: str) -> None:
        door.settimeout(_POLL_S)
        over_s = time.monotonic() + _JOIN_S
        while len(self._channels) < len(self._hosts) - 1:
            processes = [*self._local, *(one.process for one in self._remote)]
            gone = [one.returncode for one in processes if one.poll() is not None]
            if gone or time.monotonic() > over_s:
                self.leave()
                why = f"ended with exit status {gone[0]}" if gone else "did not come in time"
                why = f"a rank {why} before it had joined the others"
                if min(gone, default=0) < 0:  # it was killed
                    self._on_lost(why, False)
                raise RanksFailed(why)
            with contextlib.suppress(TimeoutError):
                self._admit(door.accept()[0], token)

    def _admit(self, sock: socket.socket, token: str) -> None:
        """Take a follower in; whoever does not know the token is sent away."""
        sock.settimeout(_LEAVE_S)
        channel = Channel(sock)
        first: Reply | None = None
        with contextlib.suppress(msgspec.DecodeError):
            first = next(channel.replies(), None)
        if isinstance(first, Joined) and hmac.compare_digest(first.token, token):
            sock.settimeout(None)
            self._channels[first.rank] = channel
        else:
            channel.close()

    def _listen(self, rank: int, channel: Channel) -> None:
        why, is_fault = f"rank {rank} of the model has gone", False
        try:
            for reply in channel.replies():
                match reply:
                    case Loaded():
                        self._loaded.put(reply)
                    case Answer():
                        self._questions.hear(rank, reply)
                    case Broken(message=message):
                        why, is_fault = f"rank {rank} of the model cannot go on: {message}", True
                        break
                    case Joined():
                        break
        except msgspec.DecodeError as error:
            why, is_fault = f"rank {rank} of the model cannot be understood: {error}", True
        if not self._is_leaving:
            self._on_lost(why, is_fault)


def join(backend: str) -> mx.distributed.Group:
    """Join the group that the environment describes; all ranks return together."""
    group = mx.distributed.init(strict=True, backend=_name(backend))
    mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group))
    return group


class Meeting(NamedTuple):
    """What a follower was given by rank 0."""

    rank: int
    address: tuple[str, int]
    token: str
    backend: str


def meeting() -> Meeting:
    """Where and as whom this follower joins. Raises KeyError, ValueError: nobody started it so."""
    host, _, port = os.environ[CHANNEL].rpartition(":")
    rank, token = int(os.environ["MLX_RANK"]), os.environ.pop(TOKEN)
    return Meeting(rank, (host, int(port)), token, os.environ[BACKEND])


class _Known(NamedTuple):
    """What every rank must find in its environment: variables, and others that name files."""

    variables: dict[str, str]
    files: dict[str, str]


def _known_by_all(backend: str, hosts: Sequence[str]) -> _Known:
    """As `launch_ring`, `launch_nccl` and `launch_jaccl` of mlx.launch have it."""
    match backend:
        case "nccl":
            place = {"NCCL_HOST_IP": hosts[0], "NCCL_PORT": str(_free_ports(1)[0])}
            return _Known(place | {"MLX_WORLD_SIZE": str(len(hosts))}, {})
        case "jaccl" | "jaccl-ring":
            devices = os.environ.get(_DEVICES)
            if devices is None:
                raise RanksFailed(f"{backend} needs {_DEVICES}, the file that mlx.launch makes")
            place = {"MLX_JACCL_COORDINATOR": f"{hosts[0]}:{_free_ports(1)[0]}"}
            ring = {"MLX_JACCL_RING": "1"} if backend == "jaccl-ring" else {}
            return _Known(place | ring, {_DEVICES: Path(devices).read_text()})
        case _:
            return _Known({}, {"MLX_HOSTFILE": json.dumps([[one] for one in _places(hosts)])})


def _name(backend: str) -> str:
    """As mx.distributed has it."""
    return backend.removesuffix("-ring")


def _places(hosts: Sequence[str]) -> list[str]:
    """Where each rank listens for its neighbour: free ports where all are on this machine."""
    if any(host != LOOPBACK for host in hosts):
        return [f"{host}:{_FIRST_PORT + rank}" for rank, host in enumerate(hosts)]
    return [f"{LOOPBACK}:{port}" for port in _free_ports(len(hosts))]


def _free_ports(count: int) -> list[int]:
    doors = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports = [door.getsockname()[1] for door in doors]
    for door in doors:
        door.close()
    return ports


def _pass_on(process: Any, pipe: Any) -> None:
    """What a remote rank prints; the script's first line names a file of its own."""
    while data := os.read(pipe.fileno(), 1 << 13):
        is_output = pipe is process.process.stdout
        text = data.decode(errors="replace")
        text = process.preprocess_output(text, True) if is_output else text
        sys.stderr.write(text)
