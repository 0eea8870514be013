"""What is here asks over HTTP and reads files as bytes: it imports nothing of how KV is kept."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTSIDE = {"runtime.keys", "runtime.types", "runtime.environment"}
"""What of the product is imported, by helpers as well: keys, the words of prompts, variables."""
PRODUCT = ("api", "hearth", "migrations", "runtime", "store")
INSIDE = ("runtime.kv", "runtime.cache", "runtime.kv_messages", "store")


def file_of(module: str) -> Path | None:
    """Where a module of the tests is."""
    path = ROOT.joinpath(*module.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((one for one in found if one.exists()), None)


def imported(path: Path) -> Iterator[str]:
    """Modules that a file imports, wherever in it, and names from which it imports some."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)


def is_of(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == one or module.startswith(f"{one}.") for one in packages)


def reached(paths: list[Path]) -> dict[str, Path]:
    """All modules of the product that these files and the helpers that they import know."""
    seen: set[Path] = set()
    found: dict[str, Path] = {}
    waiting = list(paths)
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for module in imported(path):
            if is_of(module, ("tests",)) and (helper := file_of(module)) is not None:
                waiting.append(helper)
            elif is_of(module, PRODUCT):
                found[module] = path
    return found


def test_neither_these_tests_nor_their_helpers_import_how_kv_is_kept():
    paths = [*sorted(Path(__file__).parent.glob("*.py")), ROOT / "tests" / "conftest.py"]
    found = reached(paths)
    inside = {module: path for module, path in found.items() if is_of(module, INSIDE)}
    assert not inside
    others = {module for module in found if not is_of(module, tuple(OUTSIDE))}
    assert others <= {"runtime"}, f"also import {others}"
    assert "runtime.keys" in found, "imports are found"


def test_what_imports_how_kv_is_kept_is_noticed():
    """The negative control."""
    found = reached([ROOT / "tests" / "crash" / "test_server_killed.py"])
    assert any(is_of(module, INSIDE) for module in found)
