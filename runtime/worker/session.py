"""`Session`: a worker's time with one model, from its load until all of it is given back."""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from msgspec import structs

from runtime.errors import InvalidRequest, RequestRejected
from runtime.kv.layers import row_sizes
from runtime.kv.others import ALONE
from runtime.kv.reader import Reader
from runtime.kv.state import KvState
from runtime.kv.tiers import Disk, Tiers, folders
from runtime.kv.writer import AllowedBytes, Writer
from runtime.kv_messages import Allowance, Forget, Kept, Opened, TurnsFound
from runtime.memory import footprint_bytes, trim_heap
from runtime.models.folder import as_of
from runtime.prompt.seal import Seal
from runtime.ranks import KvForm
from runtime.scarcity import is_scarcity
from runtime.types import GenerateRequest, TemplateForms
from runtime.wire import (
    EXIT_SANDBOX_LOST,
    Abort,
    Command,
    Heartbeat,
    KvOptions,
    Load,
    LoadError,
    LoadProgress,
    MemoryUse,
    Prepare,
    Ready,
    Stop,
    Submit,
    Warming,
    WorkerOptions,
    WorkerPhase,
)
from runtime.work_page import WorkPage
from runtime.worker import model as models
from runtime.worker.admission import intake_of, print_without_text, rejected
from runtime.worker.arrivals import AbortRequest, Arrival, EngineChannel, Quit
from runtime.worker.connection import Sender
from runtime.worker.decode import Decoder, warm_decode, warm_wide
from runtime.worker.distributed.leader import DistributedGroup
from runtime.worker.draft import why_no_draft
from runtime.worker.engine import Engine
from runtime.worker.input.compose import Composer
from runtime.worker.input.intake import Intake
from runtime.worker.input.intake_pool import REHEARSAL, IntakePool, refusal_of
from runtime.worker.input.preparer import Bench, OverBudget
from runtime.worker.input.sandbox import Sandbox, SandboxGone
from runtime.worker.input.template import Template
from runtime.worker.input.turns import AskedHeads, TurnStore
from runtime.worker.kernels import CompiledKernels, kept_at
from runtime.worker.model import LoadedModel
from runtime.worker.output.families import call_form
from runtime.worker.preparing import Preparation
from runtime.worker.row_memory import RowFootprint, RowMemory
from runtime.worker.scheduler import Scheduler
from runtime.worker.sequence import SequenceGroup
from runtime.worker.shutdown import Deadline, flush
from runtime.worker.slice_learner import SliceLearner, Surroundings
from runtime.worker.speculation import StepCosts
from runtime.worker.taint import EngineTainted
from runtime.worker.vision.fetcher import Fetcher, names_pictures
from runtime.worker.wired import set_wired
from store.block_names import HashChain
from store.slots import Slots

EXIT_TAINTED = 75
_EXIT_GRACE_S = 20.0
_SENDING_GRACE_S = 2.0
_INTAKE_GRACE_S = 5.0
"""More than a request may compute in the sandbox."""

_LEAVING = frozenset({"flushing", "stopping"})


class Process(NamedTuple):
    """What a worker process has whichever model it serves."""

    sandbox: Sandbox
    sender: Sender
    sending: threading.Thread
    page: WorkPage
    preparation: Preparation
    deadline: Deadline


