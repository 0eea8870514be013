"""What of a model's directory upstream's loaders are given, and which directories are refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config.settings import ModelSettings
from runtime.models.files import checked_folder, read_spec
from runtime.models.folder import BrokenModel, NeedsOwnCode, as_of, asked_code, copied, without_code
from tests.model_folders import CONFIG, make_model

NO_SETTINGS = ModelSettings()
NAMES_CODE = {
    "auto_map": {"AutoModel": "evil.Model", "AutoTokenizer": ["evil.Slow", "evil.Fast"]},
    "trust_remote_code": True,
    "custom_pipelines": {"evil": {"impl": "evil.Pipeline"}},
}


def refusal(path: Path) -> str:
    with pytest.raises(NeedsOwnCode) as caught:
        read_spec("a", path, NO_SETTINGS)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "tokenizer", "reason"),
    [
        (CONFIG | {"model_file": "evil.py"}, {}, "computed by code of its own, 'evil.py'"),
        (
            CONFIG | {"text_config": {"layers": [{"model_file": "evil.py"}]}},
            {},
            "computed by code of its own, 'evil.py'",
        ),
        ({"model_type": "evil"}, {}, "mlx-lm has no code of its own for the type 'evil'"),
        ({"model_type": "../../evil"}, {}, "no code of its own for the type '../../evil'"),
        ({"model_type": "qwen3.evil"}, {}, "no code of its own for the type 'qwen3.evil'"),
        ({"model_type": "__init__"}, {}, "no code of its own for the type '__init__'"),
        (CONFIG, {"tool_parser_type": "evil"}, "the tool_parser_type 'evil', which mlx-lm lacks"),
        (CONFIG, {"chat_template_type": ["a"]}, "the chat_template_type ['a'], which mlx-lm lacks"),
        (
            {"model_type": "kimi_k2"},
            {"auto_map": {"AutoTokenizer": ["evil.T", None]}, "tokenizer_class": "TikTokTokenizer"},
            "its tokenizer, 'TikTokTokenizer', is code of its own",
        ),
    ],
)
def test_a_model_that_needs_code_of_its_own_is_refused(
    tmp_path: Path, config: object, tokenizer: object, reason: str
):
    assert reason in refusal(make_model(tmp_path / "a", config, tokenizer_config=tokenizer))


@pytest.mark.parametrize(
    ("model_type", "tokenizer"),
    [
        ("qwen3", {"auto_map": {"AutoModelForCausalLM": "modeling_qwen.Qwen"}}),
        ("qwen3", {"auto_map": {"AutoTokenizer": ["evil.T", None]}}),
        (
            "kimi_k2",
            {"auto_map": {"AutoTokenizer": ["evil.T", None]}, "tokenizer_class": "LlamaTokenizer"},
        ),
        ("kimi_k2", {"tool_parser_type": "kimi_k2"}),
    ],
)
def test_a_model_that_upstream_has_code_for_may_name_other_code_as_well(
    tmp_path: Path, model_type: str, tokenizer: object
):
    config = {"model_type": model_type, **NAMES_CODE}
    path = make_model(tmp_path / "a", config, tokenizer_config=tokenizer)
    assert read_spec("a", path, NO_SETTINGS).model_type == model_type


def test_loaders_get_weights_settings_and_tokenizer_and_nothing_that_asks_for_code(tmp_path: Path):
    processor = {
        "image_processor": {"image_processor_type": "evil.Processor", "size": 3, **NAMES_CODE},
        "processor_class": "../evil",
        "tokenizer": str(tmp_path / "evil"),
        "audio_tokenizer": {"audio_tokenizer_name_or_path": "evil", "audio_tokenizer_class": "A"},
    }
    path = make_model(
        tmp_path / "a",
        CONFIG | NAMES_CODE | {"vision_config": NAMES_CODE, "sub": [NAMES_CODE]},
        tokenizer_config=NAMES_CODE | {"tokenizer_class": "Qwen2TokenizerFast"},
        processor_config=processor,
        tokenizer={"model": {"vocab": {"auto_map": 1}}},
        offload_index={},
        adapter_config={"auto_mapping": {}},
    )
    (path / "merges.txt").write_text("a b")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("{{ 1 }}")
    for name in ("evil.py", "evil.pyc", "pytorch_model.bin", "weights.npz", "evil.so"):
        (path / name).write_bytes(b"evil")
    (path / "evil").mkdir()
    (path / "evil" / "__init__.py").touch()
    with copied(checked_folder(path)) as copy:
        names = {str(one.relative_to(copy)) for one in copy.rglob("*") if not one.is_dir()}
        tables = {one.name: json.loads(one.read_text()) for one in copy.glob("*.json")}
        assert (copy / "model.safetensors").read_bytes() == b"\0" * 8
        assert copy.name == path.name
        assert copy.stat().st_mode & 0o077 == 0
    assert not copy.parent.exists()
    assert names == {
        *("config.json", "tokenizer_config.json", "processor_config.json", "tokenizer.json"),
        *("model.safetensors", "merges.txt", "additional_chat_templates/rag.jinja"),
    }
    assert tables == {
        "config.json": CONFIG | {"vision_config": {}, "sub": [{}]},
        "tokenizer_config.json": {"tokenizer_class": "Qwen2TokenizerFast"},
        "processor_config.json": {"image_processor": {"size": 3}},
        "tokenizer.json": {"model": {"vocab": {"auto_map": 1}}},
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["auto_map", "model_file", "a", "b"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(JSON)
def test_what_asks_for_code_is_taken_out_at_any_depth_and_nothing_else(value: object):
    assert list(asked_code(without_code(value))) == []
    assert without_code(without_code(value)) == without_code(value)
    text = json.dumps(value)
    if "auto_map" not in text and "model_file" not in text:
        assert without_code(value) == value


Put = Callable[[Path], object]

ODD: dict[str, Put] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a circle": lambda file: file.symlink_to(file),
    "a secret": lambda file: file.symlink_to("/etc/passwd"),
    "of the kernel": lambda file: file.symlink_to("/proc/self/status"),
}
OPENED = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("chat_template.jinja", "chat_template.json", "tokenizer.model", "merges.txt", "vocab.json"),
    *("model.safetensors", "model.safetensors.index.json", "additional_chat_templates/a.jinja"),
    *("special_tokens_map.json", "added_tokens.json", "hf_quant_config.json", "tiktoken.model"),
)


@pytest.mark.parametrize("name", OPENED)
def test_what_is_no_file_of_a_model_is_refused_and_not_opened(tmp_path: Path, name: str):
    for kind, put in ODD.items():
        path = make_model(tmp_path / kind)
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).unlink(missing_ok=True)
        put(path / name)
        with pytest.raises(BrokenModel, match=name):
            read_spec("a", path, NO_SETTINGS)


def test_links_within_the_directory_into_blobs_and_to_a_copy_are_followed(tmp_path: Path):
    other = make_model(tmp_path / "other", tokenizer_config={"model_max_length": 512})
    path = make_model(tmp_path / "a")
    (path / "tokenizer_config.json").symlink_to(other / "tokenizer_config.json")
    (path / "kept.txt").write_text("a b")
    (path / "merges.txt").symlink_to("kept.txt")
    blobs = tmp_path / "hub" / "models--org--a" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "1f").write_text("{{ messages }}")
    (path / "chat_template.jinja").symlink_to(blobs / "1f")
    (path / "model.safetensors").rename(tmp_path / "weights-of-a.safetensors")
    (path / "model.safetensors").symlink_to(tmp_path / "weights-of-a.safetensors")
    (path / "vocab.txt").symlink_to(tmp_path / "nothing")
    spec = read_spec("a", path, NO_SETTINGS)
    assert (spec.context, spec.nbytes, "chat" in spec.capabilities) == (512, 8, True)
    with copied(checked_folder(path)) as copy:
        assert (copy / "merges.txt").read_text() == "a b"
        assert not (copy / "vocab.txt").exists()
        linked = (one for one in copy.rglob("*") if one.is_symlink())
        assert [one.name for one in linked] == ["model.safetensors"]


def test_a_file_that_becomes_a_pipe_after_it_was_checked_is_not_waited_for(tmp_path: Path):
    folder = checked_folder(make_model(tmp_path / "a", tokenizer={}))
    (tmp_path / "a" / "tokenizer.json").unlink()
    os.mkfifo(tmp_path / "a" / "tokenizer.json")
    with pytest.raises(OSError, match="not a regular file"), copied(folder):
        pass


def test_settings_beyond_any_size_are_refused_unread(tmp_path: Path):
    path = make_model(tmp_path / "a")
    os.truncate(path / "config.json", 1 << 40)
    with pytest.raises(BrokenModel, match=r"config\.json is larger than 64 MiB"):
        read_spec("a", path, NO_SETTINGS)


def test_a_pooling_module_is_one_of_the_model(tmp_path: Path):
    make_model(tmp_path / "elsewhere", {"pooling_mode_lasttoken": True})
    path = make_model(tmp_path / "a", modules=[{"type": "x.Pooling", "path": "../elsewhere"}])
    assert read_spec("a", path, NO_SETTINGS).pooling is None


def test_what_a_process_that_was_killed_left_is_removed_and_nothing_else(tmp_path: Path):
    folder = checked_folder(make_model(tmp_path / "a"))
    with copied(folder) as living:
        place = living.parents[1]
        left = place / f"hearth-model-{tmp_path.name}"
        (left / "a").mkdir(parents=True)
        for root in (left, living.parent):
            os.utime(root, (1, 1))
        with copied(folder):
            assert not left.exists()
            assert (living / "config.json").exists()


def test_messages_name_the_directory_that_the_model_is_in(tmp_path: Path):
    path = make_model(tmp_path / "a.b")
    with copied(checked_folder(path)) as copy:
        said = as_of(f"no tokenizer in '{copy}', and {copy / 'x'} is none", path)
    assert said == f"no tokenizer in '{path}', and {path / 'x'} is none"
