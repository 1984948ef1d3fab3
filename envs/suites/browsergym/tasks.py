"""BrowserGym's tasks, and the interpreter that has BrowserGym, whose version pins exclude dart's.

find_interpreter   the interpreter named by an option, a variable or scripts/setup-browsergym
INSTALL_STEP       how to make that interpreter, for errors
BENCHMARKS         steps, packages and backends by the first word of a task's id
known_tasks        the tasks of BrowserGym 0.14.3, for a host without an interpreter that could list them
registered_tasks   the tasks that an interpreter registers, listed once and then read from a cache
lacking            what is missing for some tasks, in one line
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
INSTALL_STEP = (
    "scripts/setup-browsergym in dart's folder makes it, or name one in the environment variable "
    f"{VARIABLE} or in env.options.python"
)


def find_interpreter(option: str = "") -> str:
    """Return the interpreter of `option`, else of the variable, else of scripts/setup-browsergym.

    Returns an empty text if there is none. Raises MissingPartError if one is named and does not exist.
    """
    for name, how in ((option, "env.options.python"), (os.environ.get(VARIABLE, ""), VARIABLE)):
        if name:
            path = find_named(name)
            if path is None:
                raise MissingPartError(f"{how}: no interpreter at {name}; {INSTALL_STEP}")
            return path
    root = Path(__file__).parents[3]
    for folder in (Path.cwd(), root):
        python = folder / FOLDER / "bin" / "python"
        if python.exists():
            return str(python)
    return ""


def need_interpreter(option: str = "") -> str:
    """Return the interpreter that `find_interpreter` finds. Raises MissingPartError if there is none."""
    python = find_interpreter(option)
    if not python:
        raise MissingPartError(f"BrowserGym needs an interpreter of its own: {INSTALL_STEP}")
    return python


logger = logging.getLogger(__name__)

LIST_S = 120.0
"""Limit in seconds for loading every package of an interpreter, from a cold disk."""


@dataclass(frozen=True)
class Benchmark:
    """The needs and limits of one family of tasks."""

    package: str  # on PyPI
    max_steps: int  # as in BrowserGym's own benchmark
    pause_s: float = 0.5  # time for a page to react to an action
    variables: tuple[str, ...] = ()  # environment variables without which no task can be set up


_WEBARENA = tuple(
    f"WA_{site}"
    for site in ("SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "WIKIPEDIA", "MAP", "HOMEPAGE")
)
_VISUAL = tuple(
    f"VWA_{name}"
    for name in (
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
"""First word of an id -> its benchmark. WorkArena's `max_steps` is for its levels 2 and 3; level 1 has 15."""

OTHER = Benchmark("the package that registers it", 30)
"""The benchmark of tasks of any other package."""

_LEVEL_1_STEPS = 15


def benchmark_of(name: str) -> Benchmark:
    """Return the benchmark of a task, by its id without `browsergym/`, e.g. webarena.12."""
    return BENCHMARKS.get(name.partition(".")[0], OTHER)


def make_tasks(names: Iterable[str], infeasible: Iterable[str] = ()) -> dict[str, Task]:
    """Return tasks by id, from names without `browsergym/`.

    The open-ended task, which has no goal, is left out.
    """
    infeasible_names = set(infeasible)
    return {
        f"browsergym/{name}": Task(
            f"browsergym/{name}",
            "browsergym",
            "{instruction}",
            max_steps=_steps_of(name),
            params={"name": name},
            feasible=name not in infeasible_names,
        )
        for name in names
        if name != "openended"
    }


def known_names() -> Iterator[str]:
    """Yield the names of the tasks of BrowserGym 0.14.3.

    Tasks of other packages are known only where the packages are installed.
    """
    listed = files("envs.suites.browsergym").joinpath("known_tasks.txt").read_text(encoding="utf-8")
    yield from listed.split()
    yield from (f"webarena.{number}" for number in range(812))
    yield from (f"visualwebarena.{number}" for number in range(910))
    yield from (f"assistantbench.validation.{number}" for number in range(33))
    yield from (f"assistantbench.test.{number}" for number in range(181))


@dataclass(frozen=True)
class Registered:
    """The answer of an interpreter about its BrowserGym."""

    version: str  # of browsergym-core
    tasks: tuple[str, ...]
    infeasible: tuple[str, ...]
    failed: Mapping[str, str]  # installed package that cannot be loaded -> the reason


def registered_tasks(python: str, cache: Path | None = None) -> Registered:
    """Return the tasks that `python` registers. Raises EnvError if it has no BrowserGym.

    The answer is stored in the folder `cache` until packages are installed in the interpreter.
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
    # A download that failed may succeed next time, so that such an answer is not stored.
    if not answer["failed"]:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            draft = cache_file.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(answer), encoding="utf-8")
            draft.replace(cache_file)
    return _read(answer)


def default_cache() -> Path:
    """Return the folder `dart` in the user's folder for caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dart"


def source() -> str:
    """Return the text of program.py."""
    return files("envs.suites.browsergym").joinpath("program.py").read_text(encoding="utf-8")


def known_tasks() -> dict[str, Task]:
    """Return the tasks that are known without an interpreter."""
    return make_tasks(known_names())


def lacking(registered: Registered, names: Sequence[str]) -> str:
    """Return what is missing for tasks (names without `browsergym/`), in one line; empty if nothing is."""
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
    """Return a digest of what the answer depends on: the interpreter, its packages, the user's packages."""
    place = Path(python)
    folders = [place, *place.parent.parent.glob("lib/python*/site-packages")]
    folders += [folder / "browsergym" for folder in folders[1:]]
    times = [folder.stat().st_mtime_ns for folder in folders if folder.exists()]
    own = [os.environ.get(name, "") for name in ("DART_BROWSERGYM_PACKAGES", "PYTHONPATH")]
    key = json.dumps([source(), python, times, own])
    return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