class Session:
    """One model: the mlx thread calls `run`, the reader `obey` and `lost`."""

    def __init__(self, process: Process, load: Load) -> None:
        self._process = process
        self._command = load
        self._sandbox = process.sandbox
        self._sender = process.sender
        self._engine: Engine | None = None
        self._inbox: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._reader: Reader | None = None
        self._writer: tuple[Writer, threading.Thread] | None = None
        self._heads = AskedHeads(self._sender.send)
        self._allowed = AllowedBytes(self._sender.send)
        self._turns, self._seal = TurnStore(heads=self._heads), Seal()
        self._root = Path(load.kv.root) if load.kv.root is not None else None
        self._phase: WorkerPhase = "starting"
        self._reception: IntakePool | None = None
        self._is_quitting, self._is_heard = False, True
        self._stays = False
        """When its model has left, the process waits for the next one."""
        self.before = MemoryUse(0, 0)
        """What the process took before the weights were read."""
        self._team: DistributedGroup | None = None
        self._fetcher = Fetcher(self._put, self._refuse)
        self._seal.know(load.kv.secret)

    def run(self) -> int | None:
        """The mlx thread: load, then step until told to stop; the exit status of the process, or
        None where it stays.
        """
        try:
            engine = self._start_engine()
        except SandboxGone:
            return 0 if self._is_quitting else without_sandbox()
        except Exception as error:
            was_asked = self._is_quitting  # then there is nothing wrong with the model
            if not was_asked:
                traceback.print_exc()
                said = as_of(str(error), Path(self._command.spec.path))
                message = f"{type(error).__name__}: {said}"
                self._sender.send(LoadError(message=message, is_lacking=is_scarcity(error)))
            self._say_goodbye()
            return 0 if was_asked else 1
        try:
            engine.run()
        except EngineTainted:
            traceback.print_exc()
            return EXIT_TAINTED
        if self._is_heard:
            engine.await_answers()
        del engine
        self._phase = "flushing"
        self._sender.send(self.heartbeat())
        is_written = True
        if self._is_heard:  # or nobody would publish what is written now
            is_written = flush(self._writer, self._sender.send, self._process.deadline)
        self._release()
        if self._stays and self._is_heard and is_written:
            self._process.deadline.cancel()
            return None
        self._say_goodbye()
        return 0

    def _say_goodbye(self) -> None:
        self._sender.close()
        self._process.sending.join(_EXIT_GRACE_S)

    def _start_engine(self) -> Engine:
        command = self._command
        options, spec = command.options, command.spec
        self._sender.heartbeat_s = options.heartbeat_s
        set_wired(options.wired)
        self._phase = "loading"
        # While a file is opened or read nothing can be said: the interpreter is held.
        self._sender.flush(_EXIT_GRACE_S)
        start = time.perf_counter()
        team = self._team = DistributedGroup.of(command, self._on_rank_lost)
        share = team.split if team is not None else None
        form = KvForm(command.kv.kv_bits, kv_start=command.kv.kv_start)
        opened, preparer = self._process.preparation.take(spec, share)
        self.before = memory_use()
        model = opened.read(self._on_load_progress, form)
        draft = _draft_of(model, self._on_load_progress)
        load_s = time.perf_counter() - start
        self._phase = "warming"
        self._sender.send(Warming())
        memory, warm_s = _warmed(model, draft, command, lambda: self._sender.send(Warming()))
        if team is not None:
            model = team.model(model)
        reception = self._reception = IntakePool(
            self._sandbox,
            preparer.result(),
            self._take_in,
            self._inbox.put,
            partial(self._process.page.say, "intake"),
        )
        self._heads.others = reception
        template = _template_of(model, reception)
        scheduler = Scheduler(
            max_batch=options.max_batch,
            max_slice=options.prefill_slice or models.best_slice(),
            block_s=options.prefill_block_ms / 1000,
            memory=memory,
            joins_prompts=model.has_plain_rows,
        )
        tiers = self._tiers(model, command)
        link = EngineChannel(
            self._inbox, self._sender.send, partial(self._process.page.say, "engine")
        )
        rows, overlaps = scheduler.max_running, options.decode_overlap
        if team is not None:
            decoder = team.decoder(model, rows, overlaps=overlaps)
        else:
            decoder = Decoder(model, rows, _costs_of(options), draft=draft, overlaps=overlaps)
        self._engine = engine = Engine(model, template, scheduler, tiers, link, decoder)
        engine.slices = _learner(options, Surroundings(model, scheduler, tiers, self._sender.send))
        composer = self._composer(model, template, tiers)
        intake = replace(intake_of(model, composer, reception), speculates=decoder.speculates)
        reception.open(intake)
        reception.rehearse()
        self._sender.send(_ready(model, load_s, warm_s, template.known_forms))
        return engine

    def _composer(self, model: LoadedModel, template: Template, tiers: Tiers) -> Composer:
        return Composer(
            template=template,
            turns=self._turns,
            counts=tiers.counts,
            context=self._command.spec.context,
            needs_state=tiers.needs_state,
            eos_token_ids=model.eos_token_ids,
            dialect=model.dialect,
            seal=self._seal,
        )

    def _tiers(self, model: LoadedModel, command: Load) -> Tiers:
        """Until the store is open everything has names of this process's own."""
        options = command.kv
        names = options.names or os.urandom(16)
        chain = HashChain(names, b"", block_size=options.block_size)
        parts = self._team.parts(model) if self._team is not None else None
        state = KvState.of(model, chain, options.hot_bytes, parts)
        state.unsupported = state.unsupported or model.unproven
        state.keeps_pictures = model.keeps_pictures
        return Tiers(
            state,
            self._disk(options),
            self._turns.deletions,
            self._sender.send,
            prewarm_bytes=options.prewarm_bytes,
            checks=sys.flags.dev_mode,
        )

    def _disk(self, options: KvOptions) -> Disk | None:
        if options.root is None:
            return None
        slots_at, heads_at = folders(Path(options.root))
        slots, put, send = Slots(slots_at), self._inbox.put, self._sender.send
        others = self._team.disks() if self._team is not None else ALONE
        reader = self._reader = Reader(slots, heads_at, put, options.block_size, others=others)
        self._allowed.advance_bytes = options.advance_bytes
        writer = Writer(slots, heads_at, options.queue_bytes, send, put, self._allowed)
        writer.others = others
        self._writer = writer, started("writer", writer.run)
        return Disk(reader, writer, options.secret, options.has_cold, others)

    def _on_load_progress(self, fraction: float) -> None:
        if self._is_quitting:
            why = "the server asked to stop while the model was loading"
            raise InterruptedError(why)
        self._sender.send(LoadProgress(fraction=fraction))

    def obey(self, command: Command) -> None:
        """The reader thread. Aborts overtake the queue as well; while it leaves, who still writes
        is answered, and nothing else is heard.
        """
        match command:
            case Allowance():
                self._allowed.hear(command)
            case Kept():
                self._inbox.put(command)
            case Prepare() | Load():  # the process heard it
                pass
            case _ if self._is_quitting:
                pass
            case Opened(model_hash=model_hash, secret=secret):
                self._seal.know(secret)
                if self._root is not None:
                    self._turns.attach(secret, HashChain(secret, model_hash).root_of)
                self._inbox.put(command)
            case Submit():
                self._put(command.request)
            case Abort(request_id=request_id):
                self._abort(request_id)
            case Stop(exit_s=exit_s, stays=stays):
                self._process.deadline.phase_s, self._stays = exit_s, stays
                self._quit()
            case TurnsFound():
                self._heads.hear(command)
            case Forget():
                _forget(command, self._turns, self._fetcher)
                self._inbox.put(command)
            case _:
                self._inbox.put(command)

    def lost(self) -> None:
        """The reader thread: the server is gone, or what it says cannot be understood."""
        self._is_heard = False
        self._quit()
        self._allowed.close()

    def _put(self, request: GenerateRequest) -> None:
        assert self._reception is not None
        self._reception.put(request)

    def _abort(self, request_id: str) -> None:
        """After this nothing of it reaches the engine, but what has reached it already."""
        self._fetcher.drop(request_id)
        if self._reception is not None:
            self._reception.drop(request_id)
        self._inbox.put(AbortRequest(request_id))

    def _take_in(self, intake: Intake, request: GenerateRequest) -> SequenceGroup | None:
        """On a thread of the intake pool."""
        if intake.image_loader is not None and names_pictures(request):
            self._fetcher.take(request)
            return None
        try:
            if request is REHEARSAL:
                _ = intake.composer.template.forms
            return intake.admit(request)
        except RequestRejected as error:
            self._refuse(request.request_id, error)
        except OverBudget as error:
            self._refuse(request.request_id, refusal_of(error, request))
        except SandboxGone:
            os._exit(without_sandbox())
        except Exception as error:  # whatever a template does, the next request is admitted
            print_without_text(error)
            refusal = InvalidRequest(f"The prompt cannot be read: {type(error).__name__}.")
            self._refuse(request.request_id, refusal)
        return None

    def _refuse(self, request_id: str, error: RequestRejected) -> None:
        self._sender.send(rejected(request_id, error))

    def _quit(self) -> None:
        """The server asked for it, or is gone: end gracefully, and in any case end."""
        self._process.deadline.set()
        self._is_quitting = True
        self._heads.close()
        if self._reception is not None:
            self._reception.close()
        self._inbox.put(Quit())

    def _release(self) -> None:
        """Give memory back, also before exit: a hard end can strand wired memory on macOS."""
        self._phase = "stopping"
        self._process.deadline.set()
        self._stays &= self._is_heard and self._team is None
        if self._reader is not None:
            self._reader.cancel()
        if self._stays:
            self._await_threads()
        self._engine = self._reception = self._reader = self._writer = None
        if self._stays:
            return  # once nothing has this session any more
        give_memory_back()
        if self._team is not None:
            self._team.leave()

    def _await_threads(self) -> None:
        """Nothing of this model is read or taken in any more, or the process does not stay."""
        patience_s = min(_INTAKE_GRACE_S, self._process.deadline.phase_s / 4)
        if self._reader is not None:
            self._stays &= self._reader.close(patience_s)
        if self._reception is not None:
            self._stays &= self._reception.join(patience_s)

    def _on_rank_lost(self, why: str, is_fault: bool) -> None:
        """Without one rank the others wait for ever: this process ends, and with it all.

        One that was killed is a crash also while the model loads: it may load the next time.
        """
        print(why, file=sys.stderr, flush=True)  # noqa: T201
        if self._engine is None and is_fault:
            self._sender.send(LoadError(message=why))
            self._sender.close()
            self._process.sending.join(_SENDING_GRACE_S)
        os._exit(1 if self._engine is None and is_fault else EXIT_TAINTED)

    def heartbeat(self) -> Heartbeat:
        """What it does, without what its memory is; from any thread."""
        engine, reception = self._engine, self._reception
        if engine is None:
            return Heartbeat(step=0, is_busy=False, phase=self._phase)
        beat = engine.heartbeat()
        if self._phase in _LEAVING:
            return structs.replace(beat, phase=self._phase)
        if not beat.is_busy and reception is not None and reception.whose:
            return structs.replace(beat, step=reception.num_turns, is_busy=True, phase="intake")
        return beat


