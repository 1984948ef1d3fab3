"""Reads a configuration: a TOML file and `--set` overrides become a Config, or one line of error.

    load_config       reads a file and its overrides, and checks keys, types and ranges
    config_of_model   the defaults with the user's model folder, and overrides
    default_config    the defaults with overrides
    refuse_overrides  raises the error for overrides of a run directory
    Source            where a configuration came from, for error messages

Every error is one line with key, value, file and fix. The error for a misspelt key suggests the right one.
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
from dart_cli.config.unknown_keys import did_you_mean, unknown_key, where_is
from dart_cli.config.values import read_value, short_value
from envs.tools.textfiles import read_text

DEFAULTS = Path("defaults")
"""What an error cites in place of a file where none was named."""

_DEPTH = 50
"""How deeply tables and lists may be nested. Only [env.options] needs more than two levels."""


@dataclass(frozen=True)
class Source:
    """Where a configuration came from, for error messages."""

    path: Path
    overrides: tuple[str, ...] = ()

    def cite(self, key: str) -> str:
        """Return `(FILE)`, or `(--set KEY=VALUE over FILE)` where an override set the key."""
        for override in reversed(self.overrides):
            name = override.partition("=")[0].strip()
            if (
                key == name
                or key.startswith((f"{name}.", f"{name}["))
                or name.startswith(f"{key}.")
            ):
                return f"(--set {short_value(override, quote=False)} over {self.path})"
        return f"({self.path})"


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a TOML file with `section.key=value` overrides, whose values are TOML or text without quotes.

    Raises ConfigError: one line with key, value, file and fix.
    """
    source = Source(path, tuple(overrides or ()))
    return _validated(_read_toml(path), source)


def refuse_overrides(folder: Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError if there are overrides: a run directory keeps its configuration."""
    if overrides:
        raise ConfigError(
            f"--set {short_value(overrides[0], quote=False)} changes a key of a TOML file, and {folder} is "
            "a directory; name the TOML file of the run"
        )


def config_of_model(folder: Path, overrides: list[str] | None = None) -> Config:
    """Return the defaults with the user's model folder, and overrides. Raises ConfigError."""
    return _validated({"model": {"path": str(folder)}}, Source(folder, tuple(overrides or ())))


def default_config(overrides: list[str] | None = None) -> Config:
    """Return the defaults with overrides, for a command that needs no file. Raises ConfigError."""
    return _validated({}, Source(DEFAULTS, tuple(overrides or ())))


def _validated(tree: dict[str, Any], source: Source) -> Config:
    """Return the configuration of a tree, with the source's overrides. Raises ConfigError."""
    for override in source.overrides:
        _apply(override, tree, source.path)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        # A misspelt key explains the other mistakes, so it is reported first.
        mistakes = sorted(error.errors(), key=lambda entry: entry["type"] != "extra_forbidden")
        key, text = _explain(mistakes[0])
        raise ConfigError(f"{text} {source.cite(key)}") from None
    try:
        return with_rate(with_family(config))
    except ConfigError as mistake:
        raise ConfigError(f"{FAMILY_KEY} {mistake} {source.cite(FAMILY_KEY)}") from None


def _read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises ConfigError with the fix if it cannot be read."""
    try:
        text = read_text(path)
        tree = tomllib.loads(text)
        _check_depth(tree)
        return tree
    except FileNotFoundError:
        fix = "`dart init DIR` writes a starter"
        raise ConfigError(f"no such file: {path}; {fix}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; name the TOML file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"not UTF-8 text at byte {error.start}; save it as UTF-8 ({path})"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        if problem := _repetition(text):
            raise ConfigError(f"{problem} ({path})") from None
        fix = "text is written in quotes, a section is [name], a value is key = value"
        raise ConfigError(f"not TOML: {error}; {fix} ({path})") from None
    except RecursionError:
        raise ConfigError(
            f"nested too deeply: no value needs more than a few brackets ({path})"
        ) from None


_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*=")


def _repetition(text: str) -> str:
    """Return which key or section is the first to stand twice in `text`, with both lines; empty without one.

    tomllib reports neither the key nor the line. This reads line by line: a multi-line value that looks like
    keys may be taken for keys, but only in a file that is wrong anyway.
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
    """Raise RecursionError if tables and lists are nested deeper than `_DEPTH`."""
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
    """Write one `section.key=value` into the tree of the file. Raises ConfigError if it is malformed."""
    name, equals, text = override.partition("=")
    *parents, key = (part.strip() for part in name.split("."))
    if not equals or not key or not all(parents):
        raise ConfigError(
            f"--set {short_value(override, quote=False)}: want SECTION.KEY=VALUE, "
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
"""Phrases of pydantic's messages, and what replaces them."""


def _explain(error: ErrorDetails) -> tuple[str, str]:
    """Return the key and the message, in one line, of one of pydantic's errors."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    key = ""
    for part in error["loc"]:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else part
    if kind == "extra_forbidden":
        return key, unknown_key(key, value)
    if kind == "model_type":
        return (
            key,
            f"{key} must be a section: write [{key}] above its keys, got {short_value(value)}",
        )
    text, hint = error["msg"], context.get("hint", "")
    for theirs, ours in _PHRASES.items():
        text = text.replace(theirs, ours)
    if kind == "literal_error":
        hint = did_you_mean(str(value), re.findall(r"'([^']*)'", context["expected"]))
    if kind == "missing":  # a tuple that is too short: the error names its absent element
        key = key.rpartition("[")[0]
    return key, f"{key} {text}, got {short_value(value)}{hint}"
