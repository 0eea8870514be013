"""The table of commands: their flags, and which function does them."""

from __future__ import annotations

import argparse
import difflib
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

from api.cli.arguments import add_bench_arguments, add_cache_commands, tokens_of
from runtime.config.reference import SETTINGS
from runtime.config.settings import Settings, belongs
from runtime.version import VERSION

Runner = Callable[[Settings, argparse.Namespace], int]
TABLES = ("aliases", "api_keys", "limits", "models", "own_rules", "prompt_rules")


class Command(NamedTuple):
    """`place` is `module:function`, imported only when the command runs: some take long."""

    name: str
    help: str
    place: str
    has_model: bool = False
    has_json: bool = True

    def run(self, settings: Settings, arguments: argparse.Namespace) -> int:
        """Do it; the exit code. Raises HearthError."""
        runner = cast("Runner", pkgutil.resolve_name(self.place))
        return runner(settings, arguments)


COMMANDS = (
    Command("serve", "start the server", "api.cli.serve:serve", has_json=False),
    Command("status", "is the server running, and is it healthy?", "api.cli.models:status"),
    Command("ps", "list the models that are loaded or loading", "api.cli.models:ps"),
    Command("top", "watch the server live", "api.cli.top:top"),
    Command("models", "list all models that requests can name; check one", "api.cli.models:models"),
    Command("load", "load a model now", "api.cli.models:change", has_model=True),
    Command("unload", "unload a model", "api.cli.models:change", has_model=True),
    Command("pin", "keep a model loaded", "api.cli.models:change", has_model=True),
    Command(
        "unpin", "allow a pinned model to be unloaded", "api.cli.models:change", has_model=True
    ),
    Command("restart", "unload a model and load it again", "api.cli.models:change", has_model=True),
    Command("prewarm", "read a prompt before it is needed", "api.cli.prewarm:prewarm"),
    Command("prompt", "show a prompt as the model reads it", "api.cli.explain:prompt"),
    Command("chat", "chat with a model; shows what each turn reused", "api.cli.chat:chat"),
    Command("cache", "list, check and delete cached conversations", "api.cli.cache:run"),
    Command("cold", "see which home owns the cold store; take it over", "api.cli.cold:cold"),
    Command("history", "restore expired agents and responses", "api.cli.history:history"),
    Command("config", "show or check the settings", "api.cli.config:config"),
    Command("db", "check or upgrade the databases", "api.cli.database:database"),
    Command("service", "start Hearth at login (launchd or systemd)", "api.cli.service:service"),
    Command("doctor", "look for problems with your setup", "api.cli.doctor:run"),
    Command("bench", "compare Hearth with other servers", "api.bench.command:run"),
    Command("pull", "download a model into the Hugging Face cache", "api.cli.models:pull"),
    Command("key", "make an API key, and its digest for the settings", "api.cli.local:key"),
    Command(
        "completion",
        "print the script for tab completion in your shell",
        "api.cli.local:completion",
        has_json=False,
    ),
    Command("version", "print the version", "api.cli.local:version"),
)
WITHOUT_SETTINGS = frozenset({"bench", "pull", "key", "completion", "version"})
_ASKING = frozenset(
    "status ps top models load unload pin unpin restart prewarm prompt chat".split()
)
"""They speak to a server, and need to know no more than where it is."""
TO_SERVERS = _ASKING | {"cache", "history"}
"""They look for the server of their home where that says that it listens."""

_MODELS = "list: all of them; check: load one, and say what its chat template shows"
_CONFIG = "show: print the settings in force; check: would a server start with them?"
_HISTORY = (
    "show: what expired or was damaged; restore: bring back what expired; "
    "acknowledge: you know what was damaged"
)
_COLD = "show: which home owns the cold store; take: make this home its owner"
_DB = "check: are the databases intact?; upgrade: bring them to the format of this release"
_SERVICE = (
    "install: start Hearth now and at login; uninstall: stop that; "
    "status: is it running?; show: print what install writes"
)

