"""The pages that lead through the code name what is there."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.documents import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
PATHS = sorted(set(re.findall(r"`((?:api|runtime|store|tests)/[\w/]+(?:\.py)?/?)`", PAGE)))
KV = (ROOT / "runtime" / "kv" / "README.md").read_text("utf-8")
TOPS = ("api", "runtime", "store")


@pytest.mark.parametrize("path", PATHS)
def test_what_it_names_is_there(path: str):
    assert (ROOT / path).exists()


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"(?<![\w/])\w+\.py|runtime/\w+/\w+\.py", KV)))
)
def test_what_the_life_of_a_block_names_is_there(name: str):
    assert (ROOT / name).exists() if "/" in name else (ROOT / "runtime" / "kv" / name).exists()


def test_it_names_every_room():
    named = {path.rstrip("/") for path in PATHS}
    rooms = {
        f"{top}/{one.parent.name}" for top in TOPS for one in (ROOT / top).glob("*/__init__.py")
    }
    assert rooms - named == {"runtime/embedded"}


def test_each_room_is_in_a_contract_of_the_borders():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    said = {
        (container, name.strip(" ()"))
        for contract in contracts["contracts"]
        if contract["type"] == "layers"
        for container in contract.get("containers", ())
        for layer in contract["layers"]
        for name in layer.split("|")
    }
    for top in TOPS[:2]:
        rooms = {one.parent.name for one in (ROOT / top).glob("*/__init__.py")}
        assert rooms <= {name for container, name in said if container == top}
