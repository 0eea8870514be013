"""Each gauge catches a planted violation and lets the legal neighbour pass."""

import subprocess
import sys
from pathlib import Path

import pytest

from ops.house import check


def findings(text: str, path: str = "runtime/example.py") -> list[str]:
    return [str(finding) for finding in check.check_source(check.parse(path, text))]


def function_of(num_lines: int) -> str:
    return "def long():\n" + "    x = 1\n" * (num_lines - 1)


def test_a_function_may_have_60_lines_but_not_61():
    assert findings(function_of(60)) == []
    assert findings(function_of(61)) == ["runtime/example.py:1: long: 61 lines (at most 60)"]


def test_decorators_do_not_lengthen_a_function_and_methods_count():
    text = "class A:\n    @staticmethod\n    async def long():\n" + "        x = 1\n" * 60
    assert findings(text) == ["runtime/example.py:3: long: 61 lines (at most 60)"]


@pytest.mark.parametrize(
    ("signature", "count"),
    [
        ("self, a, b, c, d, e, f", 6),
        ("self, a, b, c, d, e, f, g", 7),
        ("a, b, /, c, d, *, e, f, g", 7),
        ("a, b, c, d, e, *args, **kwargs", 7),
    ],
)
def test_seven_parameters_are_too_many(signature: str, count: int):
    expected = [f"runtime/example.py:1: f: {count} parameters (at most 6)"] if count > 6 else []
    assert findings(f"def f({signature}): ...\n") == expected


def test_structs_may_have_any_number_of_fields():
    assert findings("class A(Struct):\n" + "".join(f"    f{i}: int\n" for i in range(20))) == []


def test_global_is_found():
    assert findings("def f():\n    global x, y\n") == [
        "runtime/example.py:2: global x, y: give the state an owner"
    ]


@pytest.mark.parametrize(
    "clause", ["", " Exception", " BaseException", " (ValueError, Exception)", " Exception as e"]
)
def test_a_broad_except_is_found_outside_its_six_files(clause: str):
    text = f"try:\n    f()\nexcept{clause}:\n    raise\n"
    message = "broad except: name what can happen, or let it reach a border"
    assert findings(text) == [f"runtime/example.py:3: {message}"]
    assert findings(text, "runtime/worker/engine.py") == []


def test_a_narrow_except_passes():
    assert findings("try:\n    f()\nexcept (ValueError, OSError):\n    raise\n") == []


def test_only_eight_files_may_catch_everything():
    assert sorted(check.BROAD_EXCEPT_FILES) == [
        "api/http/errors.py",
        "api/jobs.py",
        "runtime/worker/__main__.py",
        "runtime/worker/engine.py",
        "runtime/worker/input/sandbox.py",
        "runtime/worker/output/detokenizer.py",
        "runtime/worker/session.py",
        "store/database.py",
    ]


def test_hasattr_is_found_outside_the_files_that_probe_upstream():
    text = 'hasattr(cache, "trim")\n'
    assert findings(text) == ["runtime/example.py:1: hasattr: let the type say what it has"]
    assert findings(text, "runtime/kv/layers.py") == []


@pytest.mark.parametrize("call", ["getattr(x, name)", "setattr(x, name, 1)", "delattr(x, name)"])
def test_an_attribute_by_computed_name_is_found_outside_its_files(call: str):
    message = "an attribute by a computed name hides who uses it"
    assert findings(f"{call}\n") == [f"runtime/example.py:1: {message}"]
    assert findings(f"{call}\n", "runtime/types.py") == []


def test_a_literal_attribute_name_passes():
    assert findings('getattr(x, "name", None)\n') == []


