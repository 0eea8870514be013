"""How the ranks of a model other than 0 are started and joined.

The worker that the server started is rank 0: its socket cannot pass through mlx.launch, which
closes every descriptor. It starts the others itself with the variables that mlx.launch sets for
the ring, those on other hosts by mlx.launch's own remote script. Knows that module.
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

from runtime.worker.rank_records import Broken, Channel, Joined, Record, Reply, Restored

CHANNEL = "HEARTH_RANK_CHANNEL"
TOKEN = "HEARTH_RANK_TOKEN"  # noqa: S105
LOOPBACK = "127.0.0.1"
_BACKEND = "ring"
_FIRST_PORT = 32323
_JOIN_S = 120.0
_LEAVE_S = 5.0
_POLL_S = 0.2
_COMMAND = ["-P", "-m", "runtime.worker.follower"]


class RanksFailed(RuntimeError):
    """The ranks of a model did not come together."""


class Followers:
    """All ranks but 0. `on_lost` is told, from another thread, why one has gone unasked."""

    def __init__(self, hosts: Sequence[str], on_lost: Callable[[str], None]) -> None:
        """Start and join one for each host but the first, this machine as the others reach it.

        Raises:
            RanksFailed: they did not come.
        """
        self._hosts = hosts
        if not mx.distributed.is_available(_BACKEND):
            raise RanksFailed("this build of mlx has no ring; leave ranks out for this model")
        self._on_lost = on_lost
        self._local: list[subprocess.Popen[bytes]] = []
        self._remote: list[Any] = []
        self._channels: dict[int, Channel] = {}
        self._replies: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_leaving = False
        try:
            with (
                TemporaryDirectory(prefix="hearth-ranks-") as folder,
                socket.create_server((self._hosts[0], 0)) as door,
            ):
                self.group = self._meet(Path(folder) / "ring.json", door)
        except OSError as error:
            raise RanksFailed(f"the ranks cannot meet at {self._hosts[0]}: {error}") from error

    def send(self, record: Record) -> None:
        """Tell all of them; one that has gone is noticed by its silence."""
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.send(record)

    def least_restored(self) -> int:
        """What each of them answers to `Restore`: the smallest number of tokens."""
        return min(self._replies.get() for _ in self._channels)

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

    # Starting

    def _meet(self, hostfile: Path, door: socket.socket) -> mx.distributed.Group:
        ring = json.dumps([[place] for place in _places(self._hosts)])
        hostfile.write_text(ring)
        token = secrets.token_hex(16)
        address = f"{self._hosts[0]}:{door.getsockname()[1]}"
        variables = {CHANNEL: address, TOKEN: token, "MLX_HOSTFILE": str(hostfile)}
        for rank, host in enumerate(self._hosts[1:], 1):
            if host == LOOPBACK:
                self._start_local(rank, variables)
            else:
                self._start_remote(rank, host, variables, ring)
        self._await(door, token)
        for rank, channel in self._channels.items():
            threading.Thread(target=self._listen, args=(rank, channel), daemon=True).start()
        os.environ.update(MLX_RANK="0", MLX_HOSTFILE=str(hostfile))
        return join()

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

    def _start_remote(self, rank: int, host: str, variables: dict[str, str], ring: str) -> None:
        names = (CHANNEL, TOKEN)
        exports = [f"{name}={variables[name]}" for name in names]
        files = {"MLX_HOSTFILE": ring}
        process = RemoteProcess(
            rank, host, sys.executable, str(Path.cwd()), files, exports, _COMMAND
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
                raise RanksFailed(f"a rank {why} before it had joined the others")
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
        why = f"rank {rank} of the model has gone"
        try:
            for reply in channel.replies():
                match reply:
                    case Restored(num_tokens=num_tokens):
                        self._replies.put(num_tokens)
                    case Broken(message=message):
                        why = f"rank {rank} of the model cannot go on: {message}"
                        break
                    case Joined():
                        break
        except msgspec.DecodeError as error:
            why = f"rank {rank} of the model cannot be understood: {error}"
        if not self._is_leaving:
            self._on_lost(why)


def join() -> mx.distributed.Group:
    """Join the ring that the environment describes; all ranks return together."""
    group = mx.distributed.init(strict=True, backend=_BACKEND)
    mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group))
    return group


class Meeting(NamedTuple):
    """What a follower was given by rank 0."""

    rank: int
    address: tuple[str, int]
    token: str


def meeting() -> Meeting:
    """Where and as whom this follower joins. Raises KeyError, ValueError: nobody started it so."""
    host, _, port = os.environ[CHANNEL].rpartition(":")
    return Meeting(int(os.environ["MLX_RANK"]), (host, int(port)), os.environ.pop(TOKEN))


def _places(hosts: Sequence[str]) -> list[str]:
    """Where each rank listens for its neighbour: free ports where all are on this machine."""
    if any(host != LOOPBACK for host in hosts):
        return [f"{host}:{_FIRST_PORT + rank}" for rank, host in enumerate(hosts)]
    doors = [socket.create_server((host, 0)) for host in hosts]
    places = [f"{LOOPBACK}:{door.getsockname()[1]}" for door in doors]
    for door in doors:
        door.close()
    return places


def _pass_on(process: Any, pipe: Any) -> None:
    """What a remote rank prints; the script's first line names a file of its own."""
    while data := os.read(pipe.fileno(), 1 << 13):
        is_output = pipe is process.process.stdout
        text = data.decode(errors="replace")
        text = process.preprocess_output(text, True) if is_output else text
        sys.stderr.write(text)
