"""A stream goes on while a picture is seen: its tokens come between the layers of the tower."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from runtime.config.settings import ModelSettings
from runtime.models.files import read_spec
from runtime.supervisor.spawn import Child
from runtime.types import ChatPrompt, Constraint, Image, Message, TextDelta
from runtime.wire import Accepted, Chunks, Event, Load, Ready, Submit, WorkerOptions
from tests.asking import PATIENCE_S, request
from tests.tiny_vlm_configs import CONFIGS
from tests.tiny_vlms import encoded, picture, write_vlm
from tests.waiting import until

pytest.importorskip("mlx_vlm")

NUM_LAYERS = 24
FAMILY = "qwen2_vl"


@asynccontextmanager
async def listening(
    path: Path, options: WorkerOptions
) -> AsyncGenerator[tuple[Child, list[Event]]]:
    """A real worker with this model, and all that it says, in order."""
    said: list[Event] = []
    child = await Child.start("auto")
    child.listen(said.append, lambda: None)
    try:
        child.send(Load(spec=read_spec("m", path, ModelSettings()), options=options))
        await until(lambda: any(isinstance(one, Ready) for one in said), "it is loaded")
        yield child, said
    finally:
        await child.end(PATIENCE_S)
        child.close()


def story(said: Sequence[Event], stream: str, look: str) -> Iterator[str]:
    """What happened: a `token` of the stream, the other request `taken`, some of it `computed`."""
    for event in said:
        if isinstance(event, Accepted) and event.request_id == look:
            yield "taken"
        for whose, chunk in event.items if isinstance(event, Chunks) else ():
            if whose == look:
                yield "computed"
            elif whose == stream and isinstance(chunk, TextDelta):
                yield from ["token"] * len(chunk.logprobs)


async def test_a_stream_goes_on_between_the_layers_of_the_tower(tmp_path: Path):
    """Until the first piece of the picture's prompt is computed: what the stream says afterwards
    makes up for what it had to wait, however long that was, and proves nothing. The stream says
    letters only, so that every token is told when it comes: a token that ends within a character
    is told with the one that ends it.
    """
    vision_encoder = CONFIGS[FAMILY](0)["vision_config"] | {"depth": NUM_LAYERS}
    path = write_vlm(tmp_path / "m", FAMILY, vision_config=vision_encoder)
    letters = Constraint(kind="regex", text="[a-z]{4000}")
    stream = request("tell me more", max_tokens=3000, constraint=letters, top_logprobs=0)
    seen = Image(at=0, field="image", data=encoded(picture(1, 112, 112)))
    turn = Message(role="user", text=" what is it, then? " * 9, images=(seen,))
    look = request(ChatPrompt(messages=(turn,)), max_tokens=1)
    async with listening(path, WorkerOptions(prefill_block_ms=0.0)) as (child, said):

        def events() -> list[str]:
            return list(story(said, stream.request_id, look.request_id))

        child.send(Submit(request=stream))
        await until(lambda: events().count("token") > 8, "the stream runs")
        child.send(Submit(request=look))
        await until(lambda: "computed" in events(), "some of its prompt is computed")
        told = events()
    between = told[told.index("taken") : told.index("computed")]
    assert between.count("token") >= NUM_LAYERS
