"""The catalog: every model that can be named, and the only way from a name to a directory."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog
from huggingface_hub import constants

from runtime.config.settings import Settings, why_no_directory
from runtime.embedded import HEARTH_TINY
from runtime.errors import ModelRefused, UnknownModel
from runtime.models.arrivals import Arrivals
from runtime.models.files import cached_snapshots, model_directories, read_spec
from runtime.models.folder import BrokenModel, NeedsOwnCode
from runtime.types import ModelSpec, SharedWeights

EMBEDDED_MODEL = HEARTH_TINY.name
MODELS_DIR = "models_dir"
"""Stands for the settings of directories among what cannot be used."""

_MAX_NAME_CHARACTERS = 256
_SHOWN_CHARACTERS = 80
_REFRESH_INTERVAL_S = 1.0
_PLACE = re.compile(r"(?<![\w.-])/(?:[^\s/:,;()'\"]+/)*(?=[^\s/])")
"""What of an absolute path comes before its last part."""
_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)

_log = structlog.stdlib.get_logger("hearth.catalog")


class Refused(NamedTuple):
    """Why a model cannot be used: the code that requests for it get, and words for people.

    `public_reason` names no directory of this machine.
    """

    code: str
    reason: str
    public_reason: str


class Catalog:
    """Names to models. A name is looked up in a list that was made beforehand, nothing else.

    First come the models of `[models.*]`, then the directories of `models_dir` and `models_dirs`,
    where NAME also stands for PUBLISHER/NAME if there is one such, then whole
    snapshots in the Hugging Face cache, then the embedded model; the first of a name wins. It
    belongs to the event loop. What `[models.*]` name by their repositories and is not there comes
    by `arrivals`, where `allow_download` is on; without them nothing is downloaded. `hub_cache`
    and `clock` (seconds) are for tests.
    """

    def __init__(
        self,
        settings: Settings,
        arrivals: Arrivals | None = None,
        *,
        hub_cache: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self.arrivals = arrivals
        self._models_dirs = (settings.models_dir or settings.home / "models", *settings.models_dirs)
        self._hub_cache = hub_cache or Path(constants.HF_HUB_CACHE)
        named = (one.path for one in settings.models.values() if one.path is not None)
        places = {
            *self._models_dirs,
            self._hub_cache,
            settings.home,
            *(one.parent for one in named),
        }
        self._places = sorted(map(str, places), key=len, reverse=True)
        self._clock = clock
        self._specs: dict[str, ModelSpec] = {}
        self._aliases: dict[str, str] = {}
        self._warned: set[tuple[str, str]] = set()
        self._left_out: dict[str, str] = {}
        self._refused: set[str] = set()
        self._to_be_fetched: dict[str, str] = {}
        self._refreshed_s = 0.0
        self.refresh()

    def models(self) -> tuple[ModelSpec, ...]:
        """Every model once, configured ones first."""
        return tuple(self._specs.values())

    @property
    def default_name(self) -> str:
        """`default_model`, else the first of `[models.*]` that is usable or may be downloaded,
        else the embedded model.
        """
        if self._settings.default_model is not None:
            return self._settings.default_model
        named = self._settings.models
        can_be = (name for name in named if name in self._specs or self.may_come(name))
        return next(can_be, EMBEDDED_MODEL)

    def default(self) -> ModelSpec:
        """What a request without a model means. Raises as `resolve`."""
        return self.resolve(self.default_name)

    def resolve(self, name: str) -> ModelSpec:
        """The model of this exact name or alias; on a miss the disk is looked at again.

        Raises:
            UnknownModel: there is none; it knows the nearest names.
            ModelRefused: there is one that would have to run code of its own.
            ModelDownloading, ModelNotDownloaded: it is not on this machine yet.
        """
        spec = self._find(name)
        is_name = len(name) <= _MAX_NAME_CHARACTERS and name.isprintable()
        if spec is None and is_name and self._clock() - self._refreshed_s >= _REFRESH_INTERVAL_S:
            self.refresh()
            spec = self._find(name)
        if spec is None and (told := self._why_not_here(name)) is not None:
            raise told
        if spec is None:
            shown = name if len(name) <= _SHOWN_CHARACTERS else name[: _SHOWN_CHARACTERS - 1] + "…"
            nearest = self._nearest(name[:_MAX_NAME_CHARACTERS])
            kind = ModelRefused if name in self._refused else UnknownModel
            reason = self._left_out.get(name)
            raise kind(shown, nearest, reason, reason and _without(self._places, reason))
        return spec

    def want(self, name: str) -> ModelSpec:
        """The same for somebody who would use it: where that may be, its download begins.

        Raises as `resolve`.
        """
        try:
            return self.resolve(name)
        except UnknownModel:
            repo = self._to_be_fetched.get(name)
            if repo is None or self.arrivals is None:
                raise
            raise self.arrivals.want(name, repo) from None

    def may_come(self, name: str) -> bool:
        """Whether it is a model that is not here yet and may be downloaded."""
        return self._settings.allow_download and name in self._to_be_fetched

    def look_up(self, name: str) -> tuple[str | UnknownModel, tuple[str, ...]]:
        """The id of what `name` means, or why it means nothing; and every model's id."""
        try:
            found = self.resolve(name).id
        except UnknownModel as error:
            found = error
        return found, tuple(self._specs)

    @property
    def left_out(self) -> Mapping[str, str]:
        """What cannot be used, and why: models, aliases, `models_dir`."""
        return self._left_out

    @property
    def refused(self) -> Mapping[str, Refused]:
        """The models and aliases among them, by name."""
        return {
            name: self._refusal(name, why)
            for name, why in sorted(self._left_out.items())
            if name != MODELS_DIR
        }

    def _refusal(self, name: str, why: str) -> Refused:
        if (told := self._why_not_here(name)) is not None:
            return Refused(told.code, told.reason or why, told.public_message)
        code = ModelRefused.code if name in self._refused else UnknownModel.code
        return Refused(code, why, _without(self._places, why))

    def _why_not_here(self, name: str) -> UnknownModel | None:
        repo = self._to_be_fetched.get(name)
        if repo is None or self.arrivals is None:
            return None
        return self.arrivals.why_not_here(name, repo)

    @property
    def unusable(self) -> Mapping[str, str]:
        """Those of `[models.*]` that cannot be used, and why."""
        named = self._settings.models
        return {name: one.reason for name, one in self.refused.items() if name in named}

    @property
    def misnamed(self) -> tuple[str, ...]:
        """What the settings name and cannot be used, but for what a download may bring."""
        own = self._settings
        targets = {alias: name for name, one in own.models.items() for alias in one.aliases}
        targets |= own.aliases
        named = {*own.models, *targets, MODELS_DIR}
        left_out = (name for name in self._left_out if name in named)
        return tuple(name for name in left_out if not self.may_come(targets.get(name, name)))

    def refresh(self) -> None:
        """Look at the disk again. What cannot be used is left out, with one warning."""
        self._refreshed_s = self._clock()
        self._left_out = {}
        self._refused = set()
        self._to_be_fetched = {}
        snapshots = cached_snapshots(self._hub_cache)
        if self.arrivals is not None:
            coming = self.arrivals.on_their_way()
            snapshots = {repo: path for repo, path in snapshots.items() if repo not in coming}
        directories = self._directories()
        found = dict(directories)
        for name, path in (*snapshots.items(), (EMBEDDED_MODEL, HEARTH_TINY)):
            found.setdefault(name, path)
        places = dict(self._configured(found, snapshots))
        own = self._settings
        for name in filter(None, (own.default_model, *(own.preload or ()))):
            if _REPO.fullmatch(name) and name not in found:
                self._to_be_fetched.setdefault(name, name)
        owners: dict[Path, str] = {}
        for name, path in places.items():
            owners.setdefault(path.resolve(), name)
        second_names = {
            short: owners.get(path.resolve(), name)
            for short, (name, path) in _short_names(directories).items()
            if short not in found and short not in places
        }
        for name, path in found.items():
            owner = owners.get(path.resolve())
            if owner is None:
                places.setdefault(name, path)
            elif owner != name:
                second_names[name] = owner
        specs = dict(self._readable(places))
        self._aliases = self._usable_aliases(second_names, specs)
        for name in self._hidden(specs):
            del specs[name]
        for name, why in _give_drafts(specs, self._settings, self._aliases):
            self._warn(name, why)
        shared = self._shared(specs)
        self._specs = {
            name: msgspec.structs.replace(
                spec, aliases=self._aliases_of(name), shared=shared.get(name)
            )
            for name, spec in specs.items()
        }

    def _shared(self, specs: dict[str, ModelSpec]) -> dict[str, SharedWeights]:
        """What names have in common that are loaded from the same files in the same way."""
        alike: dict[object, list[ModelSpec]] = {}
        for name, spec in specs.items():
            own = self._settings.model(name)
            form = self._settings.kv_form_of(name)
            draft = spec.draft.path if spec.draft is not None else None
            where = Path(spec.path).resolve(), spec.chat_template
            key = (*where, spec.is_vision, form, own.together, draft)
            alike.setdefault(key, []).append(spec)
        return {
            spec.id: SharedWeights(
                engine=same[0].id,
                names=tuple(one.id for one in same),
                context=max(one.context for one in same),
            )
            for same in alike.values()
            if len(same) > 1
            for spec in same
        }

    def _directories(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for folder in self._models_dirs:
            try:
                for name, path in model_directories(folder):
                    found.setdefault(name, path)
            except OSError as error:
                if folder in (self._settings.models_dir, *self._settings.models_dirs):
                    self._warn(MODELS_DIR, f"{folder} cannot be listed: {error.strerror}")
        return found

    def _configured(
        self, found: dict[str, Path], snapshots: dict[str, Path]
    ) -> Iterator[tuple[str, Path]]:
        """Each name of `[models.*]` with its directory."""
        for name, settings in self._settings.named_models.items():
            if settings.repo is not None:
                path = snapshots.get(settings.repo)
                if path is None:
                    self._to_be_fetched |= dict.fromkeys((name, settings.repo), settings.repo)
                reason = self._why_to_be_fetched(settings.repo)
            else:
                path = settings.path or found.get(name)
                reason = (
                    f"it is neither in {self._models_dirs[0]} nor in {self._hub_cache}: give a path"
                )
                if path is not None and (why := why_no_directory(path)) is not None:
                    path, reason = None, f"its path {path} {why}: correct path, or put it there"
            if path is None:
                self._warn(name, reason)
            else:
                yield name, path

    def _why_to_be_fetched(self, repo: str) -> str:
        if self._settings.allow_download:
            return f"{repo} is downloaded when a request names it, or now by: hearth pull {repo}"
        return f"{repo} is not in {self._hub_cache}: hearth pull {repo}"

    def _readable(self, places: dict[str, Path]) -> Iterator[tuple[str, ModelSpec]]:
        for name, path in places.items():
            try:
                yield name, self._spec(name, path)
            except BrokenModel as error:
                if isinstance(error, NeedsOwnCode):
                    self._refused.add(name)
                self._warn(name, str(error))

    def _spec(self, name: str, path: Path) -> ModelSpec:
        own, most = self._settings.model(name), self._settings.most_context
        form = self._settings.kv_form_of(name)
        own = msgspec.structs.replace(own, kv_bits=form.kv_bits, quantized_kv_start=form.kv_start)
        return read_spec(name, path, own, most_context=most)

    def _usable_aliases(
        self, second_names: dict[str, str], specs: dict[str, ModelSpec]
    ) -> dict[str, str]:
        """Alias -> id, for all aliases whose model is there."""
        aliases = dict(second_names)
        for name, settings in self._settings.named_models.items():
            aliases |= dict.fromkeys(settings.aliases, name)
        for alias, target in self._settings.aliases.items():
            aliases[alias] = aliases.get(target, target)
        for alias, target in aliases.items():
            if target in self._refused:
                self._refused.add(alias)
            if target in self._to_be_fetched:
                self._to_be_fetched[alias] = self._to_be_fetched[target]
            if target not in specs:
                reason = self._left_out.get(target)
                why = "which is not there" if reason is None else f"which cannot be used: {reason}"
                self._warn(alias, f"it is an alias of {target}, {why}")
        return {alias: target for alias, target in aliases.items() if target in specs}

    def _hidden(self, specs: dict[str, ModelSpec]) -> list[str]:
        """The models that were found and cannot be named, as their name is another's alias."""
        hidden = [name for name in specs if self._aliases.get(name, name) != name != EMBEDDED_MODEL]
        for name in hidden:
            other = self._aliases[name]
            self._warn(name, f"its name is an alias of {other}: give {other} another alias")
        return hidden

    def _aliases_of(self, name: str) -> tuple[str, ...]:
        return tuple(sorted(a for a, target in self._aliases.items() if target == name != a))

    def _find(self, name: str) -> ModelSpec | None:
        return self._specs.get(self._aliases.get(name, name))

    def _nearest(self, name: str) -> tuple[str, ...]:
        by_lower = {known.lower(): known for known in (*self._aliases, *self._specs)}
        close = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.0)
        return tuple(by_lower[lower] for lower in close)

    def _warn(self, name: str, reason: str) -> None:
        self._left_out[name] = reason
        if (name, reason) not in self._warned:
            self._warned.add((name, reason))
            _log.warning("model left out", model=name, reason=reason)