def give_memory_back() -> None:
    """Have neither the allocator nor the heap keep what nothing has any more; the most that was
    held is what is held now.
    """
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    trim_heap()


def memory_use() -> MemoryUse:
    """What this process takes now, by its allocator and by the system."""
    return MemoryUse(
        allocated_bytes=mx.get_active_memory() + mx.get_cache_memory(),
        resident_bytes=footprint_bytes(os.getpid(), 0),
    )


def _forget(news: Forget, turns: TurnStore, fetcher: Fetcher) -> None:
    """Before the engine hears of it: what is being taken in asks whether it was deleted."""
    turns.deletions.add(news)
    fetcher.forget(news.number)
    turns.forget(news.whom, news.secret)


def _costs_of(options: WorkerOptions) -> StepCosts | None:
    return StepCosts() if options.speculates else None


def _draft_of(model: LoadedModel, on_progress: Callable[[float], None]) -> LoadedModel | None:
    """The draft model that its target is configured with, loaded.

    Raises:
        ValueError: one of the two is of a kind with which that does not work.
    """
    spec = model.spec.draft
    if spec is None:
        return None
    if not model.has_plain_rows:
        why = "some of its layers keep more than plain KV, or it sees, or kv_bits is set"
        raise ValueError(f"it cannot have a draft: {why}; leave draft out for it")
    draft = models.load(spec, on_progress)
    why = why_no_draft(model, draft)
    if why is not None:
        raise ValueError(f"{spec.id} cannot be its draft: {why}; correct draft, or leave it out")
    model.weights_bytes += draft.weights_bytes
    return draft


