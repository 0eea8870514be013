"""What a model's directory says about sight, read without loading or importing anything.

The server never imports mlx-vlm: here are the model types that the pinned one has images for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from runtime.models.folder import INDEX, ModelFolder, open_regular

SEEING_TYPES = frozenset(
    "gemma3 gemma4 qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe".split()
)
"""`model_type`s whose images are driven by a processor of their own: tests prove that their
restored KV is exact.
"""

KEPT_TYPES = SEEING_TYPES | frozenset(
    """
    aya_vision glm4v idefics3 internvl_chat kimi_vl lfm2_vl llama4 llava llava_onevision mistral3
    smolvlm
    """.split()
)
"""`model_type`s of which tests show that what was seen is taken up exactly by another process."""

VLM_TYPES = SEEING_TYPES | frozenset(
    """
    aya_vision cohere2_vision cohere_compass deepseek_v4 deepseek_vl_v2 deepseekocr deepseekocr_2
    dots_ocr ernie4_5_moe_vl fastvlm gemma3n gemma4_unified glm4v glm4v_moe glm5_next glm_ocr
    granite4_vision granite_vision hunyuan_vl idefics2 idefics3 internvl internvl_chat jina_vlm
    kimi_k25 kimi_k3 kimi_vl lfm2-vl lfm2_vl llama4 llava llava-qwen2 llava_next llava_onevision
    llava_qwen2 mage_vl mimo_v2 minicpmo minicpmv4_6 minimax_m3_vl mistral3 molmo molmo2
    multi_modality muse_glimmer muse_spark nemotron_h_nano_omni paddleocr_vl paligemma
    phi4-siglip phi4_siglip phi4mm pixtral plamo2vl qwen3_omni_moe smolvlm step3p7 youtu_vl zaya1_vl
    """.split()
)
"""`model_type`s whose images upstream turns into embeddings that a decoder reads as tokens.

