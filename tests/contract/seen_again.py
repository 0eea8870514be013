"""`python -m tests.contract.seen_again before|after DIR CASE…`: two lives of what was seen.

`before` says a prompt with two pictures, keeps it on disk, and goes on in several ways from the
caches that it still has. `after` is another process with nothing but the files. Both write the
logits of every slice and step.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from runtime.kv.cursor import CacheCursor
from runtime.kv.media import Placed, model_ids, place_media
from runtime.models.vision_files import KEPT_TYPES, SEEING_TYPES
from runtime.ranks import KvForm
from runtime.types import ChatPrompt, Image, Message, ModelSpec
from runtime.worker import model as models
from runtime.worker.model import LoadedModel
from runtime.worker.scheduler import Scheduler
from runtime.worker.sequence import SequenceGroup
from runtime.worker.vision.image_loader import PillowImageLoader
from runtime.worker.vision.images import ImageBatch, PromptImage
from tests.contract.lives import live
from tests.kv_sessions import REQUEST, SLICE_TOKENS, Session
from tests.tiny_tried_vlms import write_tried
from tests.tiny_vlms import VISION_FAMILIES, encoded, picture, write_vlm

FIRST, SECOND, THIRD, OTHER = ((seed, 84, 112) for seed in (1, 2, 3, 4))
"""Seeds and sizes: twelve tokens where the grid decides."""

HEAD, MIDDLE, TAIL = 21, 37, 11
SAID = 5
CASES: dict[str, tuple[str, int | None]] = {
    **{family: (family, None) for family in VISION_FAMILIES},
    "qwen2_5_vl in 8 bits": ("qwen2_5_vl", 8),
    "qwen3_vl in 4 bits": ("qwen3_vl", 4),
    **{kind: (kind, None) for kind in sorted(KEPT_TYPES - SEEING_TYPES)},
}
"""Each family's model with the KV that it has, and some with quantised KV."""

WAYS = ("words", "a new picture", "the same", "another second picture", "swapped")


def words(seed: int, num_tokens: int) -> list[int]:
    """None of them means a picture."""
    return random.Random(seed).choices(range(40, 400), k=num_tokens)


class Script(NamedTuple):
    """Words and pictures, in turn."""

    parts: tuple[list[int] | tuple[int, int, int], ...]


BEGINNING = Script((words(1, HEAD), FIRST, words(2, MIDDLE), SECOND, words(3, TAIL)))
ANSWER = words(4, SAID)
NEXT = {
    "words": (*BEGINNING.parts, ANSWER, words(5, 45)),
    "a new picture": (*BEGINNING.parts, ANSWER, words(6, 7), THIRD, words(7, 19)),
    "the same": BEGINNING.parts,
    "another second picture": (*BEGINNING.parts[:3], OTHER, *BEGINNING.parts[4:]),
    "swapped": (words(1, HEAD), SECOND, words(2, MIDDLE), FIRST, words(3, TAIL)),
}


def load(path: Path, family: str, kv_bits: int | None = None) -> LoadedModel:
    spec = ModelSpec(
        id="m",
        path=str(path),
        context=4096,
        model_type=family,
        nbytes=1,
        created_s=1,
        is_vision=True,
    )
    return models.load(spec, lambda _: None, KvForm(kv_bits))


