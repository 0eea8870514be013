"""A rank other than 0: `python -m runtime.worker.follower`, started by rank 0 of a model.

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
from typing import Any, cast

from runtime.kv.blocks import HashChain
from runtime.kv.ground import Ground
from runtime.kv.tiers import Tiers
from runtime.kv.trail import Trail
from runtime.wire import Load
from runtime.worker import model as models
from runtime.worker.decode import Decoder, warm_decode
from runtime.worker.lead import Agreement
from runtime.worker.rank_records import (
    Begin,
    Broken,
    Channel,
    Finish,
    Free,
    Insert,
    Joined,
    Keep,
    News,
    Pin,
    Prefill,
    Record,
    Restore,
    Restored,
    Said,
    Step,
    Take,
)
from runtime.worker.rank_start import join, meeting
from runtime.worker.sequence import Sequence, SequenceGroup
from runtime.worker.wired import set_wired


class OutOfStep(Exception):
    """This rank does not have what rank 0 has."""


_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, OSError, OutOfStep)


class Follower:
    """One shard with its own tiers and batches, in which rank 0's numbers name everything."""

    def __init__(self, load: Load, channel: Channel, group: Any) -> None:
        """Load the shard. Raises whatever loading raises."""
        options, kv = load.options, load.kv
        set_wired(options.wired)
        self._channel = channel
        self._model = model = models.load(
            load.spec, lambda _: None, kv.kv_bits, lambda whole: models.split(whole, group)
        )
        model.agree = Agreement(group).wrap
        models.warm(model, lambda tokens, one: warm_decode(model, tokens, one))
        chain = HashChain(kv.secret, kv.model_hash, block_size=kv.block_size)
        ground = Ground.of(model, chain, kv.model_hash, kv.hot_bytes)
        self._tiers = Tiers(ground, None, None, lambda _: None)
        self._decoder = Decoder(model, options.max_batch)
        self._kv: dict[int, list[Any]] = {}
        self._trails: dict[int, Trail] = {}
        self._rows: dict[int, Sequence] = {}
        self._said: list[tuple[int, int]] = []
        self._ended: dict[int, list[Any]] = {}

    def do(self, record: Record) -> None:
        """Do as rank 0 does.

        Raises:
            OutOfStep: it had another outcome here.
        """
        match record:
            case Prefill(kv=number, token_ids=token_ids):
                self._model.prefill(token_ids, self._kv[number])
            case Insert():
                self._insert(record)
            case Step():
                self._step()
            case Said():
                self._compare(record)
            case Take(row=row, kv=number):
                self._kv[number] = self._decoder.take(self._rows.pop(row)) or []
            case Free(kvs=numbers):
                for number in numbers:
                    self._kv.pop(number, None)
                    self._trails.pop(number, None)
            case Begin():
                raise OutOfStep("a model is loaded already")
            case _:
                self._keep(record)

    def _keep(self, record: Restore | Keep | Finish | Pin | News) -> None:
        match record:
            case Restore(kv=number, place=place, limit=limit):
                trail = self._trails[number] = place.trail(limit)
                self._tiers.begin(trail)
                self._kv[number], num_tokens = self._tiers.restore(trail)
                self._channel.send(Restored(num_tokens=num_tokens))
            case Keep(kv=number, span=span, seconds=seconds):
                self._tiers.on_prefill(self._trails[number], self._kv[number], span, seconds)
            case Finish(kv=number, place=place, output_ids=output_ids):
                self._tiers.on_finished(place.trail(), output_ids, self._kv[number])
            case Pin(kv=number, source=source):
                self._tiers.pin(self._trails[number], self._kv[number], source)
            case News(news=news):
                self._tiers.hear(news)

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
            self._rows[row.number] = one
            group.sequences.append(one)
        self._decoder.insert(group)

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


def _follow(channel: Channel) -> None:
    records: queue.SimpleQueue[Record] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, records), daemon=True).start()
    group = join()
    begin = records.get()
    if not isinstance(begin, Begin):
        raise OutOfStep("rank 0 did not say which model to load")
    follower = Follower(begin.load, channel, group)
    while True:
        follower.do(records.get())


def _listen(channel: Channel, records: queue.SimpleQueue[Record]) -> None:
    """The reader thread: where rank 0 ends, this process ends, whatever it waits for."""
    try:
        for record in channel.records():
            records.put(record)
    finally:
        os._exit(0)


def main() -> int:
    """Find rank 0, then follow it until it is gone; 1 when this rank cannot."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = meeting()
    channel = Channel(socket.create_connection(own.address))
    channel.send(Joined(rank=own.rank, token=own.token))
    try:
        _follow(channel)
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
