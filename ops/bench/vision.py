"""A conversation with pictures: `python -m ops.bench vision`, described in METHODOLOGY.

Hearth and mlx-vlm's own server, with its prefix cache and that cache's disk tier on, are asked the
same turns in the same run, of the same model of random weights.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import msgspec

from api.bench.ask import TimedAnswer, ask
from api.bench.machine import Environment, environment
from api.bench.peers import Models, Peer
from api.bench.recipes import Recipe, find
from api.bench.texts import Messages
from ops.bench.seeing_model import build, photograph

_REPORT = Path(__file__).parent / "vision.json"
_SERVERS = ("hearth", "mlx-vlm")
_SYSTEM = " ".join(f"On day {day} the river was calm and the boats stayed." for day in range(60))
_STEPS = ("cold", "follow_up", "new_image", "restart")
_NEW_TOKENS = 16
_NEW_IMAGE_TURN = 5
_TOLD_S = 1.5


class _Url(msgspec.Struct):
    url: str


class _Part(msgspec.Struct, omit_defaults=True):
    type: str
    text: str | None = None
    image_url: _Url | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part]


class Step(msgspec.Struct):
    """One request as its client saw it. Tokens are as the server counts them.

    `num_encoded` of `num_images` pictures went through the vision tower.
    """

    name: str
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    num_images: int
    num_encoded: int
    text: str

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class Row(msgspec.Struct):
    """One step over all rounds, ours against the peer's: medians."""

    step: str
    prompt_tokens: tuple[int, int]
    computed_tokens: tuple[int, int]
    encoded_images: tuple[int, int]
    ttft_ms: tuple[float, float]
    times_faster: float
    times_faster_range: tuple[float, float]
    has_same_text: bool


class Family(msgspec.Struct):
    """One kind of model."""

    model_type: str
    rows: list[Row]


class Report(msgspec.Struct):
    """One run."""

    environment: Environment
    rounds: int
    families: list[Family]


class _Talk:
    """One conversation with one server, which grows by what it says."""

    def __init__(self, peer: Peer, seed: int) -> None:
        self._peer = peer
        self._seed = seed
        self._messages = [_Message("system", f"Conversation {seed}. {_SYSTEM}")]
        self._num_images = 0
        self._num_encoded = 0
        self.look()

    def turn(self, name: str, text: str, *, has_image: bool = False) -> Step:
        """Say it, with a new picture if there is to be one, and hear the answer."""
        parts: list[_Part] = []
        if has_image:
            self._num_images += 1
            parts.append(_part(abs(self._seed * 100 + self._num_images)))
        parts.append(_Part("text", text))
        self._messages.append(_Message("user", parts))
        answer = ask(self._peer.target, cast("Messages", self._messages), _NEW_TOKENS)
        self._messages.append(_Message("assistant", answer.text))
        return self._step(name, answer)

    def look(self) -> None:
        """Take the server's counter as it is; after a start it begins anew."""
        if self._peer.recipe.name == "hearth":
            self._num_encoded = _num_encoded(self._peer)

    def _step(self, name: str, answer: TimedAnswer) -> Step:
        # Upstream encodes all that a request holds before it looks into its cache.
        num_encoded = self._num_images
        if self._peer.recipe.name == "hearth":
            before, self._num_encoded = self._num_encoded, _num_encoded(self._peer)
            num_encoded = self._num_encoded - before
        return Step(
            name=name,
            ttft_ms=answer.ttft_ms,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens or 0,
            num_images=self._num_images,
            num_encoded=num_encoded,
            text=answer.text,
        )


def _num_encoded(peer: Peer) -> int:
    """Pictures that its towers saw, once what the last request did has been told."""
    time.sleep(_TOLD_S)
    url = peer.target.url.removesuffix("/v1") + "/metrics"
    with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310
        found = re.findall(
            r"^hearth_kv_encoded_images_total\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE
        )
    return sum(int(float(one)) for one in found)


def _part(seed: int) -> _Part:
    data = base64.b64encode(photograph(seed)).decode()
    return _Part("image_url", image_url=_Url(f"data:image/png;base64,{data}"))


