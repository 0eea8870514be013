"""`python -m ops.judge.mlx_lm_side MODEL`: nothing of Hearth, only mlx_lm; jobs come as lines."""

from __future__ import annotations

import sys
from typing import cast

import mlx.core as mx
import msgspec
from mlx_lm import load
from mlx_lm.generate import stream_generate

from ops.judge.compare import Scored
from ops.judge.reference import Continue, Continued, Messages, Score

_NUM_TOP = 5
_SLICE = 512


class Side:
    """A loaded model, and the tokens of the conversation that it answered last."""

    def __init__(self, folder: str) -> None:
        self._model, self._tokenizer = load(folder)[:2]
        self._text = ""
        self._ids: list[int] = []

    def carry_on(self, job: Continue) -> Continued:
        """Generate, as `mlx_lm.generate` does without options."""
        prompt = self._ids_of(job.messages) if job.messages else self._tokenizer.encode(job.text)
        written: list[Scored] = []
        ids: list[int] = []
        text, finish = "", ""
        for one in stream_generate(self._model, self._tokenizer, prompt, job.max_tokens):
            text += one.text
            finish = one.finish_reason or ""
            written.append(self._scored(one.token, one.logprobs))
            if finish != "stop":
                ids.append(one.token)
        self._text, self._ids = self._text + text, prompt + ids
        cuts = [self._decoded(ids[:end]) for end in range(len(ids) + 1)]
        return Continued(text, cuts, written, finish, len(prompt))

    def score(self, job: Score) -> list[float]:
        """Log probabilities of the text's tokens, computed at once and read in slices."""
        ids = self._tokenizer.encode(job.text)
        logits = self._model(mx.array(ids)[None])[0]
        found: list[float] = []
        for start in range(0, len(ids) - 1, _SLICE):
            rows = logits[start : min(start + _SLICE, len(ids) - 1)].astype(mx.float32)
            targets = mx.array(ids[start + 1 : start + 1 + rows.shape[0]])
            chosen = mx.take_along_axis(rows, targets[:, None], axis=-1)[:, 0]
            found += cast("list[float]", (chosen - mx.logsumexp(rows, axis=-1)).tolist())
        return found

    def _ids_of(self, messages: Messages) -> list[int]:
        """The prompt's ids; an answer in it is the tokens that were generated."""
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        known = self._text
        if not known or not text.startswith(known):
            known, self._ids = "", []
        self._text = text
        return self._ids + self._tokenizer.encode(text[len(known) :], add_special_tokens=False)

    def _decoded(self, ids: list[int]) -> str:
        detokenizer = self._tokenizer.detokenizer
        detokenizer.reset()
        for token in ids:
            detokenizer.add_token(token)
        detokenizer.finalize()
        return detokenizer.text

    def _scored(self, token: int, logprobs: mx.array) -> Scored:
        values = logprobs.astype(mx.float32)
        best = cast("list[int]", mx.argpartition(-values, kth=_NUM_TOP - 1)[:_NUM_TOP].tolist())

        def told(one: int) -> tuple[str, float]:
            return self._tokenizer.decode([one]), cast("float", values[one].item())

        return Scored(*told(token), sorted(map(told, best), key=lambda pair: -pair[1]))


def main() -> None:
    side = Side(sys.argv[1])
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Continue | Score)
        reply = side.carry_on(job) if isinstance(job, Continue) else side.score(job)
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
