"""Guided rows in the decoder itself: joined, interrupted and computed again."""

import json
import time

import jsonschema
import pytest

from runtime.kv.cursor import CacheCursor
from runtime.types import Constraint, GenerateRequest, SamplingParams, TokenPrompt
from runtime.worker.decode import Decoder
from runtime.worker.input.template import Template
from runtime.worker.model import LoadedModel
from runtime.worker.output.constraint import Constrainer
from runtime.worker.output.dialect import Dialect
from runtime.worker.output.grammar import Grammars
from runtime.worker.output.parser import OutputParser
from runtime.worker.sequence import Sequence, SequenceGroup
from tests.kv_sessions import load
from tests.tiny_models import write_model

SCHEMA = {
    "type": "object",
    "properties": {
        "fox": {"type": "integer", "minimum": 0, "maximum": 99},
        "dogs": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
        "says": {"type": "string", "maxLength": 10},
    },
    "required": ["fox", "dogs", "says"],
    "additionalProperties": False,
}
PROMPT = list(range(20, 60))
SAMPLINGS = (
    SamplingParams(temperature=0.0, frequency_penalty=0.4),
    SamplingParams(temperature=1.2, seed=9, top_p=0.95),
)


@pytest.fixture(scope="module", params=["qwen3", "lfm2", "llama4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_model(tmp_path_factory.mktemp(request.param), request.param))


def sequence_of(model: LoadedModel, sampling: SamplingParams, *, is_held: bool = True) -> Sequence:
    """A sequence that is ready to be prefilled, held to the schema or to nothing."""
    constraint = Constraint(kind="json_schema", text=json.dumps(SCHEMA)) if is_held else None
    request = GenerateRequest(
        request_id="r",
        model="m",
        prompt=TokenPrompt(token_ids=tuple(PROMPT)),
        sampling=sampling,
        constraint=constraint,
    )
    group = SequenceGroup(
        request=request,
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        max_tokens=200 if is_held else 30,
        deadline_s=time.monotonic() + 60,
    )
    detokenizer = Template(model.tokenizer).detokenizer(PROMPT)
    sequence = Sequence(group, 0, OutputParser(Dialect(), index=0), detokenizer)
    grammars = Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)
    constrainer = Constrainer(model.dialect, model.tokenizer, grammars)
    sequence.plan = constrainer.demands(request, "unsaid", None).plan
    group.sequences = [sequence]
    return sequence


def enter(model: LoadedModel, decoder: Decoder, sequence: Sequence) -> None:
    group = sequence.group
    group.kv = model.new_kv()
    model.prefill(group.token_ids[:-1], group.kv)
    decoder.insert(group, group.sequences, takes=True)


def decode(decoder: Decoder, num_steps: int = 1000) -> None:
    """Steps, until there is nothing left to do or that many were made."""
    while num_steps and decoder.num_running:
        num_steps -= 1
        for token in decoder.step():
            token.sequence.output_token_ids.append(token.token_id)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("num_steps", [1, 9])
def test_a_guided_sequence_goes_on_where_it_was_interrupted(
    model: LoadedModel, sampling: SamplingParams, num_steps: int
):
    whole, broken, free = (
        sequence_of(model, sampling),
        sequence_of(model, sampling),
        sequence_of(model, SAMPLINGS[1], is_held=False),
    )
    decoder = Decoder(model, 4)
    enter(model, decoder, whole)
    decode(decoder)
    enter(model, decoder, free)
    enter(model, decoder, broken)
    decode(decoder, num_steps)
    decoder.remove(broken)
    broken.regrouped(lambda _, token_ids: CacheCursor(token_ids=token_ids))
    enter(model, decoder, broken)
    decode(decoder)
    assert broken.output_token_ids == whole.output_token_ids
    assert whole.output_token_ids[-1] in model.eos_token_ids
    text = model.tokenizer.decode(whole.output_token_ids[:-1])
    jsonschema.validate(json.loads(text), SCHEMA)
    assert free.guide is None
