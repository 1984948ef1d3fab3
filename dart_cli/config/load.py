"""Reading a configuration: a TOML file and `--set` overrides -> Config, or one line of error.

    load_config       a file and its overrides: keys, types and ranges are checked
    config_of_model   the defaults, with a model folder of the user's own
    default_config    the defaults with overrides alone
    refuse_overrides  the error where a run directory is named with overrides
    Source            where a configuration came from, to cite in an error

Every mistake is one line with key, value, file and cure; a misspelt key is an error that suggests
the right one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from bus.errors import ConfigError
from dart_cli.config.families import FAMILY_KEY, with_family
from dart_cli.config.learning_rate import with_rate
from dart_cli.config.schema import Config
from dart_cli.config.unknown_keys import did_you_mean, unknown, where_is
from dart_cli.config.values import read_value, shown
from envs.tools.textfiles import read_text

DEFAULTS = Path("defaults")
"""What a mistake cites in the place of a file where none was named."""

_DEPTH = 50  # of tables and lists within each other; [env.options] alone takes any depth


@dataclass(frozen=True)
class Source:
    """Where a configuration came from, so that a mistake can be cited."""

    path: Path
    overrides: tuple[str, ...] = ()

    def cite(self, key: str) -> str:
        """`(FILE)`, or `(--set KEY=VALUE over FILE)` where an override set the key."""
        for override in reversed(self.overrides):
            name = override.partition("=")[0].strip()
            if (
                key == name
                or key.startswith((f"{name}.", f"{name}["))
                or name.startswith(f"{key}.")
            ):
                return f"(--set {shown(override, quote=False)} over {self.path})"
        return f"({self.path})"


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a TOML file with `section.key=value` overrides; values are TOML, or text unquoted.

    Raises ConfigError: one line with key, value, file and cure.
    """
    source = Source(path, tuple(overrides or ()))
    return _validated(_read_toml(path), source)


def refuse_overrides(folder: Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError for overrides of a run directory: it stays as it was started."""
    if overrides:
        raise ConfigError(
            f"--set {shown(overrides[0], quote=False)} changes a key of a TOML file, and {folder} is "
            "a directory; name the TOML file of the run"
        )


def config_of_model(folder: Path, overrides: list[str] | None = None) -> Config:
    """Return the defaults with a model folder of the user's own, and overrides. Raises ConfigError."""
    return _validated({"model": {"path": str(folder)}}, Source(folder, tuple(overrides or ())))


def default_config(overrides: list[str] | None = None) -> Config:
    """Return the defaults with overrides, for a verb that needs no file. Raises ConfigError."""
    return _validated({}, Source(DEFAULTS, tuple(overrides or ())))


def _validated(tree: dict[str, Any], source: Source) -> Config:
    for override in source.overrides:
        _apply(override, tree, source.path)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        # A misspelt key explains the other mistakes, so it is reported first.
        mistakes = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        key, text = _explain(mistakes[0])
        raise ConfigError(f"{text} {source.cite(key)}") from None
    try:
        return with_rate(with_family(config))
    except ConfigError as mistake:
        raise ConfigError(f"{FAMILY_KEY} {mistake} {source.cite(FAMILY_KEY)}") from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path)
        tree = tomllib.loads(text)
        _check_depth(tree)
        return tree
    except FileNotFoundError:
        cure = "`dart init DIR` writes a starter"
        raise ConfigError(f"no such file: {path}; {cure}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; name the TOML file in it") from None
    except UnicodeDecodeError as error:
        at = f"byte {error.start}"
        raise ConfigError(f"not UTF-8 text at {at}; save it as UTF-8 ({path})") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        if twice := _set_twice(text):
            raise ConfigError(f"{twice} ({path})") from None
        cure = "text is written in quotes, a section is [name], a value is key = value"
        raise ConfigError(f"not TOML: {error}; {cure} ({path})") from None
    except RecursionError:
        raise ConfigError(
            f"nested too deeply: no value needs more than a few brackets ({path})"
        ) from None


_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*=")


def _set_twice(text: str) -> str:
    """Return the first key or section that stands twice in `text`, with both lines; empty without one.

    tomllib says neither which, nor on which line. Read by lines: a multi-line value that looks like keys
    may be taken for them, but only where the file is wrong.
    """
    section, first = "", dict[str, int]()
    for number, line in enumerate(text.split("\n"), start=1):
        if header := _HEADER.fullmatch(line):
            section = header[1].strip()
            name = f"[{section}]"
        elif key := _KEY.match(line):
            name = f"{section}.{key[1]}" if section else key[1]
        else:
            continue
        if name in first:
            return f"{name} stands twice, on lines {first[name]} and {number}; remove one"
        first[name] = number
    return ""


def _check_depth(tree: dict[str, Any]) -> None:
    """Raise RecursionError for tables and lists within each other beyond `_DEPTH`."""
    level: list[Any] = [tree]
    for _ in range(_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
    if level:
        raise RecursionError


def _apply(override: str, tree: dict[str, Any], path: Path) -> None:
    """Put one `section.key=value` into the tree of the file."""
    name, equals, text = override.partition("=")
    *parents, key = (part.strip() for part in name.split("."))
    if not equals or not key or not all(parents):
        raise ConfigError(
            f"--set {shown(override, quote=False)}: want SECTION.KEY=VALUE, "
            f"e.g. --set train.lr=1e-5 ({path})"
        )
    if not parents:
        raise ConfigError(f"--set {override}: want SECTION.KEY=VALUE{where_is(key)} ({path})")
    node = tree
    for depth, parent in enumerate(parents, start=1):
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            value = ".".join(parents[:depth])
            raise ConfigError(f"--set {override}: {value} is a value, not a section ({path})")
    node[key] = read_value(text)


_PHRASES = {
    "Input should be ": "must be ",
    "Input is not a valid path": "must be a path in quotes",
    "String should match pattern '^(auto|cpu|cuda(:\\d+)?)$'": "must be auto, cpu, cuda or cuda:N",
    "greater than or equal to": ">=",
    "less than or equal to": "<=",
    "greater than": ">",
    "less than": "<",
    "a valid boolean": "true or false",
    "a valid dictionary": "a table, e.g. { width = 448 }",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid list": 'a list in brackets, e.g. ["a", "b"] or [0, 1]',
    "a valid tuple": "a list in brackets",
    "a valid string": "text in quotes",
    "Tuple should have": "must have",
    "Field required": "has too few numbers",
}
"""Of pydantic's messages, and here."""


def _explain(error: ErrorDetails) -> tuple[str, str]:
    """(key, mistake in one line) of one of pydantic's errors."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    key = ""
    for part in error["loc"]:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else part
    if kind == "extra_forbidden":
        return key, unknown(key, value)
    if kind == "model_type":
        return key, f"{key} must be a section: write [{key}] above its keys, got {shown(value)}"
    text, hint = error["msg"], context.get("hint", "")
    for theirs, ours in _PHRASES.items():
        text = text.replace(theirs, ours)
    if kind == "literal_error":
        hint = did_you_mean(str(value), re.findall(r"'([^']*)'", context["expected"]))
    if kind == "missing":  # a tuple that is too short: the error names its absent element
        key = key.rpartition("[")[0]
    return key, f"{key} {text}, got {shown(value)}{hint}"