Those beyond `SEEING_TYPES` are tried out when they are loaded (`runtime.worker.vision.self_test`).
"""

_FINDERS = "it finds things in images and says nothing"
_TOO_MANY = "mlx-vlm makes more of its images than it says in tokens"
_ENCODED = "an encoder of its own reads images, not what answers"
BLIND_TYPES: Mapping[str, str] = {
    "mllama": "its images enter by cross attention, not among the tokens",
    "paligemma": "its prompts attend to themselves in both directions",
    "phi3_v": "its images are told by negative token ids",
    "llava_next": _TOO_MANY,
    "granite_vision": _TOO_MANY,
    "florence2": _ENCODED,
    "nemotron_parse": _ENCODED,
    "moondream2": "it does not say among the tokens where an image is",
    "moondream3": "it does not say among the tokens where an image is",
    **dict.fromkeys(
        ("molmo_point", "locateanything", "rfdetr", "rt_detr_v2", "sam3d_body"), _FINDERS
    ),
}
"""`model_type`s of upstream that cannot be shown images here, and why."""

_EXTRA_PACKAGES = {"multi_modality": ("cv2", "opencv-python-headless")}
"""What upstream imports for a `model_type` and is not installed with it: module and package."""

_OTHER_NAMES = {
    "deepseek_v41_text": "deepseek_v41",
    "falcon_mamba": "mamba",
    "gemma4_unified": "gemma4",
    "iquestcoder": "llama",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "llava": "mistral3",
    "minimax_m2": "minimax",
    "mistral": "llama",
    "phi-msft": "phixtral",
    "qwen2_5_vl": "qwen2_vl",
    "xverse": "llama",
}
"""How mlx-lm calls types of another name."""

_VALUE_BYTES = 4
_DEFAULT_PIXELS = 4 << 20

_TOWER = re.compile(r"vis(ion|ual)|vpm")
_QUOTED = re.compile(r'"([\w.-]+)"')
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_MAX_HEADER_BYTES = 128 << 20


@cache
def can_see() -> bool:
    """Whether the optional mlx-vlm is installed."""
    return find_spec("mlx_vlm") is not None


def missing_package(
    model_type: str, find: Callable[[str], ModuleSpec | None] = find_spec
) -> str | None:
    """What has to be installed before mlx-vlm can load models of this type, if anything."""
    module, package = _EXTRA_PACKAGES.get(model_type, (None, None))
    return package if module is not None and find(module) is None else None


def is_vision(folder: ModelFolder, model_type: str) -> bool:
    """Whether mlx-vlm is to load the model in a directory.

    Text-only conversions keep the configuration of what they were made from, so the vision tower
    must be among the weights, and the settings of the image processor beside them. What cannot be
    shown images anyhow is left to mlx-lm, if that knows it.
    """
    return (
        model_type in VLM_TYPES | BLIND_TYPES.keys()
        and can_see()
        and not (model_type in BLIND_TYPES and reads_as_text(model_type))
        and any(name in folder.tables for name in _PROCESSORS)
        and any(_TOWER.search(name) for name in _tensor_names(folder))
    )


def reads_as_text(model_type: str) -> bool:
    """Whether mlx-lm has a model of this type."""
    return _OTHER_NAMES.get(model_type, model_type) in names_in("mlx_lm/models")


@cache
def names_in(folder: str) -> frozenset[str]:
    """The modules in a folder of an installed package, such as `mlx_lm/models`; without imports."""
    found = (path.stem for place in _places(folder) for path in place.glob("*.py"))
    return frozenset(name for name in found if not name.startswith("_"))


@cache
def words_of(file: str) -> frozenset[str]:
    """The names in quotation marks in a file of an installed package; without imports."""
    texts = (place.read_text("utf-8") for place in _places(file))
    return frozenset(word for text in texts for word in _QUOTED.findall(text))


def _places(inside: str) -> list[Path]:
    package, _, rest = inside.partition("/")
    found = find_spec(package)
    folders = (found.submodule_search_locations if found is not None else None) or ()
    return [place for folder in folders if (place := Path(folder) / rest).exists()]


def image_bytes(folder: ModelFolder) -> int:
    """What encoding one image of the largest size takes beside the weights, estimated.

    A patch's activations are taken to be six times the tower's width and twice its inner width.
    """
    vision_encoder = _names(folder.table("config.json").get("vision_config"))
    first = next((name for name in _PROCESSORS if name in folder.tables), _PROCESSORS[0])
    processor = folder.table(first)
    width = _number(vision_encoder, "hidden_size", "embed_dim", "width") or 1024
    inner = _number(vision_encoder, "intermediate_size") or 4 * width
    patch = _number(vision_encoder, "patch_size") or 14
    num_patches = _max_pixels(processor, vision_encoder) // patch**2
    return num_patches * (6 * width + 2 * inner) * _VALUE_BYTES


def _max_pixels(processor: Mapping[str, object], vision_encoder: Mapping[str, object]) -> int:
    size = _names(processor.get("size"))
    side = _number(vision_encoder, "image_size")
    height, width = _number(size, "height"), _number(size, "width")
    return (
        _number(processor, "max_pixels")
        or _number(size, "max_pixels", "longest_edge")
        or (height * width if height and width else None)
        or (side**2 if side else None)
        or _DEFAULT_PIXELS
    )


def _number(table: Mapping[str, object], *keys: str) -> int | None:
    """The first of these that is a sane number."""
    values = (table.get(key) for key in keys)
    return next((one for one in values if type(one) is int and 0 < one < 1 << 32), None)


def _tensor_names(folder: ModelFolder) -> tuple[str, ...]:
    """The names of all tensors, as the index of a sharded model or the files' headers give them."""
    if INDEX in folder.tables:
        return tuple(folder.weight_map)
    try:
        headers = [json.loads(_header(file)) for file in folder.weights.values()]
        return tuple(name for header in headers for name in _names(header))
    except (OSError, ValueError, RecursionError):
        return ()


def _header(file: Path) -> bytes:
    with open_regular(file) as opened:
        num_bytes = int.from_bytes(opened.read(8), "little")
        return opened.read(min(num_bytes, _MAX_HEADER_BYTES))


def _names(value: object) -> Mapping[str, object]:
    return cast("Mapping[str, object]", value) if isinstance(value, dict) else {}
