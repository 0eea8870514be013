"""The tables of `docs/configuration.md`, from the types, defaults and words of the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import NODEFAULT, inspect

from runtime.config.limits import LimitSettings, RouteLimits
from runtime.config.reference import (
    EVERY,
    GROUPS,
    LIMITED,
    LIMITS,
    MODEL,
    OWN_RULE,
    PROMPT_RULES,
    SETTINGS,
)
from runtime.config.settings import (
    ModelDefaults,
    ModelSettings,
    OwnRule,
    PromptSwitches,
    SamplingSettings,
    Settings,
)
from runtime.config.tables import Location, form_of, kinds_of, quantity_of
from runtime.config.units import SIZE, TIME, TOKENS, Quantity

_LARGE = 1e6
_QUANTITIES = {SIZE.name: "size", TIME.name: "time", TOKENS.name: "tokens"}


def tables() -> str:
    """The generated part of the page."""
    kinds, parts = kinds_of(Settings), list[str]()
    for title, names in GROUPS:
        parts += [f"## {title}\n", _table(Settings, names, SETTINGS, kinds)]
    parts += [
        *_limits(),
        "## `[models.NAME]`\n",
        _table(ModelSettings, tuple(MODEL), MODEL, kinds_of(ModelSettings)),
        f'## `[models."*"]`\n\n{EVERY} Its keys: {_listed(ModelDefaults)}.\n',
        "## `[models.NAME.sampling]`\n\nUsed when a request does not set them.\n",
        _table(SamplingSettings, _sampling(), {}, kinds_of(SamplingSettings)),
        "## `[prompt_rules]` and `[models.NAME.prompt_rules]`\n\nAll are on by default.\n",
        _table(PromptSwitches, tuple(PROMPT_RULES), PROMPT_RULES, kinds_of(PromptSwitches)),
        "## `[own_rules.NAME]`\n",
        "[Rules of your own](prompts.md#rules-of-your-own) for system prompts.\n",
        _table(OwnRule, tuple(OWN_RULE), OWN_RULE, kinds_of(OwnRule)),
    ]
    return "\n".join(parts)


def _limits() -> list[str]:
    """A table for each kind of route."""
    parts = ["## `[limits.KIND]`\n\nLimits for one request. Those for all routes apply as well.\n"]
    for kind, struct in kinds_of(LimitSettings).items():
        assert isinstance(struct, type)
        assert issubclass(struct, RouteLimits)
        names = tuple(name for name in LIMITS if name in struct.__struct_fields__)
        table = _table(struct, names, LIMITS, kinds_of(struct))
        parts.append(f"### `[limits.{kind}]`\n\n{LIMITED[kind]}\n\n{table}")
    return parts


def _listed(struct: type[msgspec.Struct]) -> str:
    return ", ".join(f"`{name}`" for name in struct.__struct_fields__)


def _sampling() -> tuple[str, ...]:
    return tuple(name for name in SamplingSettings.__struct_fields__ if name != "logit_bias")


def _table(
    struct: type[msgspec.Struct],
    names: Sequence[str],
    words: Mapping[str, str],
    kinds: Mapping[str, object],
) -> str:
    fields = {one.name: one for one in msgspec.structs.fields(struct)}
    lines = ["| key | value | default | |", "|---|---|---|---|"]
    for name in names:
        told, default = _told(words.get(name, ""))
        own = _default(fields[name].default, quantity_of(kinds[name]))
        shown = f"*{default}*" if default and not own else own
        lines.append(f"| `{name}` | {_kind(kinds[name])} | {shown} | {told} |")
    return "\n".join(lines) + "\n"


def _told(words: str) -> tuple[str, str]:
    """What a setting is, and the default that is told in words."""
    told, _, default = words.partition(" (default: ")
    return told, default.removesuffix(")")


def _default(value: object, quantity: Quantity | None) -> str:
    if value is NODEFAULT or value is None or value in ((), ""):
        return ""
    match value:
        case msgspec.Struct():
            return ""
        case bool():
            return f"`{str(value).lower()}`"
        case int() | float() if quantity is not None:
            return f"`{_in_units(value, quantity)}`"
        case int() | float():
            return f"`{value:g}`"
        case _:
            return f"`{value}`"


def _in_units(value: float, quantity: Quantity) -> str:
    """In the unit that makes the shortest text without a fraction; a number alone has none."""
    units = {name: float(one) for name, one in quantity.factors.items() if name != "w"}
    whole = [f"{value / unit:.0f}{name}" for name, unit in units.items() if value % unit == 0]
    return min(whole, key=lambda text: (len(text), text), default=f"{value:g}")


def _kind(kind: object) -> str:
    """The type in a reader's words, with the bounds that say something."""
    match form_of(kind):
        case inspect.BoolType():
            return "`true` or `false`"
        case inspect.IntType() | inspect.FloatType() as form:
            quantity = quantity_of(kind)
            number = "whole number" if isinstance(form, inspect.IntType) else "number"
            return (number if quantity is None else _QUANTITIES[quantity.name]) + _range(form)
        case inspect.LiteralType(values=values):
            return ", ".join(f"`{one}`" for one in values)
        case inspect.CustomType(cls=kind):
            return "path or address" if kind is Location else "path"
        case inspect.VarTupleType():
            return "list"
        case inspect.DictType() | inspect.StructType():
            return "table"
        case _:
            return "text"


def _range(form: inspect.IntType | inspect.FloatType) -> str:
    low = form.ge if form.ge is not None else form.gt
    high = form.le
    if form.multiple_of is not None and low is not None and high is not None:
        step = int(form.multiple_of)
        return ": " + ", ".join(f"`{one}`" for one in range(int(low), int(high) + 1, step))
    if low is None or low < -1e6:
        return ""
    if high is None or high > _LARGE:
        return f", above {low:g}" if form.gt is not None else f" from {low:g}"
    return f" from {low:g} to {high:g}" if form.gt is None else f", above {low:g}, to {high:g}"
