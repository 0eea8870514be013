"""In a process with the guard, only installed code runs, whatever asks for other code."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.canaries import ROOT, plant

WAYS = {
    "a file": "importlib.util.spec_from_file_location('m', '{dir}/canary.py')",
    "compiled": "importlib.util.spec_from_file_location('m', '{dir}/canary.pyc')",
    "compiled elsewhere": "importlib.util.spec_from_file_location('m', '{dir}/forged.pyc')",
    "a package": "importlib.util.spec_from_file_location('m', '{dir}/canary/__init__.py')",
    "a link": "importlib.util.spec_from_file_location('m', '{dir}/link.py')",
}
IMPORTED = """
import importlib.util, sys
from runtime.worker.code_guard import run_only_installed_code
{guard}
spec = {spec}
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
SEARCHED = """
import sys
from runtime.worker.code_guard import run_only_installed_code
{guard}
sys.path.insert(0, {dir!r})
import canary
"""
EXTENDED = """
import importlib.machinery, importlib.util, sys
from runtime.worker.code_guard import run_only_installed_code
{guard}
loader = importlib.machinery.ExtensionFileLoader('canary', {dir!r} + '/canary.so')
spec = importlib.util.spec_from_loader('canary', loader)
importlib.util.module_from_spec(spec)
"""
PICKLED = """
import pickle, sys
from runtime.worker.code_guard import run_only_installed_code
{guard}
pickle.loads(b"cpathlib\\nPath\\n(S'{dir}/canary.ran'\\ntR.").touch()
"""
SCRIPTS = {
    **{name: IMPORTED.replace("{spec}", spec) for name, spec in WAYS.items()},
    "a place to search": SEARCHED,
    "a pickle": PICKLED,
}
GUARD = "run_only_installed_code()"


def run(script: str, folder: Path, guard: str) -> subprocess.CompletedProcess[str]:
    code = script.format(dir=str(folder), guard=guard)
    return subprocess.run(
        [sys.executable, "-P", "-B", "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
        check=False,
    )


def folder_of(tmp_path: Path) -> Path:
    folder = plant(tmp_path)
    code = (folder / "canary.py").read_text()
    (folder / "link.py").symlink_to(folder / "canary.py")
    # As if it were of the interpreter's own: what a file says of itself is nothing to go by.
    for name, said in {"canary": str(folder / "canary.py"), "forged": subprocess.__file__}.items():
        compiled = f"import importlib._bootstrap_external as b; c = compile({code!r}, {said!r}, "
        compiled += f"'exec'); open('{folder / name}.pyc', 'wb').write(b._code_to_timestamp_pyc(c))"
        subprocess.run([sys.executable, "-c", compiled], check=True)
    return folder


@pytest.mark.parametrize("name", SCRIPTS)
def test_code_that_is_not_installed_is_not_run(tmp_path: Path, name: str):
    folder = folder_of(tmp_path)
    done = run(SCRIPTS[name], folder, GUARD)
    assert "ForeignCode" in done.stderr
    assert list(folder.rglob("*.ran")) == []
    if not name.startswith("compiled"):  # it says where it was made, not where it is
        run(SCRIPTS[name], folder, "")
        assert list(folder.rglob("*.ran")) != []


def test_an_extension_of_another_place_is_not_even_opened(tmp_path: Path):
    (tmp_path / "canary.so").write_bytes(b"\x7fELF")
    assert "ForeignCode" in run(EXTENDED, tmp_path, GUARD).stderr
    assert "ForeignCode" not in run(EXTENDED, tmp_path, "").stderr


def test_what_is_installed_is_imported_as_ever(tmp_path: Path):
    script = "from runtime.worker.code_guard import run_only_installed_code\n{guard}\n"
    script += (
        "import dataclasses, jinja2, xml.dom, runtime.config.settings, numpy.linalg as linalg\n"
    )
    script += "print(jinja2.Template('{{{{ 1 + 1 }}}}').render())"
    done = run(script, tmp_path, GUARD)
    assert (done.stdout, done.stderr) == ("2\n", "")
