"""The language between server and worker: tagged structs in length-prefixed MessagePack frames.

A frame is a little-endian u32 byte count and that many bytes. End of file is the death notice in
both directions, so there is no message for it.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from runtime.kv_messages import KvNews, KvReport
from runtime.ranks import Ranks
from runtime.types import (
    CacheUse,
    Chunk,
    GenerateRequest,
    ModelSpec,
    Struct,
    TemplateForms,
    TokenLogprobs,
)

MAX_FRAME_BYTES = 1 << 28
_LENGTH = struct.Struct("<I")


class WorkerOptions(Struct, frozen=True):
    """What a worker needs of the settings. `prefill_block_ms` bounds how long decode may wait;
    without `decode_overlap` each decode step is done before its tokens are handled. A model that
    `speculates` may have rows propose what they say next.

    `ranks` is None where one process has the model.
    """

    wired: Literal["off", "on"] = "off"
    max_batch: int = 32
    prefill_slice: int | None = None
    learn_slice_after_s: float = 0.0
    prefill_block_ms: float = 250.0
    decode_overlap: bool = True
    heartbeat_s: float = 1.0
    speculates: bool = False
    ranks: Ranks | None = None


class KvOptions(Struct, frozen=True):
    """The KV hierarchy: without a disk `root` is None; sizes in bytes, as in `HotBudget`.

    The store at `root` need not be open yet: `Opened` says so. `secret` is the store's, where it is
    known already. `names` key the names of blocks until then. With `has_cold` blocks of which there
    is no slot may be in a cold store. So much as `advance_bytes` is asked for before it is written.
    """

    root: str | None = None
    block_size: int = 256
    hot_bytes: int = 1 << 30
    pool_bytes: int | None = None
    most_bytes: int | None = None
    queue_bytes: int = 1 << 30
    prewarm_bytes: int = 0
    kv_bits: int | None = None
    kv_start: int = 0
    secret: bytes = b""
    names: bytes = b""
    has_cold: bool = False
    advance_bytes: int = 64 << 20


class Prepare(Struct, frozen=True, tag="prepare"):
    """Read all of this model but its weights, as it is probably the one to be loaded."""

    spec: ModelSpec


class Load(Struct, frozen=True, tag="load"):
    """Load this model: but for `Prepare` the first command, and the first after each `Released`."""

    spec: ModelSpec
    options: WorkerOptions
    kv: KvOptions = KvOptions()


class Submit(Struct, frozen=True, tag="submit"):
    request: GenerateRequest


class Abort(Struct, frozen=True, tag="abort"):
    request_id: str


class Stop(Struct, frozen=True, tag="stop"):
    """Finish nothing more, write what is queued, give memory back, and exit 0; one that `stays`
    says `Released` instead, and waits for `Prepare` or `Load` again.

    `exit_s` bounds each of two: the end of the running step, and the exit after the flush.
    """

    exit_s: float = 20.0
    stays: bool = False


Command = Prepare | Load | Submit | Abort | Stop | KvNews


EXIT_SANDBOX_LOST = 77
"""A worker without its sandbox can take nothing in; whoever ended that, no request did."""


class Hello(Struct, frozen=True, tag="hello"):
    """The worker's imports are done; it waits for `Prepare` or `Load`."""

    pid: int


class MemoryUse(Struct, frozen=True):
    """What a process takes, in bytes: what its allocator holds, and what the system counts."""

    allocated_bytes: int
    resident_bytes: int


class Released(Struct, frozen=True, tag="released"):
    """The model has left: what the process took before the weights of its first model were read,
    and takes now.
    """

    before: MemoryUse
    after: MemoryUse


class LoadProgress(Struct, frozen=True, tag="load_progress"):
    """Share of the weights that is in memory, 0 to 1."""

    fraction: float


class Warming(Struct, frozen=True, tag="warming"):
    """The weights are in memory; kernels are being compiled. Said again after each that was."""


class Ready(Struct, frozen=True, tag="ready"):
    """The model is loaded and warm. Times in ms, memory in bytes.

    `blindness` says why it refuses images although its files promise that it sees, `template` what
    was found of its chat template, where that could be asked.
    """

    load_ms: float
    warm_ms: float
    weights_bytes: int
    is_batchable: bool
    blindness: str = ""
    template: TemplateForms | None = None


class LoadError(Struct, frozen=True, tag="load_error"):
    """The model is not loaded; `is_lacking` says that the machine, not the model, is why."""

    message: str
    is_lacking: bool = False


