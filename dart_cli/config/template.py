"""The configuration explained from its own field texts: a starter file and a reference.

write_starter     writes the starter file: `dart init DIR`
starter_toml      every section and key with its default, each below its text as a comment
config_reference  the same as Markdown tables, kept as docs/config.md
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from bus.errors import ConfigError
from dart_cli.config.schema import Section, section_types

CONFIG_NAME = "dart.toml"

_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_HEAD = """\
# A run of `dart`. Every key has its default; delete those that you do not change.
#
#   dart up {path}        all processes at once
#   dart data {path}      or one by one, in any order: data, train, rollout (one per GPU),
#                         env (as many as you like)
#   dart status {path}    what it does and what it waits for
#
# A key can be set for one start: --set train.lr=1e-5
"""


def write_starter(folder: Path) -> Path:
    """Write `dart.toml` into `folder` (made if need be); returns its path.

    Raises ConfigError where the file exists already or cannot be written.
    """
    path = folder / CONFIG_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(starter_toml(path))
    except FileExistsError:
        raise ConfigError(f"{path} exists and is left alone; name another folder") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another folder") from None
    return path


def starter_toml(path: Path = Path(CONFIG_NAME)) -> str:
    """A complete configuration file at its defaults, with the field texts as comments."""
    parts = [_HEAD.format(path=path)]
    for name, section in section_types().items():
        lines = [f"# {summary(section)}", f"[{name}]"]
        for key, field in section.model_fields.items():
            comment = f"{field.description} {bounds(field)}".strip()
            lines += [f"# {line}" for line in textwrap.wrap(comment, 96)]
            value = to_toml(field.default)
            lines.append(f"# {key} =" if value is None else f"{key} = {value}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def config_reference() -> str:
    """Markdown: one table per section, from the same texts."""
    lines = [
        "# Configuration",
        "",
        "One TOML file per run. `dart init DIR` writes one with every key and these texts as",
        "comments; `--set section.key=value` changes a key for one start. This page is made from",
        "the code (`python -m dart_cli.cli.reference`), and a test compares them.",
    ]
    for name, section in section_types().items():
        lines += ["", f"## `[{name}]`", "", summary(section), ""]
        lines += ["| key | default | meaning |", "| --- | --- | --- |"]
        for key, field in section.model_fields.items():
            default = to_toml(field.default)
            shown = "unset" if default is None else f"`{default}`"
            meaning = f"{_flat(field)} {bounds(field)}".strip().replace("|", "\\|")
            lines.append(f"| `{key}` | {shown} | {meaning} |")
    return "\n".join(lines) + "\n"


def summary(section: type[Section]) -> str:
    """First line of a section's docstring."""
    return (section.__doc__ or "").strip().splitlines()[0]


def bounds(field: FieldInfo) -> str:
    """The field's range or choices, `(>= 1, <= 32)` or `(a | b)`, unless its text names them."""
    if get_origin(field.annotation) is Literal:
        choices = [str(each) for each in get_args(field.annotation)]
        named = all(f"`{each}`" in (field.description or "") for each in choices)
        return "" if named else f"({' | '.join(choices)})"
    found = [f"{_SIGNS[name]} {value:g}" for name, value in _limits(field)]
    return f"({', '.join(found)})" if found else ""


def _limits(field: FieldInfo) -> Iterator[tuple[str, float]]:
    for constraint in field.metadata:
        for name in _SIGNS:
            value = getattr(constraint, name, None)
            if value is not None:
                yield name, value


def _flat(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def to_toml(value: Any) -> str | None:
    """A default as TOML writes it; None for an unset key. Knows only the types that fields have."""
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(to_toml(each) or '' for each in value)}]"
    return f"{{{', '.join(f' {key} = {to_toml(each)} ' for key, each in value.items())}}}"
