"""docs/judge.md, made of what was found; pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from ops.judge.bench import Amount
from ops.judge.outcome import Outcome

_PACKAGE = re.compile(r"^([\w-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)", re.MULTILINE)
_HASH = re.compile(r"sha256:([0-9a-f]{64})")

_INTRODUCTION = """\
# Two real models

<!-- made by make judge -->
`make judge` runs two models with real weights through the whole of Hearth: `hearth serve` in a process of its own, its worker, its store, HTTP. Beside it `mlx_lm`'s own `stream_generate` runs in another process without anything of Hearth. Both read the same folder of float32 weights and decode greedily. The command installs the packages below (330 MB) and takes long; `make test` has nothing of it. This page is what its last run wrote.

**A divergence** is told one by one, with what explains it, or as *not explained*. A *tie* is two tokens whose log probabilities differ by less than 0.001 on both sides: which comes first then depends on rounding, and that depends on how a prompt was cut into slices, and on what was computed beside it.
"""  # noqa: E501

_CHECKS = {
    "greedy text": "Prompts of this repository's pages and code, of many scripts, questions and conversations; text and reason to stop equal to `mlx_lm`'s.",  # noqa: E501
    "perplexity": "Texts scored with `echo` and `logprobs`; equal means within 0.001 of `mlx_lm`'s, as a ratio.",  # noqa: E501
    "conversation": "Twelve turns with tools in the generic form, edits, branches and forced calls; the same requests to a server that is restarted and killed in between are answered alike. A forced call is valid.",  # noqa: E501
    "JSON schemas": "Answers with `response_format` end by themselves and are valid for `jsonschema`.",  # noqa: E501
    "text across tokens": "Emoji, CJK and other scripts: whole, streamed, cut after each of the first tokens, and ended by stop strings; equal to `mlx_lm`'s, and no U+FFFD that it has not.",  # noqa: E501
    "sliding window": "A conversation that leaves the window three times behind, with restarts and `kill -9` in between, beside the uninterrupted one and `mlx_lm`, which computes each turn from its beginning.",  # noqa: E501
}


class Report(msgspec.Struct):
    """What a run found: outcomes of models by their titles."""

    versions: dict[str, str]
    amounts: dict[str, Amount]
    outcomes: dict[str, list[Outcome]]


def page(report: Report, lock: str) -> str:
    """The page's text; `lock` is the file that pins the packages."""
    parts = [_INTRODUCTION, _summary(report.outcomes), _asked(report.amounts)]
    for title, outcomes in report.outcomes.items():
        parts.append(f"## {title}\n")
        parts += [_section(outcome) for outcome in outcomes if outcome.num]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    parts.append(f"## Versions\n\n{versions}.\n")
    parts.append(_packages(lock))
    return "\n".join(parts)


def packages(lock: str) -> list[tuple[str, str, list[str]]]:
    """Name, version and SHA-256 of each package of a lock file."""
    return [(name, version, _HASH.findall(rest)) for name, version, rest in _PACKAGE.findall(lock)]


def _packages(lock: str) -> str:
    rows = [
        [f"`{name}`", version, "<br>".join(f"`{one}`" for one in hashes)]
        for name, version, hashes in packages(lock)
    ]
    said = (
        "The weights are those of the packages, widened to float32. Gemma's come under the "
        "[Gemma terms of use](https://ai.google.dev/gemma/terms); its package has the base model "
        "and no chat template, so it gets one whose roles must alternate.\n"
    )
    return f"{said}\n{table([['package', 'version', 'SHA-256 of its files'], *rows])}"


def _summary(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    rows = [["check", *outcomes, "what is compared"]]
    found = {(title, one.check): _counted(one) for title, ones in outcomes.items() for one in ones}
    for check, meaning in _CHECKS.items():
        cells = [found.get((title, check), "not run") for title in outcomes]
        rows.append([check, *cells, meaning])
    return table(rows)


def _counted(outcome: Outcome) -> str:
    if not outcome.num:
        return "no window"
    told = f"{outcome.num_equal} of {outcome.num} equal"
    num_explained = len(outcome.divergences) - outcome.num_unexplained
    told += f", {num_explained} explained" if num_explained else ""
    return told + (f", **{outcome.num_unexplained} not**" if outcome.num_unexplained else "")


def _asked(amounts: Mapping[str, Amount]) -> str:
    """How much was asked for, which may have been less than all."""
    whole = _amount(Amount())
    asked = list(dict.fromkeys(map(_amount, amounts.values())))
    if asked in ([], [whole]):
        return f"The run was a whole one: {whole}.\n"
    said = f"**A part was asked for.** A whole run is {whole}; this one was "
    if len(asked) == 1:
        return f"{said}{asked[0]}.\n"
    places = {
        one: [name for name, other in amounts.items() if _amount(other) == one] for one in asked
    }
    return said + "; ".join(f"{one} ({', '.join(places[one])})" for one in asked) + ".\n"


def _amount(amount: Amount) -> str:
    return (
        f"{amount.num_prompts} prompts of up to {amount.longest:,} tokens, answers of up to "
        f"{amount.num_tokens} tokens, {amount.num_schemas} schemas, {amount.num_turns} turns"
    )


def _section(outcome: Outcome) -> str:
    lines = [f"### {outcome.check[0].upper()}{outcome.check[1:]}: {_counted(outcome)}\n"]
    if outcome.facts:
        lines.append("\n".join(f"- {fact}." for fact in outcome.facts) + "\n")
    if len(outcome.table) > 1:
        lines.append(table(outcome.table))
    if outcome.divergences:
        lines.append(_divergences(outcome))
    return "\n".join(lines)


def _divergences(outcome: Outcome) -> str:
    """One line each; those with the same words share one."""
    groups = Counter((one.is_explained, one.reason) for one in outcome.divergences)
    lines: list[str] = []
    for (is_explained, reason), num in groups.items():
        places = [one.where for one in outcome.divergences if one.reason == reason]
        where = places[0] if num == 1 else f"{num} answers ({'; '.join(places)})"
        mark = "" if is_explained else "**not explained**: "
        lines.append(f"- {mark}{where}: {_in_a_line(reason)}.")
    return "Divergences:\n\n" + "\n".join(lines) + "\n"


def _in_a_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown, the first row as the head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines) + "\n"
