"""The tiny models that see are what upstream takes them for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.tiny_vlms import VISION_FAMILIES, picture

pytest.importorskip("mlx_vlm")


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_what_a_tiny_model_says_depends_on_the_picture_it_is_shown(
    family: str, vlms_dir: Path
) -> None:
    import mlx.core as mx
    import mlx_vlm
    from mlx_vlm.utils import prepare_inputs

    upstream = cast("Any", mlx_vlm)
    model, processor = upstream.load(str(vlms_dir / family), lazy=False)
    content = [{"type": "image"}, {"type": "text", "text": "what is this?"}]
    prompt = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )

    def logits(seed: int) -> tuple[list[int], Any]:
        inputs = prepare_inputs(
            processor,
            images=[picture(seed)],
            prompts=prompt,
            image_token_index=getattr(model.config, "image_token_index", None),
            add_special_tokens=False,
        )
        token_ids = inputs.pop("input_ids")
        pixels, mask = inputs.pop("pixel_values"), inputs.pop("attention_mask")
        out = model(token_ids, pixels, mask, **inputs)
        return token_ids[0].tolist(), out.logits[0, -1]

    (ids, one), (other_ids, other), (_, again) = logits(1), logits(2), logits(1)
    assert ids == other_ids
    assert mx.array_equal(one, again)
    assert not mx.allclose(one, other, atol=1e-3)
