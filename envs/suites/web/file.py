"""FILE.toml of suite `web`: read, checked, and with the files that it names.

WebFile              the file: the application, its tasks, and the contents of the files that it names
read_file            reads it; every mistake is one TaskError with its place and the fix
check_placeholders   raises ValueError for a name in braces that nothing draws
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from bus.error_texts import did_you_mean
from bus.errors import TaskError
from envs.contract.blobs import content_hash
from envs.contract.options import first_problem
from envs.suites.web.schema import (
    GIVEN,
    METHODS,
    ON_ELEMENTS,
    Application,
    Check,
    Move,
    SetupStep,
    Source,
    StateSource,
    WebTask,
)
from envs.tools.draws import draw
from envs.tools.textfiles import read_text

_PLACEHOLDER = re.compile(r"\{([a-z_][a-z0-9_]*)(?:\[\d+\])?\}")
_FILE = re.compile(r"@[^@\s]\S*\.\w+")
"""A text of a body that stands for the content of a file; "@@" begins a text that begins with "@"."""


@dataclass(frozen=True)
class WebFile:
    """The file: the application, its tasks, and the contents of the files that it names."""

    application: Application
    path: Path
    contents: Mapping[str, str]  # of the entries "@NAME"

    @property
    def folder(self) -> Path:
        """The file's folder, in which paths begin and the server runs."""
        return self.path.parent

    def digest(self, task: WebTask) -> str:
        """Return a digest of a task, of the application's part of the file, and of the files they name."""
        application = self.application.model_dump(mode="json", exclude={"tasks"}, by_alias=True)
        parts = (
            application,
            sorted(self.contents.items()),
            task.model_dump(mode="json", by_alias=True),
        )
        return content_hash(json.dumps(parts, sort_keys=True).encode())

    def with_contents(self, value: Any) -> Any:
        """Return a body in which each "@NAME" is the JSON value of its file, or its text."""
        return _mapped(value, self._loaded)

    def _loaded(self, text: str) -> Any:
        if text not in self.contents:
            return text[1:] if text.startswith("@@") else text
        content = self.contents[text]
        return json.loads(content) if text.endswith(".json") else content


def read_file(path: Path) -> WebFile:
    """Return the application and the tasks of a file.

    Raises TaskError, which names the file, the task, the key and the fix.
    """
    try:
        raw = tomllib.loads(read_text(path))
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: no TOML: {error}") from None
    try:
        application = Application.model_validate(raw)
    except ValidationError as error:
        raise TaskError(f"{path}: {_problem(error, raw)}") from None
    except TaskError as error:  # of `size`
        raise TaskError(f"{path}: {error}") from None
    try:
        _check_names(application)
        _check_files(application, path.parent)
        contents = {text: _content(path.parent / text[1:], text) for text in _referred(application)}
    except ValueError as error:
        raise TaskError(f"{path}: {error}") from None
    return WebFile(application, path.absolute(), contents)


# --- errors ----------------------------------------------------------------------------------------


def _problem(error: ValidationError, raw: Mapping[str, Any]) -> str:
    """Return one mistake in one line: the task, the key, the fix. A key that does not exist comes first."""
    errors = error.errors(include_url=False)
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    loc = [part for part in first["loc"] if not (isinstance(part, str) and _TAG.match(part))]
    # A mistake in a table as a whole has the place of the table, any other one the place of its key.
    key = loc.pop() if loc and isinstance(loc[-1], str) else ""
    place = _place(loc, raw)
    if first["type"] == "extra_forbidden":
        names = _names_at(loc)
        near = difflib.get_close_matches(str(key), names, 1, 0.5)
        fix = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
        return f"{place}: {key!r} is no key; {fix}"
    if first["type"] == "missing":
        return f"{place}: {key} is missing"
    message = first_problem(error, depth=0).removeprefix("it: ").removeprefix("it ")
    return f"{place}: {key}: {message}" if key else f"{place}: {message}"


_TAG = re.compile(r"(constrained|function|nullable)-|(list|dict|tuple)\[|(str|int|float|bool)$")
"""What pydantic puts into the place of a mistake for each type of a union."""


def _place(loc: Sequence[int | str], raw: Mapping[str, Any]) -> str:
    """Return the place of a table, e.g. `task 'move-card', check[1]`."""
    parts, rest = [], list(loc)
    if len(rest) >= 2 and rest[0] == "tasks" and isinstance(rest[1], int):
        tasks = raw.get("tasks")
        task = tasks[rest[1]] if isinstance(tasks, list) and rest[1] < len(tasks) else {}
        name = task.get("id") if isinstance(task, dict) else None
        parts.append(f"task {name!r}" if isinstance(name, str) else f"tasks[{rest[1]}]")
        rest = rest[2:]
    within = ""
    for part in rest:
        within += f"[{part}]" if isinstance(part, int) else f"{'.' if within else ''}{part}"
    if within:
        parts.append(within)
    return ", ".join(parts) or "the file"