_A_BODY = "file with the JSON body of a request, of any API; - is stdin"
_WHERE = frozenset({"home", "host", "port"})
EXIT_CODES = """\
exit codes:
  0    success (doctor: no problem found; service status: it is running)
  1    failure (doctor, config check: a problem was found)
  2    the command line or the settings are invalid
  3    no server is running
  130  interrupted

Results go to stdout, progress and errors to stderr."""


class Parser(argparse.ArgumentParser):
    """A command line that names what is nearest to a word it does not know.

    Words are not completed: half a flag could come to mean another one with the next release.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._subparsers_by_name: dict[str, Parser] = {}

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None
    ) -> argparse.Namespace:
        """As argparse does; leaves with 2 for what it does not know."""
        words = sys.argv[1:] if args is None else list(args)
        if words and words[0].startswith("-") and words[0] not in self._option_string_actions:
            self._refuse_flag_before_command(words[0])
        parsed, unknown = self.parse_known_args(words)
        if unknown:
            command = vars(parsed).get("command")
            known = self._subparsers_by_name[command] if command else self
            flags = known.flags()
            hints = (_meant(word, flags) for word in unknown if word.startswith("-"))
            known.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(hints)}")
        return parsed

    def _refuse_flag_before_command(self, word: str) -> NoReturn:
        name = word.partition("=")[0]
        flags = self.flags()
        hint = "; flags come after the command" if name in flags else _meant(name, flags)
        self.error(f"unrecognized arguments: {word}{hint}")

    def flags(self) -> list[str]:
        """Every flag of this command and of those below it."""
        own = list(self._option_string_actions)
        return own + [flag for one in self._subparsers_by_name.values() for flag in one.flags()]

    def error(self, message: str) -> NoReturn:
        """Print where all is told, and the message, and leave with 2."""
        wrong = re.search(r"invalid choice: '(.+?)' \(", message)
        hint = nearest(wrong.group(1), list(self._subparsers_by_name)) if wrong else ""
        self.exit(2, f"{self.prog} --help tells how it is used\n{self.prog}: {message}{hint}\n")

    def add_subparsers(self, **options: Any) -> Any:
        """As argparse does, remembering them."""
        subparsers = super().add_subparsers(**options)
        self._subparsers_by_name = cast("dict[str, Parser]", subparsers.choices)
        return subparsers


def _meant(flag: str, known: Sequence[str]) -> str:
    """What could be meant by a flag that is none: another flag, or a key of the file alone."""
    name = flag.partition("=")[0].lower()
    bare = name.strip("-")
    key = bare.replace("-", "_")
    if (start := next((one for one in known if name.startswith(one)), None)) is not None:
        return f"; did you mean {start}?"
    if key in TABLES:
        return f"; {key} is a table, which only the file can give"
    if key not in SETTINGS and (place := belongs(key)) is not None:
        return f"; {key} belongs {place} of the file"
    part = next((one for one in known if len(bare) > 2 and f"-{bare}" in one), None)
    return nearest(name, known) or (f"; did you mean {part}?" if part else "")


def nearest(word: str, known: Sequence[str]) -> str:
    """A question after the known word that is nearest, if one is near; else nothing."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f"; did you mean {found[0]}?" if found else ""


def parser() -> Parser:
    """The whole command line."""
    as_written = argparse.RawDescriptionHelpFormatter
    top = Parser(
        prog="hearth",
        description="Hearth, a local LLM server. `hearth COMMAND --help` describes a command.",
        epilog=EXIT_CODES,
        formatter_class=as_written,
    )
    top.add_argument("--version", action="version", version=f"hearth {VERSION}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.".replace("?.", "?"),
            epilog=EXIT_CODES,
            formatter_class=as_written,
        )
        if command.name == "cache":
            add_cache_commands(sub, _add_settings)
            continue
        _add_own(sub, command)
        if command.has_json:
            sub.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
        if command.name not in WITHOUT_SETTINGS:
            _add_settings(sub, of_server=command.name in _ASKING)
    return top