def _warmed(
    model: LoadedModel,
    draft: LoadedModel | None,
    command: Load,
    on_progress: Callable[[], None],
) -> tuple[RowMemory, float]:
    """Warm a model; the memory for its rows, and the seconds that it took.

    Kernels that were compiled before are only read, by whoever is the first to need them.
    """
    options, rows = command.kv, command.options.max_batch
    beside = command.options.speculates, draft.spec.path if draft is not None else None
    kernels = CompiledKernels(model.model, (rows, beside, options.kv_bits), kept_at())
    is_shared = command.options.ranks is not None
    # Ranks compute together, and the others know nothing of what was compiled before.
    compiles = models.compiles_kernels() and (is_shared or not kernels.are_there)
    is_wide = compiles and not is_shared
    memory = RowMemory(
        is_batched=model.is_batchable,
        pool_bytes=options.pool_bytes,
        most_bytes=options.most_bytes,
    )

    def decode(token_ids: list[int], kv: list[Any]) -> None:
        memory.footprint = RowFootprint(*row_sizes(kv))
        if model.kv_start:
            late = model.new_kv(model.kv_start)
            model.prefill(token_ids[:-1], late)
            model.prefill(token_ids[-1:], late)
            memory.footprint = memory.footprint._replace(
                kv_start=model.kv_start, late_per_token=row_sizes(late)[0]
            )
        on_progress()
        warm_decode(model, token_ids, kv, on_progress, compiles=compiles)
        if command.options.speculates and is_wide:
            warm_wide(model, token_ids, kv, rows, on_progress)
        if draft is not None:
            drafts = draft.new_kv()
            draft.prefill(token_ids[:-1], drafts)
            each = memory.footprint.per_token + row_sizes(drafts)[0]
            memory.footprint = memory.footprint._replace(per_token=each)
            if is_wide:
                warm_wide(draft, token_ids, drafts, rows, on_progress)

    seconds = models.warm(model, decode)
    if compiles:
        kernels.note()
    return memory, seconds


