"""`python -P -m tests.canaries`: loads models as a worker does and tells what code it reached for.

It reads jobs as JSON lines and answers each with one. It has no guard of its own: what it notes
is what upstream would have run. A canary is code of that name, put wherever upstream might look.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, Literal, NamedTuple

from runtime.environment import worker_environment

NAME = "canary"
_CODE = """\
import pathlib
pathlib.Path(__file__).with_suffix(".ran").touch()
class Canary:
    @classmethod
    def from_pretrained(cls, *arguments, **options):
        return cls()
    from_dict = from_pretrained
Model = ModelArgs = ModelConfig = Canary
"""
ROOT = Path(__file__).parent.parent

Way = Literal["door", "mlx_vlm", "tokenizer"]
"""How a job loads: through ours, or by upstream's own functions, which show that it can fail."""

Table = dict[str, Any]
Step = tuple[str | int, ...]


class Reached(NamedTuple):
    """What became of a job: the code it reached for, whether any ran, and why it did not load."""

    events: list[str]
    ran: list[str]
    error: str | None


class Change(NamedTuple):
    """A value to put at a place in one of a model's files."""

    file: str
    at: Step
    value: object


def plant(folder: Path) -> Path:
    """Canaries in a directory: as files, as a package, and as what files may be named like."""
    (folder / NAME).mkdir(exist_ok=True)
    for file in (f"{NAME}.py", f"{NAME}/__init__.py", f"{NAME}/{NAME}.py"):
        (folder / file).write_text(_CODE)
    named = {"auto_map": _auto_map("canary.Canary"), "model_type": NAME, "tokenizer_class": NAME}
    for file in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        (folder / NAME / file).write_text(json.dumps(named))
    return folder


def names(folder: Path) -> tuple[object, ...]:
    """What a file could call a canary."""
    inside = str(folder / NAME)
    return (
        *("canary.Canary", "canary", "canary.py", inside, f"{inside}/canary.py", "../canary"),
        *("org/canary--canary.Canary", ["canary.Canary", "canary.Canary"]),
    )


def asking(folder: Path) -> Table:
    """Every key that has been seen to name code, naming a canary."""
    table: Table = dict.fromkeys(_KEYS, "canary.Canary")
    file = dict.fromkeys(("model_file", "custom_code"), "canary.py")
    place = dict.fromkeys(("tokenizer", "tokenizer_name", "ocr_model_path"), str(folder / NAME))
    audio = {"audio_tokenizer_class": "AutoModel", "audio_tokenizer_name_or_path": str(folder)}
    return table | file | place | {"audio_tokenizer": audio, "auto_map": _auto_map("canary.Canary")}


def tables_in(value: object, at: Step = ()) -> Iterator[tuple[Step, Table]]:
    """Each object in a JSON value, and where it is."""
    if isinstance(value, dict):
        yield at, value
        for key, one in value.items():
            yield from tables_in(one, (*at, key))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from tables_in(one, (*at, number))


def changed(value: Any, at: Step, new: object) -> Any:
    """The JSON value with another one at this place."""
    if not at:
        return new
    copy = value.copy()
    if isinstance(copy, dict) and at[0] not in copy:
        copy[at[0]] = new
    else:
        copy[at[0]] = changed(copy[at[0]], at[1:], new)
    return copy


@contextmanager
def loader(home: Path) -> Generator[Loader]:
    """A process that loads, in a directory full of canaries."""
    home.mkdir()
    plant(home)
    (home / "moondream").mkdir()
    plant(home / "moondream")
    (home / "moondream" / NAME).rename(home / "moondream" / "starmie-v1")
    env = worker_environment("off") | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.canaries"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=home,
        env=env,
    )
    with process:
        yield Loader(process, home)
        process.kill()


