"""What may be kept of what a worker printed: where it was and which errors it met, never a text.

A worker prints what its libraries print, and an exception's message may quote a prompt. So lines
are kept by their form: frames, names of exceptions, what could not be imported, what the machine
has no more of, and what mlx says of its device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from runtime.scarcity import LINE

_KEPT = re.compile(
    r'\s*File "[^"]*", line \d+(,? in [\w.<>]+)?$'
    r"|Traceback \(most recent call last\):$"
    r"|During handling of the above exception, another exception occurred:$"
    r"|The above exception was the direct cause of the following exception:$"
    r"|Fatal Python error: [A-Z][\w ]{0,60}$"
    r"|(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):$"
    r"|Stack \(most recent call first\):$"
    r"|(ModuleNotFoundError|ImportError): .{0,300}$"  # of what is installed, never of a prompt
)
_ERROR = re.compile(
    r"(?P<name>[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning|Failed|Failure))(:.*)?$"
)
_DEVICE = re.compile(
    r"(libc\+\+abi: terminating due to uncaught exception of type [\w:]+: "
    r"|terminate called after throwing an instance of '[\w:]+'|  what\(\):  |[\w.]*Error: )?"
    r"(\[(METAL|malloc|malloc_or_wait|cuda|CUDA|Event|eval|metal::[\w:]+)\] .{0,200})?"
)


def kept(line: str) -> str | None:
    """What may be kept of a line; None when nothing of it may."""
    if _KEPT.match(line):
        return line
    device = _DEVICE.match(line)
    if device is not None and device[0] and (device[2] or device[0] == line):
        return device[0]
    if (lacking := LINE.match(line)) is not None:
        return lacking[1]
    error = _ERROR.match(line)
    return error["name"] if error is not None else None


def last_words(lines: Sequence[str]) -> tuple[str, ...]:
    """What may be kept of lines, with how many there were between."""
    found: list[str] = []
    num_withheld = 0
    for line in filter(str.strip, lines):
        text = kept(line)
        if text is None:
            num_withheld += 1
            continue
        if num_withheld:
            found.append(f"[{num_withheld} lines withheld]")
            num_withheld = 0
        found.append(text)
    return (*found, f"[{num_withheld} lines withheld]") if num_withheld else tuple(found)