def _give_drafts(
    specs: dict[str, ModelSpec], settings: Settings, aliases: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Have each model know its draft model, and leave out whose cannot be had: their names, why."""
    alone = dict(specs)
    for name, spec in alone.items():
        wanted = settings.model(name).draft
        if wanted is None:
            continue
        draft = alone.get(aliases.get(wanted, wanted))
        if draft is not None and draft.path != spec.path:
            specs[name] = msgspec.structs.replace(spec, draft=draft)
        else:
            what = "is no model that can be used" if draft is None else "is the model itself"
            del specs[name]
            yield name, f"its draft {wanted} {what}: correct draft, or leave it out"


def _without(places: Iterable[str], reason: str) -> str:
    """The reason with the last part of each path, and nothing of where that lies."""
    for place in places:
        reason = reason.replace(f"{place}/", "").replace(place, Path(place).name)
    return _PLACE.sub("", reason)


def _short_names(directories: Mapping[str, Path]) -> dict[str, tuple[str, Path]]:
    """NAME -> the one PUBLISHER/NAME that it can stand for."""
    by_short: dict[str, list[tuple[str, Path]]] = {}
    for name, path in directories.items():
        publisher, _, short = name.rpartition("/")
        if publisher:
            by_short.setdefault(short, []).append((name, path))
    return {short: named[0] for short, named in by_short.items() if len(named) == 1}
