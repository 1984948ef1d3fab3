"""Which tasks BrowserGym has, and the interpreter that has BrowserGym, whose pins exclude ours.

find_interpreter  the one that an option, a variable or scripts/setup-browsergym names; CURE makes it
BENCHMARKS        steps, packages and backends by the first word of an id
known_tasks       ids of BrowserGym 0.14.3, for a host where no interpreter can be asked
registered_tasks  ids that an interpreter registers; asked once, then from a cache
lacking           what is missing for a task
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from bus.errors import MissingPartError
from envs.contract.base import Task
from envs.tools.child_program import ChildProgram, find_named

VARIABLE = "DART_BROWSERGYM_PYTHON"
FOLDER = ".venv-browsergym"
CURE = (
    "scripts/setup-browsergym in dart's folder makes it, or name one in the environment variable "
    f"{VARIABLE} or in env.options.python"
)


def find_interpreter(option: str = "") -> str:
    """Return the interpreter called `named`, else that of the variable, else that of scripts/setup-browsergym.

    An empty text where there is none; raises MissingPartError if one is named and is not there.
    """
    for name, how in ((option, "env.options.python"), (os.environ.get(VARIABLE, ""), VARIABLE)):
        if name:
            path = find_named(name)
            if path is None:
                raise MissingPartError(f"{how}: no interpreter at {name}; {CURE}")
            return path
    root = Path(__file__).parents[3]
    for folder in (Path.cwd(), root):
        python = folder / FOLDER / "bin" / "python"
        if python.exists():
            return str(python)
    return ""


def need_interpreter(option: str = "") -> str:
    """Return the same interpreter as `find_interpreter`; raises MissingPartError where there is none."""
    python = find_interpreter(option)
    if not python:
        raise MissingPartError(f"BrowserGym needs an interpreter of its own: {CURE}")
    return python


logger = logging.getLogger(__name__)

LIST_S = 120.0
"""Time limit for loading every package of an interpreter, from a cold disk."""


@dataclass(frozen=True)
class Benchmark:
    """What one family of tasks needs and allows."""

    package: str  # on PyPI
    max_steps: int  # of BrowserGym's own benchmark of it
    pause_s: float = 0.5  # that a page gets to react to an action
    variables: tuple[str, ...] = ()  # that its tasks read; without them none can be set up


_WEBARENA = tuple(
    f"WA_{site}"
    for site in ("SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "WIKIPEDIA", "MAP", "HOMEPAGE")
)
_VISUAL = tuple(
    f"VWA_{each}"
    for each in (
        "CLASSIFIEDS",
        "CLASSIFIEDS_RESET_TOKEN",
        "SHOPPING",
        "REDDIT",
        "WIKIPEDIA",
        "HOMEPAGE",
    )
)

BENCHMARKS: Mapping[str, Benchmark] = {
    "miniwob": Benchmark("browsergym-miniwob", 10, pause_s=0.1),
    "webarena": Benchmark("browsergym-webarena", 30, variables=_WEBARENA),
    "webarenalite": Benchmark("browsergym-webarenalite", 30, variables=_WEBARENA),
    "webarena_verified": Benchmark("browsergym-webarena-verified", 30, variables=_WEBARENA),
    "visualwebarena": Benchmark("browsergym-visualwebarena", 30, variables=_VISUAL),
    "assistantbench": Benchmark("browsergym-assistantbench", 30),
    "workarena": Benchmark("browsergym-workarena", 50),
}
"""By the first word of an id. `max_steps` of WorkArena is that of its levels 2 and 3; level 1 has 15."""

OTHER = Benchmark("the package that registers it", 30)
"""Tasks of any other package."""

_LEVEL_1_STEPS = 15


def benchmark_of(name: str) -> Benchmark:
    """Of a task by its id without `browsergym/`, e.g. webarena.12."""
    return BENCHMARKS.get(name.partition(".")[0], OTHER)


def make_tasks(names: Iterable[str], infeasible: Iterable[str] = ()) -> dict[str, Task]:
    """Tasks by id, of names without `browsergym/`; the open-ended task, which has no goal, is none."""
    cannot = set(infeasible)
    return {
        f"browsergym/{name}": Task(
            f"browsergym/{name}",
            "browsergym",
            "{instruction}",
            max_steps=_steps_of(name),
            params={"name": name},
            feasible=name not in cannot,
        )
        for name in names
        if name != "openended"
    }


def known_names() -> Iterator[str]:
    """Yield the ids of BrowserGym 0.14.3 that are counted or few; others are known where they are installed."""
    listed = files("envs.suites.browsergym").joinpath("known_tasks.txt").read_text(encoding="utf-8")
    yield from listed.split()
    yield from (f"webarena.{number}" for number in range(812))
    yield from (f"visualwebarena.{number}" for number in range(910))
    yield from (f"assistantbench.validation.{number}" for number in range(33))
    yield from (f"assistantbench.test.{number}" for number in range(181))


@dataclass(frozen=True)
class Registered:
    """What an interpreter says of itself."""

    version: str  # of browsergym-core
    tasks: tuple[str, ...]
    infeasible: tuple[str, ...]
    failed: Mapping[str, str]  # packages that it has and cannot load, with the reason


def registered_tasks(python: str, cache: Path | None = None) -> Registered:
    """Return the tasks that `python` registers. Raises EnvError where it has no BrowserGym.

    An interpreter is asked again when packages were installed there. `cache` is the folder of the answers.
    """
    folder = cache or default_cache()
    cache_file = folder / f"browsergym-{_state_of(python)}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return _read(json.loads(cache_file.read_text(encoding="utf-8")))
    program = ChildProgram(python, source())
    try:
        answer, _ = program.ask({"do": "list"}, LIST_S, "the tasks of BrowserGym")
    finally:
        program.close()
    if not answer["failed"]:  # what fails may be a download: asked again next time
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            whole = cache_file.with_suffix(f".{os.getpid()}")
            whole.write_text(json.dumps(answer), encoding="utf-8")
            whole.replace(cache_file)
    return _read(answer)


def default_cache() -> Path:
    """`dart` in the user's folder for caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dart"


