"""The starter file of `dart init`, and the reference of all keys, from the texts of the fields.

TEMPLATES         the templates of a starter file: files in templates/, most of them links to files of
                  configs/ and docs/examples/
write_starter     writes the starter file: `dart init DIR`
short_toml        a template, with the run directory and the suite of the user
starter_toml      a file with every section and key, each below its text as a comment
config_reference  Markdown tables of all keys: docs/config.md
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
from dart_cli.config.families import NONE, VALUES
from dart_cli.config.readers import read_by
from dart_cli.config.rules.check import reader_of
from dart_cli.config.schema import Section, inner_section, section_types
from dart_cli.config.values import to_toml

CONFIG_NAME = "dart.toml"

TEMPLATES = {
    "tiny": "the tiny model on a CPU, with seven kinds of multi-step tasks; it learns in minutes",
    "own-env": "a small model that can read, on your environment my_env.py, to edit; it learns in minutes",
    "web": "a small model that can read, on a web application, its tasks in a file, to edit",
    "9b": "Qwen3.5-9B on GPUs; name the model's folder and your suite",
    "7b": "UI-TARS-1.5-7B on GPUs, as DART trains it; name the model's folder and your suite",
}
_FILES = Path(__file__).parent / "templates"
_BESIDE: dict[str, dict[str, str]] = {
    "own-env": {"docs/examples/guests_env.py": "my_env.py"},
    "web": {
        f"docs/examples/web/{name}": f"web/{name}"
        for name in ("guests.toml", "index.html", "server.py")
    },
}
"""The files that a template needs: their paths in this repository -> in the new folder. They are in a folder of
templates/ with the template's name, each with the suffix `.template`."""
_CALLED = {
    "tiny": "my-run/dart.toml",
    "own-env": "docs/examples/guests.toml",
    "web": "docs/examples/web.toml",
    "9b": "configs/qwen3.5-9b.toml",
    "7b": "configs/ui-tars-7b.toml",
}
"""The path that the comments of a template name; the path of the new file replaces it."""
_RARE = ("vllm", "serve", "tune")
"""Sections that most runs never read. They are written as comments, unless the template sets them."""
_ALL_KEYS = "# Every other key has its default. docs/config.md lists them all, `dart init DIR --full` writes them all."

_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_HEAD = """\
# A run of `dart`: {about}. This file has every key. Where a value is not the default, the line above has the
# default. Delete what you do not need.
#
#   dart up {path}        all processes at once
#   dart data {path}      or one by one, in any order: data, train, rollout (one per GPU),
#                         env (as many as you like)
#   dart status {path}    what it does and what it waits for
#
# A key can be set for one start: --set train.lr=1e-5
"""


def write_starter(folder: Path, template: str = "tiny", *, full: bool = False) -> list[Path]:
    """Write `dart.toml`, and the files that it needs, into a folder, and return their paths.

    The folder is made if need be. `template` is one of TEMPLATES. With `full` the file has every key. Raises
    ConfigError where a file exists already or cannot be written.
    """
    path, beside = folder / CONFIG_NAME, _BESIDE.get(template, {})
    values = template_values(template)
    values.setdefault("run", {})["dir"] = f"runs/{folder.resolve().name}"

    def moved(text: str) -> str:
        """Return a text with the paths of the new files in place of those in this repository."""
        paths = {_CALLED[template]: path} | {old: folder / new for old, new in beside.items()}
        for old, new in paths.items():
            text = text.replace(old, str(new))
        return text

    values["env"]["suite"] = moved(values["env"]["suite"])
    texts = {
        folder / new: moved(_source(template, new).read_text(encoding="utf-8"))
        for new in beside.values()
    }
    texts[path] = (starter_toml if full else short_toml)(path, template, values)
    for target, text in texts.items():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(f"{target} exists and is left alone; name another folder") from None
        except OSError as error:
            raise ConfigError(
                f"cannot write {target}: {error.strerror}; name another folder"
            ) from None
    return list(texts)


def _source(template: str, name: str) -> Path:
    """Return the file of a template that becomes `name` in the new folder."""
    return _FILES / template / f"{Path(name).name}.template"