def _add_own(sub: argparse.ArgumentParser, command: Command) -> None:
    if command.has_model:
        sub.add_argument("model", help="the model's name, or an alias")
    match command.name:
        case "chat":
            sub.add_argument("--model", help="the model (default: the default model)")
            sub.add_argument(
                "--think",
                action=argparse.BooleanOptionalAction,
                help="turn thinking on or off (default: as the settings say)",
            )
            length = "most tokens in an answer, such as 500 or 2k (default: 2048)"
            sub.add_argument("--max-tokens", type=tokens_of, default=2048, help=length)
            sub.add_argument(
                "message", nargs="*", help="a message (default: what you type, line by line)"
            )
        case "prewarm":
            _add_prewarm(sub)
        case "prompt":
            _add_prompt(sub)
        case "completion":
            sub.add_argument("shell", choices=("bash", "zsh", "tcsh"))
        case "pull":
            sub.add_argument(
                "repo",
                metavar="REPO",
                help="a Hugging Face repository, such as mlx-community/Qwen3-4B-4bit",
            )
        case "bench":
            add_bench_arguments(sub)
        case "models":
            sub.add_argument("action", nargs="?", choices=("list", "check"), help=_MODELS)
            sub.add_argument("model", nargs="?", help="for check: the model's name, or an alias")
        case "config":
            sub.add_argument("action", choices=("show", "check"), help=_CONFIG)
        case "history":
            actions = ("show", "restore", "acknowledge")
            sub.add_argument("action", nargs="?", choices=actions, default="show", help=_HISTORY)
            sub.add_argument(
                "ids", nargs="*", metavar="ID", help="for restore: the ids that show lists"
            )
        case "cold":
            sub.add_argument("action", choices=("show", "take"), help=_COLD)
        case "db":
            sub.add_argument("action", choices=("check", "upgrade"), help=_DB)
        case "service":
            sub.add_argument(
                "action", choices=("install", "uninstall", "status", "show"), help=_SERVICE
            )
        case _:
            pass


def _add_prewarm(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("file", nargs="?", type=Path, help=_A_BODY)
    sub.add_argument("--system", metavar="TEXT", help="read this system prompt instead of a file")
    sub.add_argument(
        "--session", metavar="ID", help="read the conversation with this session id instead"
    )
    sub.add_argument("--model", help="the model (default: the default model)")
    sub.add_argument("--load", action="store_true", help="load the model if it is not loaded")
    sub.add_argument("--pinned", action="store_true", help="never evict it")
    sub.add_argument("--no-wait", action="store_true", help="do not wait until it is read")


def _add_prompt(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("action", choices=("explain",))
    sub.add_argument("file", help=_A_BODY)
    sub.add_argument("other", nargs="?", help="second request: show where the two differ")
    sub.add_argument("--model", help="the model (default: what the file names)")
    sub.add_argument("--client", help="read it as from this client, such as claude-code")
    sub.add_argument("--agent", metavar="ID", help="the body is a request to this agent")
    sub.add_argument("--tenant", metavar="NAME", help="read it as with this tenant's key")


def _add_settings(sub: argparse.ArgumentParser, *, of_server: bool = False) -> None:
    """The flags of all settings. What only asks the server shows no others than where it is."""
    usage = sub.format_usage().removeprefix("usage: ").strip().replace("%", "%%")
    sub.usage = f"{' '.join(usage.split())} [--SETTING VALUE ...]"
    title = "settings (they override environment variables and the file)"
    group = sub.add_argument_group(title)
    group.add_argument(
        "--config", metavar="FILE", help="the configuration file (default: hearth.toml in home)"
    )
    for name in Settings.__struct_fields__:
        if name not in TABLES:
            flag = "--" + name.replace("_", "-")
            told = SETTINGS.get(name, "").replace("%", "%%")
            is_shown = name in _WHERE or not of_server
            shown = told if is_shown else argparse.SUPPRESS
            group.add_argument(flag, dest=name, metavar="VALUE", help=shown)