class Loader:
    """The other side of the process."""

    def __init__(self, process: subprocess.Popen[str], home: Path) -> None:
        self._process = process
        self._home = home

    def load(self, path: Path, *, is_vision: bool, way: Way = "door") -> Reached:
        """What loading the model in a directory reaches for."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"path": str(path), "is_vision": is_vision, "way": way}) + "\n")
        stdin.flush()
        answer = json.loads(stdout.readline())
        ran = [str(file) for place in (path, self._home) for file in place.rglob("*.ran")]
        return Reached(answer["events"], ran, answer["error"])

    def load_changed(self, path: Path, changes: Sequence[Change], *, is_vision: bool) -> Reached:
        """The same with some of its files changed, and as they were afterwards."""
        before = {one.file: (path / one.file).read_bytes() for one in changes}
        try:
            for one in changes:
                whole = json.loads((path / one.file).read_bytes())
                (path / one.file).write_text(json.dumps(changed(whole, one.at, one.value)))
            return self.load(path, is_vision=is_vision)
        finally:
            for name, data in before.items():
                (path / name).write_bytes(data)


_KEYS = (
    *("auto_map", "model_file", "custom_code", "custom_pipelines", "trust_remote_code"),
    *("tokenizer_class", "slow_tokenizer_class", "processor_class", "image_processor_type"),
    *("video_processor_type", "feature_extractor_type", "image_processor", "feature_extractor"),
    *("tool_parser_type", "chat_template_type", "model_type", "speculators_model_type"),
    *("tokenizer", "tokenizer_name", "tokenizer_file", "vocab_file", "audio_tokenizer", "backend"),
    *("architectures", "_name_or_path", "name_or_path", "fast_tokenizer_files", "quant_method"),
    *("ocr_model_path", "ple_storage", "dflash_config", "code_revision", "type", "tokenizer_type"),
)
KEYS = _KEYS


def _auto_map(named: str) -> Table:
    pairs = ("AutoTokenizer", "AutoImageProcessor", "AutoVideoProcessor")
    single = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText")
    single += ("AutoProcessor", "AutoFeatureExtractor")
    return dict.fromkeys(single, named) | {pair: [named, named] for pair in pairs}


# What runs in the other process.

_events: list[str] = []


def _note(event: str, args: tuple[Any, ...]) -> None:
    """Whatever the interpreter is about to open, import or execute that is a canary."""
    match event:
        case "open" if isinstance(args[0], str | os.PathLike):
            said = os.fspath(args[0])
            is_it = NAME in said and said.endswith((".py", ".pyc"))
        case "import":
            said = f"{args[0]} {args[1]}"
            is_it = NAME in said.replace("tests.canaries", "")
        case "exec" if isinstance(args[0], CodeType):
            said = args[0].co_filename
            is_it = NAME in said.replace("tests/canaries", "")
        case "pickle.find_class":
            said, is_it = str(args), True
        case _:
            return
    if is_it:
        _events.append(f"{event} {said}")


def _load(path: str, way: Way, *, is_vision: bool) -> None:
    if way == "mlx_vlm":
        importlib.import_module("mlx_vlm.utils").load_model(Path(path), lazy=True)
        return
    if way == "tokenizer":
        auto = importlib.import_module("transformers").AutoTokenizer
        auto.from_pretrained(path, trust_remote_code=True)
        return
    from runtime.types import ModelSpec
    from runtime.worker import model as models
    from runtime.worker.input.template import Template

    kind = json.loads(Path(path, "config.json").read_text()).get("model_type")
    spec = ModelSpec(
        id="m",
        path=path,
        context=512,
        model_type=kind if isinstance(kind, str) else NAME,
        nbytes=1,
        created_s=1,
        is_vision=is_vision,
    )
    model = models.load(spec, lambda _: None)
    if model.vision_model is not None:
        model.vision_model.open(model.stream)
    assert Template(model.tokenizer).fingerprint


def _main() -> None:
    for module in (
        "runtime.worker.model",
        "runtime.worker.vision.model",
        "runtime.worker.input.template",
    ):
        importlib.import_module(module)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.addaudithook(_note)
    for line in sys.stdin:
        job = json.loads(line)
        _events.clear()
        error = None
        try:
            _load(job["path"], job["way"], is_vision=job["is_vision"])
        except BaseException as failure:  # whatever it is, the next one is loaded
            error = f"{type(failure).__name__}: {failure}"
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"events": _events, "error": error}), file=answers, flush=True)


if __name__ == "__main__":
    _main()