class Accepted(Struct, frozen=True, tag="accepted"):
    """The request is taken; `prompt_digest` stands for the prompt as the model reads it, and
    `turns` are the generated ones that it begins with, as `store.turns.pack_row` has them.
    """

    request_id: str
    num_prompt_tokens: int
    cache: CacheUse = CacheUse()
    prompt_digest: bytes = b""
    turns: bytes = b""


class Rejected(Struct, frozen=True, tag="rejected"):
    """The request is refused. Tokens are told when the prompt is too long, and bytes when its KV
    takes too much memory.
    """

    request_id: str
    code: str
    message: str
    param: str | None = None
    num_tokens: int = 0
    is_least: bool = False
    is_rest: bool = False
    first: int = 0
    context: int = 0
    num_bytes: int = 0
    limit_bytes: int = 0


class SaidToken(Struct, frozen=True, array_like=True):
    """A token of an answer, with its `logprobs` where these are asked for."""

    request_id: str
    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None


class Chunks(Struct, frozen=True, tag="chunks"):
    """What one step produced, for all requests: (request id, chunk) pairs in order.

    `said` are the tokens that the chunks were made of, or that are held back until more follow.
    """

    items: tuple[tuple[str, Chunk], ...]
    said: tuple[SaidToken, ...] = ()


class KvCounts(msgspec.Struct, kw_only=True, gc=False):
    """The tiers, counted since the worker started; the last two stay 0 on clean traffic.

    The worker counts in one of these. What others count, or is counted when it is asked for, is
    added when it is sent: bytes and runs in memory, evictions, what is queued, images.
    """

    hot_bytes: int = 0
    num_pieces: int = 0
    num_evicted: int = 0
    num_queued_bytes: int = 0
    num_reused_tokens: int = 0
    num_computed_tokens: int = 0
    num_restored_bytes: int = 0
    restore_s: float = 0.0
    num_damaged: int = 0
    num_unwritten: int = 0
    num_healed_turns: int = 0
    num_encoded_images: int = 0
    exact_key_rejected_by_model_lcp: int = 0
    vlm_retreat: int = 0


WorkerPhase = Literal[
    "starting",
    "loading",
    "warming",
    "idle",
    "upkeep",
    "intake",
    "restore",
    "prefill",
    "decode",
    "errand",
    "flushing",
    "stopping",
]
"""What a worker does: while it comes up, once its model is loaded, and while it leaves."""


class Heartbeat(Struct, frozen=True, tag="beat"):
    """Sent every second. Busy and not stepping means wedged: `step` counts what the part that
    `phase` is of has done, so that no other part's progress hides that this one makes none.

    `decode_step_s` is what decode steps took on average, one that has not ended left out. The bytes
    are the allocator's: in use, kept for reuse, and the most that were in use since the heartbeat
    before.
    """

    step: int
    is_busy: bool
    phase: WorkerPhase
    decode_step_s: float = 0.0
    active_bytes: int = 0
    cache_bytes: int = 0
    peak_bytes: int = 0
    kv: KvCounts | None = None


class Flushing(Struct, frozen=True, tag="flushing"):
    """It was told to stop; so many bytes of KV are to be written, told again as they get fewer."""

    num_bytes: int


class Flushed(Struct, frozen=True, tag="flushed"):
    """The flush is over and memory is being given back; so many bytes were left unwritten."""

    num_unwritten_bytes: int


Event = (
    Hello
    | LoadProgress
    | Warming
    | Ready
    | LoadError
    | Accepted
    | Rejected
    | Chunks
    | Heartbeat
    | Flushing
    | Flushed
    | Released
    | KvReport
)

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
unpack_command = _command_decoder.decode
unpack_event = _event_decoder.decode
"""The message in a frame's payload."""


def pack(message: Command | Event) -> bytearray:
    """The message as one frame, which is copied once: some have a hundred megabytes."""
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(message, frame, _LENGTH.size)
    _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH.size)
    return frame


class FrameReader:
    """Cuts a byte stream into frames' payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray) -> list[bytes]:
        """The payloads completed by `data`, in order.

        Raises:
            ValueError: a frame claims more than `MAX_FRAME_BYTES`; the stream is not ours.
        """
        buffer = self._buffer
        buffer += data
        payloads: list[bytes] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, start)
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes exceeds {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + size
            if len(buffer) < end:
                break
            payloads.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return payloads