def _learner(options: WorkerOptions, around: Surroundings) -> SliceLearner | None:
    """What finds out in which slices to prefill, unless the owner knows; one process must have
    all of the model.
    """
    is_known = options.prefill_slice is not None
    if is_known or not options.learn_slice_after_s or options.ranks is not None:
        return None
    default, quiet_s = models.best_slice(), options.learn_slice_after_s
    return SliceLearner(around, models.device_name(), default, quiet_s)


def _template_of(model: LoadedModel, bench: Bench) -> Template:
    processor = model.vision_model.image_processor if model.vision_model is not None else None
    return Template(
        model.tokenizer,
        markup=processor.markup if processor is not None else None,
        bench=bench,
        reads_calls=bool(model.dialect.name),
        own_calls=call_form(model.dialect.name),
    )


def _ready(model: LoadedModel, load_s: float, warm_s: float, forms: TemplateForms | None) -> Ready:
    return Ready(
        load_ms=load_s * 1000,
        warm_ms=warm_s * 1000,
        weights_bytes=model.weights_bytes,
        is_batchable=model.is_batchable,
        blindness=model.blindness,
        template=forms,
    )


def without_sandbox() -> int:
    """The exit status of a worker that can take nothing in any more."""
    print("the sandbox has ended", file=sys.stderr, flush=True)  # noqa: T201
    return EXIT_SANDBOX_LOST


def started(name: str, run: Callable[[], None]) -> threading.Thread:
    """A daemon thread that runs this."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
