"""What is kept of a worker's last words: frames, names of errors, the device; never a text."""

from __future__ import annotations

import pytest

from runtime.supervisor.last_words import kept, last_words

CANARY = "zebra harbour 7351"


@pytest.mark.parametrize(
    "line",
    [
        "Traceback (most recent call last):",
        '  File "/a/engine.py", line 12, in step',
        '  File "/a/engine.py", line 12 in <module>',
        "Fatal Python error: Segmentation fault",
        "Thread 0x00007fe2 [hearth] (most recent call first):",
        "libc++abi: terminating due to uncaught exception of type std::runtime_error: [METAL] No.",
        "  what():  [malloc] Unable to allocate 12 bytes.",
        "RuntimeError: [METAL] Command buffer execution failed",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_where_it_was_and_what_the_device_said_is_kept(line: str):
    assert kept(line) == line


@pytest.mark.parametrize(
    "line",
    [
        CANARY,
        f"    prompt = {CANARY!r}",
        f'  File "/a/b.py", line 3, in f {CANARY}',
        f"Fatal Python error: {CANARY}, and more",
        f"terminate called after {CANARY}",
        f"  what():  {CANARY}",
        f"[INFO] {CANARY}",
    ],
)
def test_a_text_is_not(line: str):
    assert CANARY not in (kept(line) or "")


@pytest.mark.parametrize("name", ["ValueError", "jinja2.exceptions.TemplateError", "LoadFailed"])
def test_of_an_error_only_its_name_is(name: str):
    assert kept(f"{name}: {CANARY}") == kept(name) == name


def test_what_is_withheld_is_counted():
    lines = [CANARY, "", CANARY, "KeyError: 'x'", "loading"]
    assert last_words(lines) == ("[2 lines withheld]", "KeyError", "[1 lines withheld]")


@pytest.mark.parametrize(
    "line",
    [
        "ModuleNotFoundError: No module named 'cv2'",
        "ImportError: libmlx.so: cannot open shared object file: No such file or directory",
    ],
)
def test_what_could_not_be_imported_is_told_whole(line: str):
    assert kept(line) == line
