"""How much text a server's event loop hands to code that may read it, counted, not timed.

The server's packages are compiled with every call, concatenation, comparison, slice and format
string in them counted, if they run on the thread of the loop: the characters that are handed over,
and the calls. What is counted is summed over one turn of the loop. A call of a function that is
compiled this way counts nothing by itself, as what it does is counted; nor does one that is known
to pass its arguments on unread (`_UNREAD`). Everything else may read all that it is given.

`python -m api` counts with the environment of `environment`; `Counts` asks for the figures.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import importlib.abc
import importlib.machinery
import json
import operator
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from typing_extensions import override

from tests.waiting import until

if TYPE_CHECKING:
    from tests.running_server import RunningServer

ROOT = Path(__file__).parent.parent
_FILE = "COUNTED_LOOP"
_PACKAGES = ("api", "runtime", "store", "litestar", "uvicorn")
_OPERATORS: Mapping[type[ast.AST], str] = {ast.Add: "add", ast.Mod: "mod", ast.Mult: "mul"}
_COMPARISONS: Mapping[type[ast.AST], str] = {ast.Eq: "eq", ast.NotEq: "ne"}
_TEXTS = (str, bytes, bytearray)
_UNREAD = frozenset(
    {
        *(
            "len",
            "isinstance",
            "iter",
            "next",
            "anext",
            "getattr",
            "id",
            "callable",
            "type",
            "repr",
        ),
        *("list.append", "list.pop", "deque.append", "deque.popleft", "dict.get", "dict.pop"),
        *("dict.setdefault", "dict.items", "dict.values", "OrderedDict.pop", "set.add"),
        *("Future.set_result", "Future.result", "Task.result", "Loop.run_in_executor"),
        *("ContextVar.set", "Context.run", "to_thread", "create_task", "shield", "wait", "replace"),
        "TaskGroup.start_soon",
        # What a handler is given is a struct already, so that nothing in it is looked at again.
        *("convert", "asdict"),
        # The kernel takes as much at once as its buffer has room for, the rest later.
        *("UnixTransport.write", "UnixTransport.writelines", "TCPTransport.write"),
    }
)


class Turn(NamedTuple):
    """The most that one turn of the loop came to, and where most of it was."""

    num_characters: int
    num_calls: int
    where: Mapping[str, int]


class Counts:
    """Asks a server that counts. `take` gives what was the most since it was asked before."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "counts.json"
        (folder / "sitecustomize.py").write_text(
            "import sys\n"
            "if sys.orig_argv[1:3] == ['-m', 'api']:\n"
            "    from tests import counted_loop\n"
            "    counted_loop.install()\n"
        )
        self.environment = {"PYTHONPATH": f"{folder}:{ROOT}", _FILE: str(self._file)}

    async def take(self, server: RunningServer) -> Turn:
        self._file.unlink(missing_ok=True)
        server.process.send_signal(signal.SIGUSR2)
        server.get("/health/live")  # for an idle loop does not look at signals
        await until(self._file.exists, "the counts are written")
        return Turn(**json.loads(self._file.read_text()))


# What runs in the server.


class _Counter:
    """The current turn of the loop, and the greatest since the last report."""

    def __init__(self) -> None:
        self.characters = 0
        self.calls = 0
        self.most_characters = 0
        self.most_calls = 0
        self.where: dict[str, int] = {}
        self.places: dict[str, int] = {}
        self.is_armed = False

    def count(self, place: str, num_characters: int) -> None:
        self.calls += 1
        self.characters += num_characters
        if num_characters > 1024:
            self.places[place] = self.places.get(place, 0) + num_characters
        if not self.is_armed and (loop := asyncio._get_running_loop()) is not None:
            self.is_armed = True
            loop.call_soon(self.end_turn)

    def end_turn(self) -> None:
        if self.characters > self.most_characters:
            self.most_characters, self.where = self.characters, self.places
        self.most_calls = max(self.most_calls, self.calls)
        self.characters = self.calls = 0
        self.places = {}
        self.is_armed = False

    def report(self) -> None:
        turn = Turn(self.most_characters, self.most_calls, self.where)
        self.most_characters = self.most_calls = 0
        self.where = {}
        path = Path(os.environ[_FILE])
        path.with_suffix(".tmp").write_text(json.dumps(turn._asdict()))
        path.with_suffix(".tmp").rename(path)