def short_toml(path: Path, template: str, values: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of a template with the run directory and the suite of `values`."""
    text = (_FILES / f"{template}.toml").read_text(encoding="utf-8")
    text = text.replace(_CALLED[template], str(path))
    for section, key in (("run", "dir"), ("env", "suite")):
        line = f"{key} = {to_toml(values[section][key])}".replace("\\", r"\\")
        text = re.sub(rf'^{key} = "[^"]*"', line, text, count=1, flags=re.MULTILINE)
    head, section, rest = text.partition("\n[")
    return f"{head.rstrip()}\n#\n{_ALL_KEYS}\n{section}{rest}"


def template_values(template: str) -> dict[str, dict[str, Any]]:
    """Return what a template sets, by section and key. Everything else has its default."""
    return tomllib.loads((_FILES / f"{template}.toml").read_text(encoding="utf-8"))


def starter_toml(path: Path, template: str, values: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a file with every key, at its value in `values` or its default, below its text as a comment."""
    parts = [_HEAD.format(path=path, about=TEMPLATES[template])]
    for name, section in section_types().items():
        outer, _, inner = name.partition(".")
        own_values = values.get(outer, {})
        if not inner:
            lines = [f"[{name}]", *_starter_lines(section, own_values)]
            is_rare = name in _RARE and not own_values
            lines = [f"# {line}" for line in lines] if is_rare else lines
            lines.insert(0, f"# {summary(section)}")
        elif inner in own_values:
            lines = [f"# {summary(section)}", f"[{name}]"]
            lines += _starter_lines(section, own_values[inner])
        else:
            lines = [
                f"# {summary(section)} These keys are unset; to set them, remove the first # of each line:"
            ]
            lines += [f"# {line}" for line in (f"[{name}]", *_starter_lines(section, {}))]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _starter_lines(section: type[Section], own_values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a section: each key below its text. A key that the family sets is a comment."""
    by_family = VALUES if own_values.get("family", NONE) != NONE else ()
    for key, field in section.model_fields.items():
        if inner_section(field.annotation):
            continue  # it comes after its section
        comment = f"{field.description} {bounds(field)}".strip()
        yield from (f"# {line}" for line in textwrap.wrap(comment, 96))
        default = to_toml(field.default)
        value = to_toml(own_values[key]) if key in own_values else default
        if value != default:
            yield f"# Default: {'unset' if default is None else default}"
        if key in by_family and key not in own_values:
            yield "# The family sets it; without a family:"
            yield f"# {key} = {value}"
            continue
        yield f"# {key} =" if value is None else f"{key} = {value}"


def config_reference() -> str:
    """Return a page of the documentation, with a table of keys for each section."""
    lines = [
        "# Configuration",
        "",
        "A run has one TOML file. `dart init DIR` writes a short one with the keys that matter first; with",
        "`--full` it writes every key, with these texts as comments. `--set section.key=value` changes a key",
        "for one start of a process or command that reads it. A process that does not read a key refuses a",
        "value other than the run's. This page is made from the code (`python -m dart_cli.cli.reference`), and",
        "a test compares them.",
    ]
    for name, section in section_types().items():
        lines += ["", f"## `[{name}]`", "", f"{summary(section)} {read_by(name)}", ""]
        lines += ["| key | default | meaning |", "| --- | --- | --- |"]
        for key, field in section.model_fields.items():
            default = to_toml(field.default)
            default_cell = "unset" if default is None else f"`{default}`"
            meaning = f"{_flat(field)} {bounds(field)}".strip().replace("|", "\\|")
            if reader := reader_of(f"{name}.{key}"):
                meaning += f" Only with {reader}."
            if inner_section(field.annotation):
                meaning += f" Its keys are those of `[{name}.{key}]`, below."
            lines.append(f"| `{key}` | {default_cell} | {meaning} |")
    return "\n".join(lines) + "\n"


def summary(section: type[Section]) -> str:
    """Return the first line of a section's docstring."""
    return (section.__doc__ or "").strip().splitlines()[0]


def bounds(field: FieldInfo) -> str:
    """Return the field's range or choices, `(>= 1, <= 32)` or `(a | b)`; empty if its text has them."""
    if get_origin(field.annotation) is Literal:
        choices = [str(choice) for choice in get_args(field.annotation)]
        in_text = all(f"`{choice}`" in (field.description or "") for choice in choices)
        return "" if in_text else f"({' | '.join(choices)})"
    limits = [f"{_SIGNS[name]} {value:.10g}" for name, value in _limits(field)]
    return f"({', '.join(limits)})" if limits else ""


def _limits(field: FieldInfo) -> Iterator[tuple[str, float]]:
    """Yield (sign, bound) for each bound of a field."""
    for constraint in field.metadata:
        for name in _SIGNS:
            value = getattr(constraint, name, None)
            if value is not None:
                yield name, value


def _flat(field: FieldInfo) -> str:
    """Return the text of a field without line breaks."""
    return " ".join((field.description or "").split())
