"""A loaded model: weights, tokenizer, and the calls that compute KV. Belongs to the mlx thread.

Knows mlx-lm's loading functions and how its models are called; those that see are `vision`'s.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import copy
import importlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from mlx_lm.utils import load_model, load_tokenizer

from runtime.kv.layers import can_take_back, merged, plans_attention, take_back
from runtime.kv.media import rope_delta
from runtime.models.files import checked_folder
from runtime.models.folder import copied
from runtime.models.vision_files import reads_as_text
from runtime.ranks import KvForm, Split
from runtime.types import ModelSpec
from runtime.worker.input.template_syntax import check_template
from runtime.worker.linear import (
    choose_forms,
    gains_from_columns,
    gains_from_forms,
    lay_columns,
)
from runtime.worker.output.dialect import Dialect
from runtime.worker.output.upstream import dialect_of
from runtime.worker.sampler import Sampler
from runtime.worker.scores import TokenScore, scores_of
from runtime.worker.vision.images import ImageBatch
from store.types import FileStamp

if TYPE_CHECKING:
    from runtime.worker.vision.model import VisionModel

T = TypeVar("T")

_LOAD_GROUP_BYTES = 256 * 1024 * 1024
_WARM_TOKENS = 65  # so that a matrix of 64 rows is multiplied
_CLEAR_TOKENS = 2048
_KV_GROUP = 64
_PLAIN = KvForm()


@dataclass(eq=False, slots=True)
class LoadedModel:
    """Everything of one model that the engine uses.

    `is_batchable` says whether its layer caches can be merged into a batch.
    """

    spec: ModelSpec
    model: Any
    tokenizer: Any
    eos_token_ids: frozenset[int]
    vocab_size: int
    is_batchable: bool
    stream: mx.Stream
    weights_bytes: int
    dialect: Dialect
    kv_bits: int | None = None
    kv_start: int = 0
    """Caches that hold so many tokens are quantised before the next one; 0: from the first on."""
    agree: Callable[[Sampler], Sampler] | None = None
    """Makes a sampler draw the same on all ranks, where there are several."""
    vision_model: VisionModel | None = None
    """How it sees pictures, if it does."""
    why_text_only: str = ""
    """Why mlx-lm reads its text only, although its files promise more."""
    keeps_shapes: bool = field(default_factory=plans_attention)
    """Steps of several tokens are given all the room of their rows: shapes stay the same."""
    _since_clear: int = field(default=0)

    def new_kv(self, num_tokens: int = 0) -> list[Any]:
        """Empty layer caches for one sequence, of the form that those of so many tokens have.

        There may be fewer than layers.
        """
        return _new_kv(self.model, self.kv_bits if num_tokens >= self.kv_start else None)

    def is_quantised(self, num_tokens: int) -> bool:
        """What comes after so many tokens sees quantised KV."""
        return 0 < self.kv_start <= num_tokens

    def is_at_start(self, kv: list[Any]) -> bool:
        """These caches are to be quantised before another token: what comes sees them so."""
        if not self.kv_start:
            return False
        plain, _ = _kv_classes(self.model)
        return any(type(cache) is plain and cache.offset >= self.kv_start for cache in kv)

    def quantise(self, kv: list[Any]) -> None:
        """Have the layer caches in the list quantised, layer by layer."""
        plain, _ = _kv_classes(self.model)
        with mx.stream(self.stream):
            for number, cache in enumerate(kv):
                if type(cache) is plain:
                    kv[number] = cache.to_quantized(_KV_GROUP, self.kv_bits)
                    mx.eval(kv[number].state)

    def copy_kv(self, kv: list[Any]) -> list[Any]:
        """Layer caches that can grow on their own; the arrays are shared until they do."""
        return copy.deepcopy(kv)

    @property
    def unproven(self) -> str | None:
        """The kind of a model that was never driven rightly, whose KV is not kept; or None."""
        is_known = self.vision_model is None or self.vision_model.image_processor is not None
        return None if is_known else self.spec.model_type

    @property
    def blindness(self) -> str:
        """Why it cannot be shown pictures although its files promise that it sees, or nothing."""
        return self.why_text_only if self.vision_model is None else self.vision_model.blindness

    @property
    def keeps_pictures(self) -> bool:
        """Tests show for its kind that KV with pictures in it is taken up exactly."""
        return self.vision_model is None or self.vision_model.is_proven

    @property
    def num_encoded_images(self) -> int:
        """Images that its tower saw since it was loaded."""
        return self.vision_model.num_encoded if self.vision_model is not None else 0

    @property
    def inner(self) -> Callable[..., mx.array] | None:
        """The model without its head: token ids [1, tokens] to hidden states [1, tokens, dim]."""
        return getattr(self.model, "model", None)

    def look(self, image_batch: ImageBatch, start: int, end: int, budget_s: float) -> bool:
        """Work for about so long on the pictures in `[start, end)`; whether all are seen."""
        if self.vision_model is None or not image_batch.spans:
            return True
        with mx.stream(self.stream):
            return self.vision_model.look(image_batch, start, end, budget_s)

    def prefill(
        self,
        token_ids: list[int],
        kv: list[Any],
        image_batch: ImageBatch | None = None,
        start: int = 0,
    ) -> None:
        """Append the KV of `token_ids` to the layer caches and wait until it is there.

        They are those of a prompt with these pictures from position `start` on.
        """
        if self.is_at_start(kv):
            self.quantise(kv)
        with mx.stream(self.stream):
            if self.vision_model is not None and image_batch is not None:
                self.vision_model.compute(token_ids, kv, image_batch, start)
            else:
                self.model(mx.array(token_ids)[None], cache=kv)
            mx.eval([cache.state for cache in kv])
        self._count(len(token_ids))

    @property
    def has_plain_rows(self) -> bool:
        """Several sequences may be computed in one forward, and forget the last tokens each: every
        layer keeps plain KV.

        Models that see, and those that several ranks compute, are left out: nobody has tried. So is
        KV that is quantised from a start on, as a forward could go beyond that.
        """
        is_plain = self.is_batchable and not self.kv_start and self.vision_model is None
        return is_plain and self.agree is None and can_take_back(self.new_kv())

    def prefill_together(
        self, token_ids: Sequence[list[int]], kvs: Sequence[list[Any]]
    ) -> list[list[Any]]:
        """The layer caches of several sequences with the KV of these tokens behind what they hold,
        computed in one forward, where there are `has_plain_rows`. Those given stay as they are.
        """
        num_most = max(map(len, token_ids))
        padded = [[*each, *[0] * (num_most - len(each))] for each in token_ids]
        with mx.stream(self.stream):
            rows = merged(kvs)
            self.model(mx.array(padded), cache=rows)
            take_back(rows, [num_most - len(each) for each in token_ids])
            mx.eval([cache.state for cache in rows])
            computed = [[cache.extract(number) for cache in rows] for number in range(len(kvs))]
        self._count(num_most * len(kvs))
        return computed

    def score(
        self, token_ids: list[int], kv: list[Any], following: list[int], num_top: int
    ) -> list[TokenScore]:
        """As `prefill`, for text alone; how likely each of `following` was after its token."""
        if self.is_at_start(kv):
            self.quantise(kv)
        with mx.stream(self.stream):
            logits = self.model(mx.array(token_ids)[None], cache=kv)[0]
            scores = scores_of(logits, following, num_top)
            del logits
            mx.eval([cache.state for cache in kv], *scores)
        self._count(len(token_ids))
        return scores.told()

    def _count(self, num_tokens: int) -> None:
        """What was computed leaves buffers behind, which are given back now and then."""
        self._since_clear += num_tokens
        if self._since_clear >= _CLEAR_TOKENS:
            self._since_clear = 0
            mx.clear_cache()

    def to_decode(self, kv: list[Any], image_batch: ImageBatch, num_tokens: int) -> list[Any]:
        """The caches of a prompt of so many tokens, as the model wants them while it decodes."""
        if self.vision_model is None:
            return kv
        return self.vision_model.to_decode(kv, rope_delta(image_batch.spans, num_tokens))

    def from_decode(self, kv: list[Any]) -> list[Any]:
        """The layer caches alone."""
        return kv if self.vision_model is None else self.vision_model.from_decode(kv)


class OpenedModel:
    """All of a model but its weights: its layers, its configuration, and its tokenizer, which is
    read in a thread. No memory is taken for weights before `read`.

    It belongs to the mlx thread. `close` it unless it is read.
    """

    def __init__(self, spec: ModelSpec, split: Callable[[Any], object] | None = None) -> None:
        """Raises as `load`."""
        self.spec = spec
        self._files = _stamps(spec)
        self._copy = ExitStack()
        self._beside = ThreadPoolExecutor(1, "tokenizer")
        with ExitStack() as in_vain:
            in_vain.callback(self.close)
            template = Path(spec.chat_template) if spec.chat_template else None
            folder = checked_folder(Path(spec.path), template)
            path = self._copy.enter_context(copied(folder))
            self._open(path, split)
            in_vain.pop_all()

    def _open(self, path: Path, split: Callable[[Any], object] | None) -> None:
        spec = self.spec
        self._why_text_only, self._vision_model = "", None
        if spec.is_vision and split is None:
            self._model, config, self._vision_model = _load_seeing(path)
            if self._vision_model.image_processor is None and reads_as_text(spec.model_type):
                self._why_text_only = self._vision_model.blindness
                (self._model, config), self._vision_model = _load_reading(path), None
        else:
            self._model, config = _load_reading(path)
        if split is not None:
            split(self._model)
        end = config.get("eos_token_id")
        options = _template_of(path) | {"trust_remote_code": False, "local_files_only": True}
        # A large one takes as long as the weights.
        self._reading = self._beside.submit(load_tokenizer, path, options, eos_token_ids=end)
        self._stream = mx.default_stream(mx.default_device())
        self.vocab_size = _vocab_size(self._model, self._stream)

    def is_still(self, spec: ModelSpec) -> bool:
        """It is that model, of whose files none has changed since."""
        return spec == self.spec and _stamps(spec) == self._files

    def beside(self, work: Callable[[Any], T]) -> Future[T]:
        """Have something done with the tokenizer, in the thread that reads it."""
        reading = self._reading
        return self._beside.submit(lambda: work(reading.result()))

    def close(self) -> None:
        """Let go of it."""
        self._beside.shutdown(cancel_futures=True)
        self._copy.close()

    def read(self, on_progress: Callable[[float], None], form: KvForm = _PLAIN) -> LoadedModel:
        """Read the weights; once. What is done `beside` goes on. Raises as `load`."""
        model, stream = self._model, self._stream
        with ExitStack() as in_vain:
            in_vain.callback(self.close)
            weights_bytes = _read_weights(model, on_progress)
            if gains_from_forms():
                choose_forms(model)
            if gains_from_columns():
                lay_columns(model)
            # Private arrays, rope frequencies among them, are no parameters and would stay lazy.
            mx.eval(model)
            tokenizer = self._reading.result()
            template = getattr(tokenizer, "chat_template", None)
            check_template(template, Path(self.spec.path), self.spec.chat_template)
            in_vain.pop_all()
        self._beside.shutdown(wait=False)
        self._copy.close()
        _check_kv_form(model, stream, form)
        caches = _new_kv(model, None if form.kv_start else form.kv_bits)
        return LoadedModel(
            spec=self.spec,
            model=model,
            tokenizer=tokenizer,
            eos_token_ids=frozenset(tokenizer.eos_token_ids),
            vocab_size=self.vocab_size,
            is_batchable=all(hasattr(cache, "merge") for cache in caches),
            stream=stream,
            weights_bytes=weights_bytes,
            dialect=dialect_of(tokenizer),
            kv_bits=form.kv_bits,
            kv_start=form.kv_start if _is_quantisable(model) else 0,
            vision_model=self._vision_model,
            why_text_only=self._why_text_only,
        )


def load(
    spec: ModelSpec,
    on_progress: Callable[[float], None],
    form: KvForm = _PLAIN,
    split: Callable[[Any], object] | None = None,
) -> LoadedModel:
    """Load a model's weights and tokenizer from its directory, without running its own code.

    What upstream reads is a copy that was checked as it was made: nothing in it asks for code.

    With `kv_bits` in `form` the KV of layers whose cache is a plain one is quantised, from its
    start on. `split` leaves one rank's share of a model whose weights are not read yet.

    Raises:
        BrokenModel: the files are not, or no longer, those of a model that can be loaded.
        FileNotFoundError, ValueError, RuntimeError, OSError, KeyError: as upstream finds the files.
    """
    return OpenedModel(spec, split).read(on_progress, form)


def _stamps(spec: ModelSpec) -> dict[str, FileStamp]:
    """The state of every file from which a model is made."""
    found: dict[str, FileStamp] = {}
    files = [file for pattern in ("*", "*/*") for file in Path(spec.path).glob(pattern)]
    for file in [*files, *([Path(spec.chat_template)] if spec.chat_template else [])]:
        with suppress(OSError):
            found[str(file)] = FileStamp.of(file.stat())
    return found


def _load_reading(path: Path) -> tuple[Any, dict[str, object]]:
    return load_model(path, lazy=True, trust_remote_code=False)


def _load_seeing(path: Path) -> tuple[Any, dict[str, object], VisionModel]:
    # Only here, so that workers of other models never import mlx-vlm.
    return importlib.import_module("runtime.worker.vision.model").load(path)


def _template_of(path: Path) -> dict[str, object]:
    """What tokenizers do not read by themselves: the file that older models that see have."""
    try:
        found: object = json.loads((path / "chat_template.json").read_bytes())
    except (OSError, ValueError):
        return {}
    template = (
        cast("Mapping[str, object]", found).get("chat_template")
        if isinstance(found, dict)
        else None
    )
    return {"chat_template": template} if isinstance(template, str) else {}


def split(model: Any, group: mx.distributed.Group, wanted: Split | None) -> Split:
    """Leave of a model whose weights are not read yet one rank's share: of every layer, or of them.

    What it was split by: "tensor" where nothing is wanted and the model has code for both.

    Raises:
        ValueError: it has no code for that, or does not come out even.
    """
    ways: list[Split] = []
    if hasattr(model, "shard"):
        ways.append("tensor")
    if hasattr(getattr(model, "model", None), "pipeline"):
        ways.append("pipeline")
    chosen = wanted or next(iter(ways), None)
    kind = getattr(model, "model_type", type(model).__name__)
    if chosen is None:
        raise ValueError(f"a model of type {kind} cannot be split; leave ranks out for it")
    if chosen not in ways:
        remedy = f'use split = "{ways[0]}"' if ways else "leave ranks out for it"
        raise ValueError(f'mlx-lm has no "{chosen}" split for a model of type {kind}; {remedy}')
    if chosen == "pipeline":
        model.model.pipeline(group)
        return chosen
    num_heads = getattr(getattr(model, "args", None), "num_key_value_heads", None)
    if num_heads and num_heads % group.size():
        raise ValueError(
            f"{num_heads} heads of KV cannot be shared by {group.size()} ranks; "
            "choose a number of ranks that divides them"
        )
    model.shard(group)
    return chosen


def best_slice() -> int:
    """The prefill slice, in tokens, that computes fastest on this device.

    A CPU's caches like short slices: twice the rate of 2,048 at 256, measured on x86-64.
    """
    return 2048 if compiles_kernels() else 256


def device_name() -> str:
    """What computes here, as far as its speed depends on it."""
    name = str(mx.device_info().get("device_name", ""))
    return name if compiles_kernels() else f"{name or platform.machine()}, {os.cpu_count()} cores"


def compiles_kernels() -> bool:
    """Whether this device takes longer for what it does for the first time. A CPU does not."""
    return mx.default_device() != mx.Device(mx.cpu)


def warm(model: LoadedModel, decode: Callable[[list[int], list[Any]], None]) -> float:
    """Compile the kernels of prefill and decode before the first request pays; seconds taken."""
    start = time.perf_counter()
    token_ids = [0] * (_WARM_TOKENS if compiles_kernels() else 2)
    kv = model.new_kv()
    if model.vision_model is not None:
        model.vision_model.open(model.stream)
    model.prefill(token_ids[:-1], kv)
    decode(token_ids, kv)
    return time.perf_counter() - start


def _read_weights(model: Any, on_progress: Callable[[float], None]) -> int:
    """Read the lazy parameters group by group, so that progress can be told; bytes read."""
    arrays = [cast("mx.array", array) for _, array in tree_flatten(model.parameters())]
    total = sum(array.nbytes for array in arrays)
    done = 0
    for group in _groups(arrays):
        mx.eval(group)
        done += sum(array.nbytes for array in group)
        on_progress(done / total if total else 1.0)
    return total


def _groups(arrays: list[mx.array]) -> Iterator[list[mx.array]]:
    group: list[mx.array] = []
    nbytes = 0
    for array in arrays:
        group.append(array)
        nbytes += array.nbytes
        if nbytes >= _LOAD_GROUP_BYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _new_kv(model: Any, kv_bits: int | None) -> list[Any]:
    caches = make_prompt_cache(model)
    if kv_bits is None:
        return caches
    plain, quantised = _kv_classes(model)
    return [quantised(_KV_GROUP, kv_bits) if type(cache) is plain else cache for cache in caches]


def _is_quantisable(model: Any) -> bool:
    """Some of its layer caches are of the plain class."""
    plain, _ = _kv_classes(model)
    return any(type(cache) is plain for cache in make_prompt_cache(model))


def _kv_classes(model: Any) -> tuple[type[Any], type[Any]]:
    """The plain layer cache of whose code computes the model, and the quantised one."""
    return getattr(model, "kv_classes", (KVCache, QuantizedKVCache))


def _check_kv_form(model: Any, stream: mx.Stream, form: KvForm) -> None:
    """Look at the KV of one token: it is quantised in groups along a head's dimension."""
    if form.kv_bits is None:
        return
    caches: list[Any] = make_prompt_cache(model)
    plain, _ = _kv_classes(model)
    others = sorted({type(cache).__name__ for cache in caches if type(cache) is not plain})
    if others and plain is not KVCache:
        raise ValueError(
            f"kv_bits is not for this model while it sees: some of its layers keep {others[0]}; "
            "leave kv_bits out for it, or set vision = false"
        )
    if form.kv_start and plain is not KVCache:
        raise ValueError(
            "quantized_kv_start is not for a model that sees: a picture may lie across the start; "
            "give it quantized_kv_start = 0, or set vision = false"
        )
    with mx.stream(stream):
        mx.eval(model(mx.array([[0]]), cache=caches))
    used = [cache for cache in caches if type(cache) is plain and cache.keys is not None]
    arrays = [cast("mx.array", array) for cache in used for array in (cache.keys, cache.values)]
    dims = {array.shape[-1] for array in arrays}
    odd = sorted(dim for dim in dims if dim % _KV_GROUP)
    if odd:
        raise ValueError(
            f"kv_bits = {form.kv_bits} quantises KV in groups of {_KV_GROUP}, and this model's "
            f"heads have {odd[0]} dimensions; leave kv_bits out for it."
        )


def _vocab_size(model: Any, stream: mx.Stream) -> int:
    with mx.stream(stream):
        # Its shape is known before anything of it is computed.
        logits = model(mx.array([[0]]), cache=make_prompt_cache(model))
    return logits.shape[-1]
