"""Frames survive any cutting of the byte stream, and every message its round trip."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import wire
from runtime.types import (
    ChatPrompt,
    Failed,
    Finished,
    GenerateRequest,
    Message,
    ModelSpec,
    PrefillProgress,
    ReasoningDelta,
    SamplingParams,
    TextDelta,
    TextPrompt,
    Thinking,
    TokenLogprob,
    TokenLogprobs,
    TokenPrompt,
    Tool,
    ToolCall,
    ToolCallDelta,
    Usage,
)

SPEC = ModelSpec(
    id="m",
    path="/models/m",
    context=4096,
    model_type="qwen3",
    nbytes=1,
    created_s=2,
    aliases=("n",),
)
LOGPROBS = TokenLogprobs(
    chosen=TokenLogprob("é", "é".encode(), -0.25),
    top=(TokenLogprob("\ufffd", b"\xc3", -1.5), TokenLogprob("", b"", -9999.0)),
)
REQUESTS = [
    GenerateRequest(request_id="1", model="m", prompt=TextPrompt(text="a\0b 😀")),
    GenerateRequest(request_id="2", model="m", prompt=TokenPrompt(token_ids=(0, 2**31))),
    GenerateRequest(
        request_id="3",
        model="m",
        prompt=ChatPrompt(
            messages=(
                Message(role="system", text="s"),
                Message(
                    role="assistant",
                    reasoning="r",
                    tool_calls=(ToolCall(id="i", name="f", arguments='{"a": 1}'),),
                ),
                Message(role="tool", text="t", tool_call_id="i", name="f"),
            ),
            tools=(Tool(name="f", description="d", parameters='{"type": "object"}'),),
            thinking=Thinking(is_enabled=False),
            template_kwargs='{"x": [1]}',
        ),
        sampling=SamplingParams(temperature=0.0, top_k=-1, logit_bias=((5, -100.0),), seed=-1),
        max_tokens=1,
        stop=("a", "\n\n"),
        num_choices=3,
        top_logprobs=0,
        ignore_eos=True,
        deadline_s=0.5,
    ),
]
COMMANDS: list[wire.Command] = [
    wire.Load(spec=SPEC, options=wire.WorkerOptions(wired="on", max_batch=2)),
    *(wire.Submit(request=request) for request in REQUESTS),
    wire.Abort(request_id="1"),
    wire.Stop(exit_s=5.0),
]
EVENTS: list[wire.Event] = [
    wire.Hello(pid=1),
    wire.LoadProgress(fraction=0.5),
    wire.Warming(),
    wire.Ready(load_ms=1.0, warm_ms=2.0, weights_bytes=3, is_batchable=True),
    wire.LoadError(message="no"),
    wire.Accepted(request_id="1", num_prompt_tokens=9),
    wire.Rejected(request_id="1", code="c", message="m", param="p", num_tokens=1, context=2),
    wire.Heartbeat(step=1, is_busy=True, phase="decode", active_bytes=2**40, peak_bytes=2**41),
    wire.Flushing(num_bytes=2**33),
    wire.Flushed(num_unwritten_bytes=0),
    wire.Chunks(
        items=(
            ("1", PrefillProgress(num_done=1, num_total=2)),
            ("1", TextDelta(index=0, text="😀", logprobs=(LOGPROBS,))),
            ("2", ReasoningDelta(index=1, text="hm")),
            ("2", ToolCallDelta(0, 1, "{}", id="i", name="f")),
            ("2", Finished(0, "tool_calls", Usage(num_prompt_tokens=1, decode_ms=0.5))),
            ("3", Failed(code="c", message="m")),
        )
    ),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_is_what_it_was(command: wire.Command):
    (payload,) = wire.FrameReader().feed(wire.pack(command))
    assert wire.unpack_command(payload) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_is_what_it_was(event: wire.Event):
    (payload,) = wire.FrameReader().feed(wire.pack(event))
    assert wire.unpack_event(payload) == event


def test_a_frame_is_a_little_endian_length_and_its_payload():
    frame = wire.pack(wire.Stop())
    assert frame[:4] == struct.pack("<I", len(frame) - 4)


def test_the_two_directions_do_not_understand_each_other():
    (payload,) = wire.FrameReader().feed(wire.pack(wire.Stop()))
    with pytest.raises(msgspec.ValidationError):
        wire.unpack_event(payload)


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_any_cutting_of_the_stream_gives_the_same_frames(
    payloads: list[bytes], data: st.DataObject
):
    stream = b"".join(struct.pack("<I", len(payload)) + payload for payload in payloads)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12).map(sorted))
    reader = wire.FrameReader()
    received: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += reader.feed(stream[start:end])
    assert received == payloads


def test_an_unfinished_frame_waits_for_its_last_byte():
    reader = wire.FrameReader()
    frame = wire.pack(wire.Abort(request_id="1"))
    for i in range(len(frame) - 1):
        assert reader.feed(frame[i : i + 1]) == []
    assert reader.feed(frame[-1:]) == [frame[4:]]


def test_a_frame_that_claims_too_much_is_refused_from_its_length_alone():
    assert wire.FrameReader().feed(struct.pack("<I", wire.MAX_FRAME_BYTES)) == []
    with pytest.raises(ValueError, match=f"{wire.MAX_FRAME_BYTES + 1} bytes exceeds"):
        wire.FrameReader().feed(struct.pack("<I", wire.MAX_FRAME_BYTES + 1))


def test_frames_before_an_impossible_one_do_not_hide_it():
    reader = wire.FrameReader()
    with pytest.raises(ValueError, match="exceeds"):
        reader.feed(wire.pack(wire.Stop()) + b"GET / HTTP/1.1\r\n")
