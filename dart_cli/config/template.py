"""The configuration explained from its own field texts: a starter file and a reference.

TEMPLATES         what a starter can begin with: files in templates/, most of them links to files of
                  configs/ and docs/examples/
write_starter     writes the starter file: `dart init DIR`
short_toml        the template as it is, for a folder of the user's
starter_toml      every section and key, each below its text as a comment
config_reference  the same as Markdown tables, kept as docs/config.md
"""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from bus.errors import ConfigError
from dart_cli.config.readers import read_by
from dart_cli.config.rules.check import reader_of
from dart_cli.config.schema import Section, inner_section, section_types
from dart_cli.config.values import to_toml

CONFIG_NAME = "dart.toml"

TEMPLATES = {
    "tiny": "the tiny model on a CPU, seven kinds of multi-step task; learns in minutes",
    "own-env": "a small model that reads, on an environment of your own, my_env.py, to change; learns in minutes",
    "7b": "UI-TARS-1.5-7B on GPUs; name the model's folder and your suite",
}
ENV_NAME = "my_env.py"
_FILES = Path(__file__).parent / "templates"
_CALLED = {
    "tiny": "my-run/dart.toml",
    "own-env": "docs/examples/guests.toml",
    "7b": "configs/ui-tars-7b.toml",
}
"""What a template's comments call it."""
_RARE = ("vllm", "serve", "tune")
"""Sections that most runs never read: comments, unless the template sets them."""
_ALL_KEYS = "# Every other key has its default: docs/config.md tells them, `dart init DIR --full` writes them all."

_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_HEAD = """\
# A run of `dart`: {about}.
# Every key is here; where the value is not the default, the line above has it. Delete what you do not need.
#
#   dart up {path}        all processes at once
#   dart data {path}      or one by one, in any order: data, train, rollout (one per GPU),
#                         env (as many as you like)
#   dart status {path}    what it does and what it waits for
#
# A key can be set for one start: --set train.lr=1e-5
"""


def write_starter(folder: Path, template: str = "tiny", *, full: bool = False) -> list[Path]:
    """Write `dart.toml` into `folder` (made if need be), and what it needs; returns the paths.

    `template` is one of TEMPLATES; with `full` every key is in the file. Raises ConfigError where a file exists already or cannot be written.
    """
    path, env_path = folder / CONFIG_NAME, folder / ENV_NAME
    values = template_values(template)
    values.setdefault("run", {})["dir"] = f"runs/{folder.resolve().name}"
    texts = {}
    if template == "own-env":
        attribute = values["env"]["suite"].rpartition(":")[2]
        values["env"]["suite"] = f"{env_path}:{attribute}"
        source = (_FILES / "own-env.py.template").read_text(encoding="utf-8")
        texts[env_path] = source.replace("docs/examples/guests.toml", str(path))
    texts[path] = (starter_toml if full else short_toml)(path, template, values)
    for each, text in texts.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with each.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(f"{each} exists and is left alone; name another folder") from None
        except OSError as error:
            cure = "name another folder"
            raise ConfigError(f"cannot write {each}: {error.strerror}; {cure}") from None
    return list(texts)


def short_toml(path: Path, template: str, values: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the template's own text, with the run directory and the suite of `values`."""
    text = (_FILES / f"{template}.toml").read_text(encoding="utf-8")
    text = text.replace(_CALLED[template], str(path))
    for section, key in (("run", "dir"), ("env", "suite")):
        line = f"{key} = {to_toml(values[section][key])}".replace("\\", r"\\")
        text = re.sub(rf'^{key} = "[^"]*"', line, text, count=1, flags=re.MULTILINE)
    head, section, rest = text.partition("\n[")
    return f"{head.rstrip()}\n#\n{_ALL_KEYS}\n{section}{rest}"


def template_values(template: str) -> dict[str, dict[str, Any]]:
    """Return what a template sets, by section and key; the rest stays at its defaults."""
    return tomllib.loads((_FILES / f"{template}.toml").read_text(encoding="utf-8"))


def starter_toml(path: Path, template: str, values: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a complete configuration file: `values`, else defaults, with the field texts as comments."""
    parts = [_HEAD.format(path=path, about=TEMPLATES[template])]
    for name, section in section_types().items():
        outer, _, inner = name.partition(".")
        chosen = values.get(outer, {})
        if not inner:
            lines = [f"[{name}]", *_starter_lines(section, chosen)]
            is_rare = name in _RARE and not chosen
            lines = [f"# {line}" for line in lines] if is_rare else lines
            lines.insert(0, f"# {summary(section)}")
        elif inner in chosen:
            lines = [f"# {summary(section)}", f"[{name}]", *_starter_lines(section, chosen[inner])]
        else:
            lines = [
                f"# {summary(section)} Unset; to have them, remove the first # of these lines:"
            ]
            lines += [f"# {line}" for line in (f"[{name}]", *_starter_lines(section, {}))]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _starter_lines(section: type[Section], chosen: Mapping[str, Any]) -> Iterator[str]:
    """Each key of a section below its text."""
    for key, field in section.model_fields.items():
        if inner_section(field.annotation):
            continue  # it comes after its section
        comment = f"{field.description} {bounds(field)}".strip()
        yield from (f"# {line}" for line in textwrap.wrap(comment, 96))
        default = to_toml(field.default)
        value = to_toml(chosen[key]) if key in chosen else default
        if value != default:
            yield f"# Default: {'unset' if default is None else default}"
        yield f"# {key} =" if value is None else f"{key} = {value}"


def config_reference() -> str:
    """Markdown: one table per section, from the same texts."""
    lines = [
        "# Configuration",
        "",
        "One TOML file per run. `dart init DIR` writes one with what one must know, `--full` one with",
        "every key and these texts as comments; `--set section.key=value` changes a key for one",
        "start, of the process or verb that reads it: one that does not read a key refuses another value than",
        "the run has. This page is made from the code (`python -m dart_cli.cli.reference`), and a test",
        "compares them.",
    ]
    for name, section in section_types().items():
        lines += ["", f"## `[{name}]`", "", f"{summary(section)} {read_by(name)}", ""]
        lines += ["| key | default | meaning |", "| --- | --- | --- |"]
        for key, field in section.model_fields.items():
            default = to_toml(field.default)
            shown = "unset" if default is None else f"`{default}`"
            meaning = f"{_flat(field)} {bounds(field)}".strip().replace("|", "\\|")
            if reader := reader_of(f"{name}.{key}"):
                meaning += f" Only with {reader}."
            if inner_section(field.annotation):
                meaning += f" Its keys: `[{name}.{key}]`, below."
            lines.append(f"| `{key}` | {shown} | {meaning} |")
    return "\n".join(lines) + "\n"


def summary(section: type[Section]) -> str:
    """First line of a section's docstring."""
    return (section.__doc__ or "").strip().splitlines()[0]


def bounds(field: FieldInfo) -> str:
    """Return the field's range or choices, `(>= 1, <= 32)` or `(a | b)`, unless its text names them."""
    if get_origin(field.annotation) is Literal:
        choices = [str(each) for each in get_args(field.annotation)]
        named = all(f"`{each}`" in (field.description or "") for each in choices)
        return "" if named else f"({' | '.join(choices)})"
    found = [f"{_SIGNS[name]} {value:.10g}" for name, value in _limits(field)]
    return f"({', '.join(found)})" if found else ""


def _limits(field: FieldInfo) -> Iterator[tuple[str, float]]:
    for constraint in field.metadata:
        for name in _SIGNS:
            value = getattr(constraint, name, None)
            if value is not None:
                yield name, value


def _flat(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())