@pytest.mark.parametrize("mapping", ["dict", "Mapping", "MutableMapping"])
def test_a_loose_dict_is_found_outside_the_api(mapping: str):
    text = f"def f(x: {mapping}[str, Any]): ...\n"
    message = "dict[str, Any] past the API border: use a struct"
    assert findings(text) == [f"runtime/example.py:1: {message}"]
    assert findings(text, "api/openai/schemas.py") == []
    assert findings(f"def f(x: {mapping}[str, int]): ...\n") == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('os.environ["HOME"]\n', "environ"),
        ('os.getenv("HOME")\n', "getenv"),
        ("from os import environ\n", "environ"),
    ],
)
def test_the_environment_is_read_by_the_command_line_alone(text: str, name: str):
    message = f"os.{name}: the environment is read at one place"
    assert findings(text) == [f"runtime/example.py:1: {message}"]
    assert findings(text, "api/__main__.py") == []


@pytest.mark.parametrize(
    "statement",
    [
        "generate.limit = f",
        "generate.Batch.step = f",
        "generate.count += 1",
        "del generate.limit",
        "generate.TABLE['a'] = 1",
        "setattr(generate, 'limit', f)",
    ],
)
@pytest.mark.parametrize("imported", ["from mlx_lm import generate", "import mlx_lm as generate"])
def test_a_patched_import_is_found_outside_its_one_place(imported: str, statement: str):
    text = f"{imported}\n{statement}\n"
    message = "assignment to an attribute of the imported generate"
    assert findings(text) == [f"runtime/example.py:2: {message}"]
    assert findings(text, "runtime/worker/wired.py") == []


def test_own_attributes_may_be_assigned():
    assert findings("import a\nclass B:\n    def f(self):\n        self.a = a.b\n") == []


def test_a_comment_has_at_most_two_lines():
    two = "# one\n# two\n"
    assert findings(f"{two}x = 1\n{two}") == []
    assert findings("x = 1\n# one\n# two\n# three\n# four\n") == [
        "runtime/example.py:4: a comment of more than 2 lines: say it in the code"
    ]


def test_comments_behind_code_are_no_block():
    assert findings("x = 1  # a\ny = 2  # b\nz = 3  # c\n") == []


@pytest.mark.parametrize("word", ["TODO", "FIXME"])
def test_unfinished_work_is_found_in_comments_only(word: str):
    assert findings(f"x = 1  # {word}: later\n") == [
        "runtime/example.py:1: unfinished work is an issue, not a comment"
    ]
    assert findings(f'x = "{word}"\n') == []


def test_tests_are_measured_but_not_judged():
    path = "tests/unit/test_example.py"
    assert findings("try:\n    hasattr(x, y)\nexcept Exception:\n    pass\n", path) == []
    assert findings(function_of(61), path) == [f"{path}:1: long: 61 lines (at most 60)"]


def test_nine_functions_in_ten_have_at_most_35_lines():
    def house(num_long: int) -> list[check.Source]:
        lengths = [36] * num_long + [3] * (10 - num_long)
        return [check.parse(f"runtime/{i}.py", function_of(n)) for i, n in enumerate(lengths)]

    assert check.check_p90(house(1)) == []
    assert [finding.message for finding in check.check_p90(house(2))] == [
        "one function in ten has 36 lines or more (p90 at most 35)"
    ]
    assert check.check_p90([]) == []


def test_the_tree_is_read_from_the_packages_and_the_tests(tmp_path: Path):
    for folder in ("api", "store/sub", "tests/unit", "docs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("def f():\n" + "    x = 1\n" * 60)
    assert [finding.path for finding in check.check_tree(tmp_path) if finding.line] == [
        "api/a.py",
        "store/sub/a.py",
        "tests/unit/a.py",
    ]


@pytest.mark.parametrize(("text", "status"), [("x = 1\n", 0), ("x = 1  # TODO\n", 1)])
def test_the_command_fails_on_any_finding(tmp_path: Path, text: str, status: int):
    for name, content in (
        ("ops/__init__.py", ""),  # or another on the path would come first
        ("ops/house/check.py", Path(check.__file__).read_text()),
        ("api/a.py", text),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    done = subprocess.run(
        [sys.executable, "-m", "ops.house.check"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert done.stdout.splitlines()[-1] == (
        "house gauges: 1 findings" if status else "house gauges: all kept"
    )
