"""The house gauges: sizes and borders of `CONTRIBUTING.md` as numbers, read from the syntax tree.

`python -m ops.house.check` prints every finding as `path:line: message` and exits 1 on any.
"""

from __future__ import annotations

import ast
import io
import math
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("api", "runtime", "store", "migrations", "ops")
TESTS = "tests"

MAX_FUNCTION_LINES = 60
MAX_P90_FUNCTION_LINES = 35
MAX_PARAMETERS = 6
MAX_COMMENT_LINES = 2

BROAD_EXCEPT_FILES = frozenset(
    {
        "runtime/worker/__main__.py",
        "runtime/worker/engine.py",
        "runtime/worker/session.py",
        "runtime/worker/input/sandbox.py",  # whatever a lane's work raises is its answer
        "runtime/worker/output/detokenizer.py",  # the tokenizers library raises bare Exception
        "api/http/errors.py",
        "api/jobs.py",
        "store/database.py",  # what a closure raised reaches whoever waits for its future
    }
)
PROBING_FILES = frozenset({"runtime/kv/layers.py", "runtime/worker/model.py"})
COMPUTED_NAME_FILES = PROBING_FILES | {"runtime/types.py"}
ENVIRONMENT_FILES = frozenset(
    {
        "api/__main__.py",
        "api/bench/peers.py",
        "runtime/environment.py",
        "runtime/worker/distributed/launch.py",  # mlx finds its rank there
        "ops/bench/processes.py",
    }
)
PATCHING_FILES = frozenset({"runtime/worker/wired.py"})
LOOSE_DICT_FOLDER = "api/"

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Finding(NamedTuple):
    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


class Source(NamedTuple):
    """One file: its path relative to the root with forward slashes, its text, its tree."""

    path: str
    text: str
    tree: ast.Module

    def functions(self) -> Iterator[Function]:
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))


Remark = tuple[int, str]
Rule = Callable[[Source], Iterator[Remark]]


def parse(path: str, text: str) -> Source:
    return Source(path, text, ast.parse(text, path))