def converse(peer: Peer, seed: int) -> list[Step]:
    """Cold, text turns, a new picture in the fifth turn, and the next turn after a restart."""
    steps: list[Step] = []
    peer.start()
    try:
        _Talk(peer, -seed).turn("", "Warm up.", has_image=True)
        talk = _Talk(peer, seed)
        steps.append(talk.turn("cold", "What do you see?", has_image=True))
        steps.append(talk.turn("follow_up", "What else is there?"))
        for number in range(3, _NEW_IMAGE_TURN):
            talk.turn("", f"Say more about it, part {number}.")
        steps.append(talk.turn("new_image", "And what is this?", has_image=True))
        peer.stop()
        peer.start()
        talk.look()
        steps.append(talk.turn("restart", "Which of both is larger?"))
    finally:
        peer.stop()
    return steps


def measure(model_type: str, rounds: int) -> Family:
    """Both servers in turn, every other round the other way round."""
    found: dict[str, list[list[Step]]] = {name: [] for name in _SERVERS}
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder) / "models" / "first", model_type)
        models = Models(Path(folder) / "models", "first", "first")
        for number in range(rounds):
            for name in _SERVERS if number % 2 == 0 else reversed(_SERVERS):
                home = Path(folder) / f"{name}-{number}"
                peer = Peer(_recipe(name), models, home, Path(folder))
                found[name].append(converse(peer, number + 1))
    return Family(model_type, [_row(index, *found.values()) for index in range(len(_STEPS))])


def _recipe(name: str) -> Recipe:
    """As it is shipped, but run by this very Python, which has both packages."""
    recipe = find(name)
    start = tuple(word.replace("{venv}/bin/python", "{python}") for word in recipe.start)
    return msgspec.structs.replace(recipe, start=start, install=())


def _row(index: int, ours: Sequence[list[Step]], theirs: Sequence[list[Step]]) -> Row:
    pairs = [(one[index], other[index]) for one, other in zip(ours, theirs, strict=True)]
    ratios = [other.ttft_ms / one.ttft_ms for one, other in pairs]
    return Row(
        step=_STEPS[index],
        prompt_tokens=_medians((a.prompt_tokens, b.prompt_tokens) for a, b in pairs),
        computed_tokens=_medians((a.computed_tokens, b.computed_tokens) for a, b in pairs),
        encoded_images=_medians((a.num_encoded, b.num_encoded) for a, b in pairs),
        ttft_ms=(
            round(statistics.median(a.ttft_ms for a, _ in pairs), 1),
            round(statistics.median(b.ttft_ms for _, b in pairs), 1),
        ),
        times_faster=round(statistics.median(ratios), 2),
        times_faster_range=(round(min(ratios), 2), round(max(ratios), 2)),
        has_same_text=all(a.text == b.text for a, b in pairs),
    )


def _medians(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    ours, theirs = zip(*pairs, strict=True)
    return int(statistics.median(ours)), int(statistics.median(theirs))


def print_family(family: Family) -> None:
    """For people."""
    print(f"\n{family.model_type}: ours / mlx-vlm's server")
    print("step        prompt        computed      encoded  TTFT ms            times faster")
    for row in family.rows:
        low, high = row.times_faster_range
        print(
            f"{row.step:10}  {row.prompt_tokens[0]:5} /{row.prompt_tokens[1]:5}"
            f"  {row.computed_tokens[0]:5} /{row.computed_tokens[1]:5}"
            f"  {row.encoded_images[0]:2} /{row.encoded_images[1]:2}"
            f"  {row.ttft_ms[0]:8.1f} /{row.ttft_ms[1]:8.1f}"
            f"  {row.times_faster:6.2f} ({low:.2f}..{high:.2f})"
            f"{'' if row.has_same_text else '  other text'}"
        )


def main(words: Sequence[str]) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench vision", description=__doc__)
    parser.add_argument("--families", default="qwen3_vl,gemma3", help="model types, with commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args(words)
    report = Report(environment(), arguments.rounds, [])
    for model_type in arguments.families.split(","):
        report.families.append(measure(model_type, arguments.rounds))
        print_family(report.families[-1])
    text = json.dumps(msgspec.to_builtins(report), indent=1)
    arguments.json.write_text(text + "\n")