class SeeingSession(Session):
    """A session whose prompts have pictures in them."""

    def __init__(self, model: LoadedModel, root: Path | None) -> None:
        super().__init__(model, root)
        assert model.vision_model is not None
        assert model.vision_model.image_processor is not None
        self.loaded, self.vision_model, self.image_processor = (
            model,
            model.vision_model,
            model.vision_model.image_processor,
        )
        self.gallery = PillowImageLoader(self.image_processor)
        self._slices = Scheduler(max_batch=1, max_slice=SLICE_TOKENS, block_s=1.0)

    def group(self, parts: tuple[Any, ...]) -> SequenceGroup:
        """A prompt as intake makes it."""
        placed, prompt_images = self._placed(parts)
        spans = placed.spans
        return SequenceGroup(
            request=REQUEST,
            token_ids=model_ids(placed.token_ids, self.image_processor.markup.placeholder),
            num_prompt_tokens=len(placed.token_ids),
            max_tokens=1,
            deadline_s=0.0,
            cursor=CacheCursor(
                token_ids=placed.token_ids,
                media=spans,
                boundaries=(HEAD,) if self.tiers.needs_state else (),
            ),
            image_batch=ImageBatch(
                spans,
                tuple(prompt_images[span.digest] for span in spans),
                is_whole=self.vision_model.is_whole,
            ),
        )

    def _placed(self, parts: tuple[Any, ...]) -> tuple[Placed, dict[bytes, PromptImage]]:
        pad = self.image_processor.markup.placeholder
        images = [
            Image(at=0, field="image", data=encoded(picture(*part)))
            for part in parts
            if isinstance(part, tuple)
        ]
        prompt = ChatPrompt(messages=(Message(role="user", images=tuple(images)),))
        hung, prompt_images = self.gallery.hang(prompt)
        media = [prompt_images[image.data].medium for image in hung.messages[0].images]
        flat = [one for part in parts for one in ([pad] if isinstance(part, tuple) else part)]
        return place_media(flat, pad, media, []), dict(prompt_images)

    def see(self, group: SequenceGroup) -> int:
        """Take up what is known of a prompt; how many tokens."""
        group.kv, group.num_computed_tokens = self.take_up(group.cursor)
        return group.num_computed_tokens

    def prefill(self, group: SequenceGroup, *, keeps: bool = True) -> None:
        assert group.kv is not None
        while group.num_remaining_tokens:
            plan = self._slices.next_slice(group, 0)
            ids = group.token_ids[plan.start : plan.end]
            self.loaded.prefill(ids, group.kv, group.image_batch, plan.start)
            group.num_computed_tokens = plan.end
            if keeps:
                self.tiers.on_prefill(group.cursor, group.kv, (plan.start, plan.end), 0.001)
                self.check()

    def say(self, group: SequenceGroup, token_ids: list[int]) -> tuple[list[Any], mx.array]:
        """Feed the prompt's last token and these; the layer caches, and logits [tokens, vocab]."""
        assert group.kv is not None
        kv = self.loaded.to_decode(group.kv, group.image_batch, len(group.token_ids))
        fed = [group.token_ids[-1], *token_ids]
        logits = mx.stack([self.forward([one], kv)[0, -1] for one in fed])
        return self.loaded.from_decode(kv), logits


def go_on(session: SeeingSession, way: str, kept: list[Any] | None = None) -> dict[str, Any]:
    """One way to continue, from live caches of the whole beginning or from what is restored."""
    group = session.group(NEXT[way])
    if kept is not None:
        group.kv = kept
        group.num_computed_tokens = len(session.group((*BEGINNING.parts, ANSWER)).token_ids)
        start = group.num_computed_tokens
    else:
        start = session.see(group)
    encoded_before = session.vision_model.num_encoded
    session.prefill(group, keeps=False)
    num_encoded = session.vision_model.num_encoded - encoded_before
    _, logits = session.say(group, words(9, 3))
    spans = [[span.start, span.end] for span in group.image_batch.spans]
    return {"start": start, "num_encoded": num_encoded, "spans": spans, "logits": logits}


def cold(model: LoadedModel, way: str) -> mx.array:
    """The same without anything known."""
    return go_on(SeeingSession(model, None), way)["logits"]


def before(folder: Path, case: str) -> dict[str, Any]:
    family, bits = CASES[case]
    if family in VISION_FAMILIES:
        path = write_vlm(folder / "model", family, is_wide=bits is not None)
    else:
        path = write_tried(folder / "model", family)
    model = load(path, family, bits)
    session = SeeingSession(model, folder / "store")
    group = session.group(BEGINNING.parts)
    assert session.see(group) == 0
    session.prefill(group)
    kv, _ = session.say(group, ANSWER)
    session.tiers.on_finished(group.cursor, ANSWER, kv)
    logits = {way: go_on(session, way, model.copy_kv(kv))["logits"] for way in WAYS[:2]}
    logits |= {way: cold(model, way) for way in WAYS[2:]}
    mx.save_safetensors(str(folder / "before.safetensors"), logits)
    session.close()
    return {"num_held": len(group.token_ids) + SAID, "is_whole": session.vision_model.is_whole}


def after(folder: Path, case: str) -> dict[str, Any]:
    family, bits = CASES[case]
    model = load(folder / "model", family, bits)
    found: dict[str, Any] = {}
    logits: dict[str, mx.array] = {}
    for way in WAYS:
        session = SeeingSession(model, folder / "store")
        found[way] = go_on(session, way)
        logits[way] = found[way].pop("logits")
        found[way]["retreats"] = session.tiers.counts.vlm_retreat
        found[way]["rejected"] = session.tiers.counts.exact_key_rejected_by_model_lcp
        session.close()
    mx.save_safetensors(str(folder / "after.safetensors"), logits)
    return {"ways": found}


if __name__ == "__main__":
    live(before, after)
