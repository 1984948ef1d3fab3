"""MobileGym's tasks, and the interpreter that has the packages of its bench_env.

find_interpreter   the interpreter that an option or a variable names
read_list          what MobileGym says of its tasks and its phone, asked once and then read from a cache
make_tasks         the tasks by id
Phone              the phone's screen
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from bus.errors import EnvError, MissingPartError
from envs.contract.base import Split, Task
from envs.tools.child_program import ChildProgram, find_named

VARIABLE = "DART_MOBILEGYM_PYTHON"
INSTALL_STEP = (
    "make an environment with `pip install -r bench_env/requirements.txt` as MobileGym's README says, and name its "
    f"interpreter in env.options.python or in the variable {VARIABLE}"
)
LIST_S = 120.0  # the longest time for loading all tasks, from a cold disk


@dataclass(frozen=True)
class Phone:
    """The phone's screen, as MobileGym's benchmark has it."""

    size: tuple[int, int]  # CSS pixels
    scale: float  # pixels per CSS pixel
    user_agent: str


def source() -> str:
    """Return the text of program.py."""
    return files("envs.suites.mobilegym").joinpath("program.py").read_text(encoding="utf-8")


def find_interpreter(option: str = "") -> str:
    """Return the interpreter of `option`, else of the variable. Raises MissingPartError if there is none."""
    for name, how in ((option, "env.options.python"), (os.environ.get(VARIABLE, ""), VARIABLE)):
        if name:
            path = find_named(name)
            if path is None:
                raise MissingPartError(f"{how}: no interpreter at {name}; {INSTALL_STEP}")
            return path
    raise MissingPartError(f"MobileGym needs an interpreter of its own: {INSTALL_STEP}")


def read_list(folder: Path, python: str, cache: Path | None = None) -> dict[str, Any]:
    """Return the tasks and the phone of MobileGym in `folder`, as program.py answers them.

    The answer is stored in the folder `cache` until a task file or the interpreter changes. Raises EnvError.
    """
    place = (cache or default_cache()) / f"mobilegym-{_state_of(folder, python)}.json"
    with suppress(OSError, ValueError):
        answer: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
        return answer
    program = ChildProgram(python, source(), folder=folder)
    try:
        answer, _ = program.ask({"do": "list"}, LIST_S, f"the tasks of {folder}")
    finally:
        program.close()
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(answer), encoding="utf-8")
        draft.replace(place)
    return answer


def default_cache() -> Path:
    """Return the folder `dart` in the user's folder for caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dart"


def make_tasks(answer: Mapping[str, Any], suite: str) -> dict[str, Task]:
    """Return the tasks by id. MobileGym's test split is held out. Raises EnvError for another answer."""
    try:
        return {
            f"mobilegym/{task['id']}": Task(
                f"mobilegym/{task['id']}",
                suite,
                "{instruction}",
                max_steps=int(task["max_steps"]),
                tier=int(str(task["difficulty"]).removeprefix("L") or 1),
                split=_split(task["split"]),
                params={
                    "name": task["id"],
                    "apps": tuple(task["apps"]),
                    "answer_sheet": bool(task["answer_sheet"]),
                },
            )
            for task in answer["tasks"]
        }
    except (KeyError, TypeError, ValueError) as error:
        raise EnvError(f"this MobileGym lists its tasks in another form: {error!r}") from None


def phone_of(answer: Mapping[str, Any]) -> Phone:
    """Return the phone's screen. Raises EnvError for another answer."""
    try:
        phone = answer["phone"]
        width, height = map(int, phone["size"])
        return Phone((width, height), float(phone["scale"]), str(phone["user_agent"]))
    except (KeyError, TypeError, ValueError) as error:
        raise EnvError(f"this MobileGym describes its phone in another form: {error!r}") from None


def _split(name: str) -> Split:
    return "heldout" if name == "test" else "train"


def _state_of(folder: Path, python: str) -> str:
    """Return a digest of what the list depends on: dart's program, the interpreter, the files of tasks."""
    times = [
        (str(path.relative_to(folder)), path.stat().st_mtime_ns)
        for part in ("task", "splits")
        for path in sorted((folder / "bench_env" / part).rglob("*"))
        if path.suffix in (".py", ".txt")
    ]
    key = json.dumps([source(), str(folder), python, times])
    return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