def num_lines(node: Function) -> int:
    """Lines from `def` to the end of the body; decorators do not count."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def function_length(source: Source) -> Iterator[Remark]:
    for node in source.functions():
        if num_lines(node) > MAX_FUNCTION_LINES:
            message = f"{node.name}: {num_lines(node)} lines (at most {MAX_FUNCTION_LINES})"
            yield node.lineno, message


def parameter_count(source: Source) -> Iterator[Remark]:
    for node in source.functions():
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        starred = [one for one in (arguments.vararg, arguments.kwarg) if one]
        own = [one for one in named if one.arg not in {"self", "cls"}]
        count = len(own) + len(starred)
        if count > MAX_PARAMETERS:
            yield node.lineno, f"{node.name}: {count} parameters (at most {MAX_PARAMETERS})"


def global_statement(source: Source) -> Iterator[Remark]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}: give the state an owner"


def broad_except(source: Source) -> Iterator[Remark]:
    if source.path in BROAD_EXCEPT_FILES:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
            yield node.lineno, "broad except: name what can happen, or let it reach a border"


def _is_broad(caught: ast.expr | None) -> bool:
    match caught:
        case None:
            return True
        case ast.Name(id=name):
            return name in {"Exception", "BaseException"}
        case ast.Tuple(elts=members):
            return any(_is_broad(member) for member in members)
        case _:
            return False


def attribute_probing(source: Source) -> Iterator[Remark]:
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Name(id="hasattr")) if source.path not in PROBING_FILES:
                yield node.lineno, "hasattr: let the type say what it has"
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "delattr"), args=[_, name, *_]):
                is_literal = isinstance(name, ast.Constant)
                if not is_literal and source.path not in COMPUTED_NAME_FILES:
                    yield node.lineno, "an attribute by a computed name hides who uses it"
            case _:
                pass


def loose_dict(source: Source) -> Iterator[Remark]:
    if source.path.startswith(LOOSE_DICT_FOLDER):
        return
    for node in ast.walk(source.tree):
        match node:
            case ast.Subscript(
                value=ast.Name(id="dict" | "Mapping" | "MutableMapping"),
                slice=ast.Tuple(elts=[ast.Name(id="str"), ast.Name(id="Any")]),
            ):
                yield node.lineno, "dict[str, Any] past the API border: use a struct"
            case _:
                pass


def environment(source: Source) -> Iterator[Remark]:
    if source.path in ENVIRONMENT_FILES:
        return
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in names:
                yield node.lineno, f"os.{name}: the environment is read at one place"
            case ast.ImportFrom(module="os", names=imported):
                for name in names & {alias.name for alias in imported}:
                    yield node.lineno, f"os.{name}: the environment is read at one place"
            case _:
                pass


def patched_import(source: Source) -> Iterator[Remark]:
    """Assignments to what another module owns, also through `setattr`."""
    if source.path in PATCHING_FILES:
        return
    imported = _imported_names(source.tree)
    for node in ast.walk(source.tree):
        for target in _changed_objects(node):
            owner = _root_name(target)
            if owner in imported:
                yield target.lineno, f"assignment to an attribute of the imported {owner}"


def _imported_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def _changed_objects(node: ast.AST) -> Iterator[ast.expr]:
    """The objects whose attributes or items this node sets or deletes."""
    match node:
        case ast.Attribute(value=owner, ctx=ast.Store() | ast.Del()):
            yield owner
        case ast.Subscript(value=ast.Attribute() as owner, ctx=ast.Store() | ast.Del()):
            yield owner
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, *_]):
            yield owner
        case _:
            pass


def _root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def comments(source: Source) -> Iterator[Remark]:
    run = 0
    last_line = 0
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if re.search(r"\b(TODO|FIXME)\b", token.string):
            yield line, "unfinished work is an issue, not a comment"
        if token.line.lstrip().startswith("#"):
            run = run + 1 if line == last_line + 1 else 1
            last_line = line
        if run == MAX_COMMENT_LINES + 1:
            yield line, f"a comment of more than {MAX_COMMENT_LINES} lines: say it in the code"


SIZE_RULES: tuple[Rule, ...] = (function_length,)
RULES: tuple[Rule, ...] = (
    *SIZE_RULES,
    parameter_count,
    global_statement,
    broad_except,
    attribute_probing,
    loose_dict,
    environment,
    patched_import,
    comments,
)


def check_source(source: Source) -> list[Finding]:
    """All findings in one file; tests are only measured."""
    rules = SIZE_RULES if source.path.startswith(f"{TESTS}/") else RULES
    remarks = sorted({remark for rule in rules for remark in rule(source)})
    return [Finding(source.path, line, message) for line, message in remarks]


def check_p90(sources: list[Source]) -> list[Finding]:
    """The gauge of the whole house: nine functions in ten are short."""
    lengths = sorted(num_lines(node) for source in sources for node in source.functions())
    if not lengths:
        return []
    p90 = lengths[math.ceil(0.9 * len(lengths)) - 1]
    if p90 <= MAX_P90_FUNCTION_LINES:
        return []
    message = f"one function in ten has {p90} lines or more (p90 at most {MAX_P90_FUNCTION_LINES})"
    return [Finding(", ".join(PACKAGES), 0, message)]


def read_sources(root: Path) -> list[Source]:
    """Every Python file of the packages and the tests under `root`, in order."""
    paths = sorted(path for top in (*PACKAGES, TESTS) for path in (root / top).rglob("*.py"))
    return [parse(path.relative_to(root).as_posix(), path.read_text("utf-8")) for path in paths]


def check_tree(root: Path) -> list[Finding]:
    sources = read_sources(root)
    packages = [source for source in sources if not source.path.startswith(f"{TESTS}/")]
    return [one for source in sources for one in check_source(source)] + check_p90(packages)


def main() -> int:
    root = Path(__file__).parents[2]
    findings = check_tree(root)
    for line in findings:
        print(line)
    print(f"house gauges: {len(findings)} findings" if findings else "house gauges: all kept")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