def install() -> None:
    """From now on what is imported of the packages is counted."""
    counter, loop_thread = _Counter(), threading.get_ident()

    def touch(place: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == loop_thread and asyncio._get_running_loop() is not None:
            counter.count(place, _read_by(function, args, kwargs))
        return function(*args, **kwargs)

    builtins.__dict__["__touch__"] = touch
    builtins.__dict__["__operator__"] = operator
    builtins.__dict__["__slice__"] = _sliced
    builtins.__dict__["__shown__"] = _shown
    sys.meta_path.insert(0, _Finder())
    signal.signal(signal.SIGUSR2, lambda *_: counter.report())


def _sliced(whole: Any, part: Any) -> Any:
    return whole[part]


def _shown(value: Any) -> Any:
    return value


def _read_by(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The characters that the function may look at."""
    while type(function).__name__ == "partial":
        args, function = (*function.args, *args), function.func
    if function is _sliced:
        return min(_size(args[0]), _size(args[0][args[1]])) if type(args[0]) in _TEXTS else 0
    if function in (operator.eq, operator.ne):
        return 0 if args[0] is args[1] else min(map(_size, args))
    inner = function.__func__ if isinstance(function, MethodType) else function
    if isinstance(inner, FunctionType) and inner.__module__.partition(".")[0] in _PACKAGES:
        return 0
    if isinstance(function, type) and not issubclass(function, _TEXTS):
        return 0
    if _name(function) in _UNREAD:
        return 0
    owner = getattr(function, "__self__", None)
    given = [owner] if type(owner) in _TEXTS else []
    return sum(map(_size, [*given, *args, *kwargs.values()]))


def _name(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    is_method = owner is not None and not isinstance(owner, ModuleType | type)
    name = getattr(function, "__name__", type(function).__name__)
    return f"{type(owner).__name__}.{name}" if is_method else name


def _size(value: Any) -> int:
    """The characters or bytes in a value and in what it is made of."""
    if isinstance(value, _TEXTS):
        return len(value)
    if isinstance(value, memoryview):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return sum(map(_size, value))
    if isinstance(value, msgspec.Struct):
        return sum(_size(getattr(value, name)) for name in value.__struct_fields__)
    return 0


class _Finder(importlib.abc.MetaPathFinder):
    """Has the packages' own files compiled with counting."""

    @override
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in _PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    @override
    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path))
        _Counting(fullname).visit(tree)
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)


class _Counting(ast.NodeTransformer):
    """Inside of functions puts `__touch__(place, f, x)` for `f(x)`; what annotates stays."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._depth = 0

    def _function(self, node: Any) -> Any:
        self._depth += 1
        node.body = [self.visit(one) for one in node.body]
        self._depth -= 1
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = self.visit(node.value) if node.value is not None else None
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_special = isinstance(node.func, ast.Name) and node.func.id in ("super", "locals", "vars")
        return node if is_special else self._touch(node, node.func, node.args, node.keywords)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        name = _OPERATORS.get(type(node.op))
        return node if name is None else self._operate(node, name, node.left, node.right)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        name = _COMPARISONS.get(type(node.ops[0])) if len(node.ops) == 1 else None
        return node if name is None else self._operate(node, name, node.left, *node.comparators)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load) or not isinstance(node.slice, ast.Slice):
            return node
        parts: list[ast.expr] = [one or ast.Constant(None) for one in _bounds(node.slice)]
        part = ast.Call(ast.Name("slice", ast.Load()), parts, [])
        return self._touch(node, ast.Name("__slice__", ast.Load()), [node.value, part], [])

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        self.generic_visit(node)
        if self._depth:
            shown = ast.Name("__shown__", ast.Load())
            node.value = self._touch(node, shown, [node.value], [])
        return node

    def _operate(self, node: ast.AST, name: str, *sides: ast.expr) -> Any:
        function = ast.Attribute(ast.Name("__operator__", ast.Load()), name, ast.Load())
        return self._touch(node, function, list(sides), [])

    def _touch(self, node: Any, function: ast.expr, args: list[Any], keywords: list[Any]) -> Any:
        if not self._depth:
            return node
        place = ast.Constant(f"{self._module}:{node.lineno}")
        call = ast.Call(ast.Name("__touch__", ast.Load()), [place, function, *args], keywords)
        return ast.copy_location(call, node)


def _bounds(part: ast.Slice) -> tuple[Any, Any, Any]:
    return part.lower, part.upper, part.step