def source() -> str:
    """Return the text of program.py."""
    return files("envs.suites.browsergym").joinpath("program.py").read_text(encoding="utf-8")


def known_tasks() -> dict[str, Task]:
    """Tasks of the names that are known without an interpreter."""
    return make_tasks(known_names())


def lacking(registered: Registered, names: Sequence[str]) -> str:
    """Return what is missing for tasks, by their names without `browsergym/`, as one line; empty: nothing."""
    for name in names:
        benchmark = benchmark_of(name)
        if name not in registered.tasks:
            word = name.partition(".")[0]
            why = [why for package, why in registered.failed.items() if package.endswith(word)]
            because = f"; its package cannot be loaded: {why[0]}" if why else ""
            return (
                f"BrowserGym {registered.version} has no task {name!r} there: "
                f"install {benchmark.package} in that interpreter{because}"
            )
        if missing := [
            variable for variable in benchmark.variables if not os.environ.get(variable)
        ]:
            return (
                f"browsergym/{name} needs its backend: set {', '.join(missing)} "
                "(docs/environments/browsergym.md)"
            )
    return ""


def _steps_of(name: str) -> int:
    if name.startswith("workarena.") and not name.endswith(("-l2", "-l3")):
        return _LEVEL_1_STEPS
    return benchmark_of(name).max_steps


def _read(answer: Mapping[str, Any]) -> Registered:
    tasks, infeasible = (tuple(map(str, answer[key])) for key in ("tasks", "infeasible"))
    return Registered(str(answer["version"]), tasks, infeasible, dict(answer["failed"]))


def _state_of(python: str) -> str:
    """Return what the answer depends on: the interpreter, its packages, packages of the user's own."""
    place = Path(python)
    folders = [place, *place.parent.parent.glob("lib/python*/site-packages")]
    folders += [folder / "browsergym" for folder in folders[1:]]
    times = [folder.stat().st_mtime_ns for folder in folders if folder.exists()]
    own = [os.environ.get(name, "") for name in ("DART_BROWSERGYM_PACKAGES", "PYTHONPATH")]
    key = json.dumps([source(), python, times, own])
    return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
