"""What the documentation says is there: pages, settings, commands, formats."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from xxhash import xxh3_128_hexdigest

from api.bench.recipes import Recipe, find, shipped
from api.cli.commands import COMMANDS, parser
from ops.docs.pages import made
from ops.docs.sizing import CONFIG, FAMILIES, Shape
from runtime import errors
from runtime.config.limits import GenerateLimits, LimitSettings
from runtime.config.reference import GROUPS, LIMITED, LIMITS, MODEL, PROMPT_RULES, SETTINGS
from runtime.config.settings import ModelSettings, PromptSwitches, Settings, load_settings
from runtime.embedded import HEARTH_TINY
from store.kv_file import unpack_front
from store.slots import SLOT
from tests.documents import PAGES, ROOT, anchors, blocks, inline_code, links

OTHERS_VARIABLES = {"HEARTH_CONFIG", "HEARTH_API_KEY"}
OTHERS_SETTINGS = {"wire_api"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("page", list(made()), ids=lambda page: page.name)
def test_pages_made_from_the_code_are_current(page: Path) -> None:
    assert page.read_text("utf-8") == made()[page], "run python -m ops.docs"


@pytest.mark.parametrize(
    ("struct", "words"),
    [
        (Settings, SETTINGS),
        (ModelSettings, MODEL),
        (PromptSwitches, PROMPT_RULES),
        (GenerateLimits, LIMITS),
        (LimitSettings, LIMITED),
    ],
)
def test_every_setting_is_told_once(struct: type[msgspec.Struct], words: dict[str, str]) -> None:
    assert sorted(words) == sorted(struct.__struct_fields__)


def test_every_setting_has_its_place_in_the_reference() -> None:
    grouped = [name for _, names in GROUPS for name in names]
    assert sorted(grouped) == sorted(SETTINGS)


@pytest.mark.parametrize("block", list(blocks("toml")), ids=str)
def test_configuration_in_the_pages_is_accepted(block: Any, tmp_path: Path) -> None:
    """Those of other programs are named above them; recipes are ours as well."""
    if "/config.toml" in block.above:
        tomllib.loads(block.text)
    elif "recipe" in block.above:
        msgspec.convert(tomllib.loads(block.text), Recipe)
    else:
        file = tmp_path / "hearth.toml"
        file.write_text(block.text)
        load_settings({"config": str(file)}, {"HOME": str(tmp_path)})


def test_settings_named_in_the_pages_exist() -> None:
    known = {*SETTINGS, *MODEL, *PROMPT_RULES, *OTHERS_SETTINGS, *Recipe.__struct_fields__}
    for page in (page for page in PAGES if page.parent.name != "decisions"):
        for code in inline_code(page):
            if set_to := re.fullmatch(r"([a-z]+(?:_[a-z]+)+) = .+", code):
                assert set_to[1] in known, (page, code)
            for variable in re.findall(r"HEARTH_[A-Z_]*[A-Z]", code):
                name = variable.removeprefix("HEARTH_").lower()
                assert name in SETTINGS or variable in OTHERS_VARIABLES, (page, code)


def test_commands_named_in_the_pages_exist() -> None:
    known = {command.name for command in COMMANDS} | {"--help", "COMMAND"}
    for page in PAGES:
        for code in inline_code(page):
            if found := re.fullmatch(r"hearth ([a-z-]+)\b.*", code):
                assert found[1] in known, (page, code)


def test_every_failure_that_is_not_the_clients_is_among_the_symptoms() -> None:
    told = set(inline_code(ROOT / "docs" / "troubleshooting.md"))
    kinds = vars(errors).values()
    failures = [
        one
        for one in kinds
        if isinstance(one, type) and issubclass(one, errors.HearthError)
        if issubclass(one, errors.Overloaded) or not issubclass(one, errors.RequestRejected)
    ]
    own = {one.code for one in failures} - {"invalid_settings", "cancelled"}
    assert len(own) > 10
    assert own | {"grammar_too_heavy", "grammar_failed", "download_failed"} <= told


@pytest.mark.parametrize("block", list(blocks("sh")), ids=str)
def test_commands_in_the_pages_can_be_parsed(block: Any) -> None:
    for line in block.text.splitlines():
        if line.startswith("hearth "):
            parser().parse_args(shlex.split(line, comments=True)[1:])


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_can_be_read(name: str) -> None:
    assert find(name).name == name


def test_the_slot_in_the_pages_is_one() -> None:
    page = ROOT / "docs" / "slot-format.md"
    (text, payload) = (one.text.strip() for one in blocks("json", "hex") if one.page == page)
    data = bytes.fromhex(payload)
    json = text.encode()
    json += b" " * (-(8 + len(json)) % 64)
    start = len(json).to_bytes(8, "little") + json
    front = unpack_front(SLOT, start)
    assert front.file_bytes == len(start) + len(data)
    tensors = [data[one.start : one.end] for one in front.entries]
    assert front.checksums == tuple(map(xxh3_128_hexdigest, tensors))
    assert [one.shape for one in front.entries] == [(2,), (2, 1, 2), (2, 1, 2)]


def test_figures_of_the_first_screen_are_those_of_the_report() -> None:
    first_screen, _, rest = (ROOT / "README.md").read_text("utf-8").partition("## Start")
    measured, _, _ = rest.partition("<!-- /bench -->")
    figures = re.findall(r"[\d,]+ ms", first_screen)
    assert len(figures) >= 10
    assert not [one for one in figures if f" {one} " not in measured]


def test_the_sizes_of_the_embedded_model_follow_from_its_configuration() -> None:
    config = msgspec.json.decode((HEARTH_TINY / "config.json").read_bytes())
    shape = Shape(
        config["num_hidden_layers"],
        config["num_key_value_heads"],
        config["head_dim"],
        item_bytes=4,
        source=CONFIG,
    )
    assert FAMILIES["hearth-tiny (float32)"] == shape
