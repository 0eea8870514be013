"""A rank other than 0: `python -m runtime.worker.distributed.follower`, started by rank 0.

It has no socket to the server and decides nothing: it does with its shard what rank 0 does.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, cast

from runtime.kv.pack import RunKv
from runtime.kv.tiers import folders
from runtime.ranks import KvForm, Split
from runtime.wire import Load
from runtime.worker import model as models
from runtime.worker.code_guard import run_only_installed_code
from runtime.worker.decode import Decoder, warm_decode
from runtime.worker.distributed.disks import RankDisk
from runtime.worker.distributed.launch import join, meeting
from runtime.worker.distributed.leader import Agreement
from runtime.worker.distributed.records import (
    Assemble,
    Begin,
    Broken,
    Channel,
    Computed,
    Cut,
    DiskRecord,
    Dress,
    Free,
    GiveBack,
    Insert,
    Joined,
    Loaded,
    NewKv,
    Prefill,
    Said,
    Score,
    Step,
    Take,
    Write,
)
from runtime.worker.distributed.shards import Rank, RankParts
from runtime.worker.sequence import Sequence, SequenceGroup
from runtime.worker.wired import set_wired
from store.slots import Slots


class OutOfStep(Exception):
    """This rank does not have what rank 0 has."""


_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, OSError, OutOfStep)


class Follower:
    """One shard with its own batches and KV, in which rank 0's numbers name everything."""

    def __init__(
        self, load: Load, channel: Channel, group: Any, asked: queue.SimpleQueue[DiskRecord]
    ) -> None:
        """Load the shard; what is `asked` of its disk is done beside it.

        Raises whatever loading raises.
        """
        options = load.options
        set_wired(options.wired)
        wanted = options.ranks.split if options.ranks is not None else None
        ways: list[Split] = []

        def split(whole: Any) -> None:
            ways.append(models.split(whole, group, wanted))

        self._model = model = models.load(load.spec, lambda _: None, KvForm(load.kv.kv_bits), split)
        model.agree = Agreement(group).wrap
        compiles = models.compiles_kernels()
        models.warm(model, lambda ids, one: warm_decode(model, ids, one, compiles=compiles))
        self._parts = parts = RankParts(model, Rank(group.rank(), group.size(), ways[0]))
        channel.send(Loaded(needs_state=parts.needs_state, unsupported=parts.unsupported))
        self._decoder = Decoder(model, options.max_batch)
        self._kv: dict[int, list[Any]] = {}
        self._runs: dict[int, RunKv] = {}
        self._rows: dict[int, Sequence] = {}
        self._said: list[tuple[int, int]] = []
        self._ended: dict[int, list[Any]] = {}
        slots = Slots(folders(Path(load.kv.root or ""))[0]).of_rank(group.rank())
        self._disk = RankDisk(slots, parts, self._runs, asked, channel.send)

    def do(self, record: Computed) -> None:
        """Do as rank 0 does.

        Raises:
            OutOfStep: it had another outcome here.
        """
        match record:
            case NewKv(kv=number):
                self._kv[number] = self._model.new_kv()
            case Prefill(kv=number, token_ids=token_ids):
                self._model.prefill(token_ids, self._kv[number])
            case Score():
                kv = self._kv[record.kv]
                self._model.score(record.token_ids, kv, record.following, record.num_top)
            case Insert():
                self._insert(record)
            case Step():
                self._step()
            case Said():
                self._compare(record)
            case Take(row=row, kv=number):
                self._kv[number] = self._decoder.take(self._rows.pop(row)) or []
            case Free(numbers=numbers):
                for number in numbers:
                    self._kv.pop(number, None)
                    self._runs.pop(number, None)
            case Begin():
                raise OutOfStep("a model is loaded already")
            case _:
                self._keep(record)

    def _keep(self, record: Cut | Dress | Assemble | Write | GiveBack) -> None:
        runs, parts = self._runs, self._parts
        match record:
            case Cut(kv=number, spans=spans, runs=numbers):
                cut = parts.cut(self._kv[number], spans)
                runs.update(zip(numbers, cut, strict=True))
            case Dress(run=run, of=of, state_of=other):
                kv = runs[of]
                runs[run] = parts.bare(kv) if other is None else parts.with_state(kv, runs[other])
            case Assemble(kv=number, pieces=pieces, num_room=num_room):
                named = [(runs[run], num_tokens) for run, num_tokens in pieces]
                parts.assemble(self._kv[number], named, num_room)
            case Write():
                self._disk.write(record)
            case GiveBack():
                parts.give_back()

    def _insert(self, record: Insert) -> None:
        group = SequenceGroup(
            request=record.request,
            token_ids=record.token_ids,
            num_prompt_tokens=record.num_prompt_tokens,
            max_tokens=record.max_tokens,
            deadline_s=0.0,
            kv=self._kv[record.kv],
        )
        for row in record.rows:
            # What turns tokens into text and tells grammars is rank 0's alone.
            one = Sequence(group, row.index, cast("Any", None), cast("Any", None))
            one.ignores_eos = not row.ends_at_eos
            one.output_token_ids = list(row.said)
            self._rows[row.number] = one
            group.sequences.append(one)
        self._decoder.insert(group, group.sequences, takes=record.takes)

    def _step(self) -> None:
        numbers = {one: number for number, one in self._rows.items()}
        tokens = list(self._decoder.step())
        self._said = [(numbers[token.sequence], token.token_id) for token in tokens]
        self._ended = {numbers[token.sequence]: token.kv or [] for token in tokens if token.is_last}
        for token in tokens:
            token.sequence.output_token_ids.append(token.token_id)

    def _compare(self, record: Said) -> None:
        if record.tokens != self._said or {row for row, _ in record.ended} != set(self._ended):
            raise OutOfStep("the ranks did not decode the same tokens")
        for row, number in record.ended:
            self._kv[number] = self._ended.pop(row)
            del self._rows[row]


def _follow(channel: Channel, backend: str) -> None:
    records: queue.SimpleQueue[Computed] = queue.SimpleQueue()
    asked: queue.SimpleQueue[DiskRecord] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, records, asked), daemon=True).start()
    group = join(backend)
    begin = records.get()
    if not isinstance(begin, Begin):
        raise OutOfStep("rank 0 did not say which model to load")
    follower = Follower(begin.load, channel, group, asked)
    while True:
        follower.do(records.get())


def _listen(
    channel: Channel,
    records: queue.SimpleQueue[Computed],
    asked: queue.SimpleQueue[DiskRecord],
) -> None:
    """The reader thread: where rank 0 ends, this process ends, whatever it waits for."""
    try:
        for record in channel.records():
            if isinstance(record, DiskRecord):
                asked.put(record)
            else:
                records.put(record)
    finally:
        os._exit(0)


def main() -> int:
    """Find rank 0, then follow it until it is gone; 1 when this rank cannot."""
    faulthandler.enable()
    run_only_installed_code()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = meeting()
    channel = Channel(socket.create_connection(own.address))
    channel.send(Joined(rank=own.rank, token=own.token))
    try:
        _follow(channel, own.backend)
    except _FAILURES as error:
        # Rank 0 must hear why before the connection ends.
        traceback.print_exc()
        channel.send(Broken(message=f"{type(error).__name__}: {error}"))
    return 1


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stderr.flush()
        # Interpreter teardown with live mlx threads can abort.
        os._exit(code)