def _names_at(loc: Sequence[int | str]) -> list[str]:
    """Return the keys of the table at a place of the file."""
    kinds: dict[str, type[BaseModel]] = {
        "tasks": WebTask, "setup": SetupStep, "check": Check, "all": Check, "any": Check,
        "solution": Move, "state": StateSource,
    }  # fmt: skip
    table = next(
        (kinds[part] for part in reversed(loc) if isinstance(part, str) and part in kinds),
        Application,
    )
    return [field.alias or name for name, field in table.model_fields.items()]


def _check_names(file: Application) -> None:
    """Raise ValueError for two tasks of one id, a name in braces that nothing draws, and a missing state."""
    ids: set[str] = set()
    for task in file.tasks:
        if task.id in ids:
            raise ValueError(f"two tasks have the id {task.id!r}; give each its own")
        ids.add(task.id)
        if isinstance(task.draw, dict):
            try:
                draw(task.draw, task.id, 0)
            except TaskError as error:
                raise ValueError(f"task {str(error).replace(task.id, repr(task.id), 1)}") from None
            check_placeholders(task, task.draw)
        reads = [check for check in _conditions(task.check) if check.kind in ("", "read")]
        needs = [check for check in reads if check.read in (None, "state")]
        if file.state is None and (needs or task.unchanged):
            what = "a check without a source" if needs else "unchanged"
            raise ValueError(
                f'task {task.id!r}: {what} reads the application\'s state; add state = {{ get = "/address" }} '
                "at the top of the file"
            )
    for name in ("url", *(f"start[{number}]" for number in range(len(file.start)))):
        text = file.url if name == "url" else file.start[int(name[6:-1])]
        allowed = ("session", "port", "seed") if name == "url" else ("port", "folder")
        _check_placeholders(name, text, set(allowed))


def _check_files(file: Application, folder: Path) -> None:
    """Raise ValueError for a file of functions, or one to upload, that does not exist."""
    for task in file.tasks:
        functions = [source.python for source in (*task.setup, *_conditions(task.check))]
        functions += [task.draw if isinstance(task.draw, str) else None]
        functions += [file.state.python if file.state else None]
        paths = [name.rpartition(":")[0] for name in functions if name]
        for name in [path for path in paths if path.endswith(".py")] + task.uploads:
            if not _PLACEHOLDER.search(name) and not (folder / name).is_file():
                near = did_you_mean(name, [path.name for path in folder.iterdir()])
                raise ValueError(f"task {task.id!r}: there is no file {folder / name}{near}")


def check_placeholders(task: WebTask, drawn_names: Iterable[str]) -> None:
    """Raise ValueError for a name in braces, in a text of a task, that nothing draws."""
    names = {*drawn_names, *GIVEN}
    for where, text in _filled_texts(task):
        _check_placeholders(f"task {task.id!r}, {where}", text, names)


def _check_placeholders(where: str, text: str, names: set[str]) -> None:
    for name in _PLACEHOLDER.findall(text):
        if name not in names:
            raise ValueError(
                f"{where}: {{{name}}} is nothing that is drawn{did_you_mean(name, names)}; "
                f"there is {', '.join(sorted(names))}"
            )


def _filled_texts(task: WebTask) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of the texts of a task in which names in braces are filled in."""
    yield "instruction", task.instruction
    for kind, sources in (("setup", task.setup), ("check", list(_conditions(task.check)))):
        for number, source in enumerate(sources):
            for key in (*METHODS, "path"):
                if text := getattr(source, key):
                    yield f"{kind}[{number}].{key}", text
            for want in ("equals", "contains", "lacks"):
                if isinstance(text := getattr(source, want, None), str):
                    yield f"{kind}[{number}].{want}", text
    for number, path in enumerate(task.unchanged):
        yield f"unchanged[{number}]", path
    for number, move in enumerate(task.solution):
        for key in (*ON_ELEMENTS, "type", "goto", "answer", "text", "to"):
            if text := getattr(move, key):
                yield f"solution[{number}].{key}", text


def _conditions(checks: Iterable[Check]) -> Iterator[Check]:
    """Yield the conditions among checks, also those that are joined."""
    for check in checks:
        if check.joined:
            yield from _conditions(check.joined)
        else:
            yield check


# --- files -----------------------------------------------------------------------------------------


def _referred(file: Application) -> Iterator[str]:
    """Yield the entries "@NAME" of the file: bodies of requests and scripts."""
    sources: list[Source] = [file.state] if file.state else []
    for task in file.tasks:
        sources += [*task.setup, *_conditions(task.check)]
    for source in sources:
        yield from _referred_in(source.json_)
        if source.script is not None and source.script.startswith("@"):
            yield source.script


def _referred_in(value: Any) -> Iterator[str]:
    """Yield the texts "@NAME" within a body."""
    if isinstance(value, str) and _FILE.fullmatch(value):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _referred_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _referred_in(inner)


def _content(path: Path, text: str) -> str:
    """Return the content of the file that "@NAME" names. Raises ValueError."""
    try:
        content = read_text(path)
        if path.suffix == ".json":
            json.loads(content)
    except OSError as error:
        raise ValueError(f"{text}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{text}: {path} is no text; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{text}: {path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    return content


def _mapped(value: Any, change: Callable[[str], Any]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mapped(inner, change) for inner in value]
    return value
