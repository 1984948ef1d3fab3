"""The registry finds suites by name, by import path and by file, and reports errors in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bus.errors import MissingPartError, TaskError
from envs.contract.base import GuiEnv
from envs.contract.registry import (
    Suite,
    check_parts,
    find_task,
    load_suite,
    longest_reset_s,
    make_env,
    suite_names,
    tasks_of,
)
from tests.waiting import PATIENCE_S

OWN_SUITE = """
from bus.errors import MissingPartError
from envs.contract.base import Task
from envs.contract.registry import load_suite, make_env

class MySuite:
    name = "own"
    tasks = {"own/one": Task("own/one", "own", "do it", max_steps=3)}

    def make_env(self, *, depth=1):
        return make_env("mini")

class Passes(MySuite):
    def make_env(self, **options):
        return make_env("mini", **options)

class Needs(MySuite):
    def check_parts(self, *, depth=1, tasks=None):
        if tasks is None or "own/one" in tasks:
            raise MissingPartError(f"own/one needs a part at depth {depth}")

class NoSuite:
    name = "none"

class Half:
    reset = step = MySuite.make_env

class HalfEnv(MySuite):
    def make_env(self):
        return Half()

class Long(MySuite):
    def longest_reset_s(self):
        return 40

class LongDepth(MySuite):
    def longest_reset_s(self, depth):
        return 10 * depth

class LongText(MySuite):
    def longest_reset_s(self, **_):
        return "40 s"

class LongNumber(MySuite):
    longest_reset_s = 40

class Breaks(MySuite):
    @property
    def tasks(self):
        return open("/nowhere/tasks.json")

class Made(MySuite):
    make_env = None

class Number(MySuite):
    make_env = 5

class Steps(MySuite):
    tasks = {"own/one": Task("own/one", "own", "do it", max_steps="3")}

class Split(MySuite):
    tasks = {"own/one": Task("own/one", "own", "do it", 3, split="test")}

class Listed(MySuite):
    tasks = list(MySuite.tasks.values())

class Misnamed(MySuite):
    tasks = {"own/two": MySuite.tasks["own/one"]}

class Texts(MySuite):
    tasks = {"own/one": "do it"}

ready = MySuite()
"""


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN_SUITE)
    return path


@pytest.mark.parametrize("name", suite_names())
def test_every_shipped_suite_is_a_suite_whose_tasks_have_its_name(name: str) -> None:
    suite = load_suite(name)
    assert isinstance(suite, Suite)
    assert suite.name == name
    for task_id, task in suite.tasks.items():
        assert (task.id, task.suite) == (task_id, name)
        assert task_id.startswith(f"{name}/")
    try:
        env = make_env(name)
    except MissingPartError as missing:
        pytest.skip(str(missing))
    assert isinstance(env, GuiEnv)
    env.close()


def test_a_misspelt_suite_is_answered_with_the_right_one() -> None:
    with pytest.raises(TaskError, match="did you mean 'mini'"):
        load_suite("minni")


def test_a_misspelt_task_is_answered_with_the_right_one() -> None:
    with pytest.raises(TaskError, match="did you mean 'mini/popup'"):
        find_task("mini", "mini/poppup")


def test_a_misspelt_option_is_answered_with_the_right_one() -> None:
    with pytest.raises(TaskError, match="did you mean 'size'"):
        make_env("mini", sise="168x168")


@pytest.mark.parametrize("size", ["big", "448", "1x2x3", (4, 4), (168, 100_000)])
def test_a_size_that_cannot_be_drawn_is_refused(size: object) -> None:
    with pytest.raises(TaskError, match="size must be"):
        make_env("mini", size=size)


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(TaskError, match=r"encoding must be .png. or .jpeg."):
        make_env("mini", encoding="gif")


@pytest.mark.parametrize("attribute", ["MySuite", "ready"])
def test_a_suite_in_a_file_is_named_by_its_path(own_file: Path, attribute: str) -> None:
    name = f"{own_file}:{attribute}"
    assert list(load_suite(name).tasks) == ["own/one"]
    env = make_env(name, depth=2)
    env.close()


def test_a_suite_that_passes_its_options_on_is_given_all_of_them(own_file: Path) -> None:
    make_env(f"{own_file}:Passes", size="100x90").close()
    with pytest.raises(TaskError, match=r"encoding must be .png. or .jpeg."):
        make_env(f"{own_file}:Passes", encoding="gif")


def test_a_suite_in_a_package_is_named_by_its_import_path(
    own_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(own_file.parent))
    assert load_suite("own:MySuite").name == "own"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nx = 1 / 0\n", r"ZeroDivisionError: division by zero \(line 2\)"),
        ("def x(:\n", r"SyntaxError: .*\(line 1\)"),
        ("import no_such_package\n", "no module 'no_such_package'; install it"),
    ],
)
def test_a_module_that_does_not_load_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    (tmp_path / "does_not_load.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TaskError, match=f"suite does_not_load:MySuite: .*{message}"):
        load_suite("does_not_load:MySuite")


def test_a_module_of_the_current_folder_is_found_where_the_import_path_lacks_it(
    tmp_path: Path,
) -> None:
    """As in the process of a console script, whose path begins with the script's folder."""
    package = tmp_path / "found_here"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "mine.py").write_text(OWN_SUITE)
    repository = str(Path(__file__).parents[3])
    script = (
        "import sys\n"
        f"sys.path.insert(0, {repository!r})\n"
        "from envs.contract.registry import load_suite, make_env\n"
        "print(load_suite('found_here.mine:MySuite').name)\n"
        "make_env('found_here.mine:MySuite').close()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (ran.stdout, ran.stderr) == ("own\n", "")


def test_two_files_of_the_same_name_do_not_clash(tmp_path: Path) -> None:
    suites = []
    for folder in ("a", "b"):
        path = tmp_path / folder / "own.py"
        path.parent.mkdir()
        path.write_text(OWN_SUITE.replace('"own"', f'"{folder}"'))
        suites.append(load_suite(f"{path}:MySuite").name)
    assert suites == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package.at_all:X", "cannot import no_such_package.at_all"),
        ("nowhere/own.py:X", "no file nowhere/own.py"),
        (":MySuite", "':MySuite' is no module; name my_package.my_module:MySuite"),
        ("..own:MySuite", "'..own' is no module"),
        ("{file}:MySiute", "did you mean 'MySuite'"),
        ("{file}:NoSuite", "NoSuite is no Suite, it has no tasks and no make_env; it needs name, "),
        ("{file}:Breaks", r"Breaks breaks: FileNotFoundError: .*nowhere/tasks.json.*\(line"),
        ("{file}:Number", "make_env must be a method, got int 5"),
        ("{file}:Made", "Made is no Suite, it has no make_env;"),
        (
            "{file}:Steps",
            r"tasks\['own/one'\].max_steps must be a whole number from 1 on, got str '3'",
        ),
        ("{file}:Split", r"tasks\['own/one'\].split must be train or heldout, got str 'test'"),
        (
            "{file}:Listed",
            r"tasks must be a mapping of ids to tasks, \{task.id: task\}, got a list",
        ),
        ("{file}:Misnamed", r"tasks\['own/two'\] must be the Task of that id, got .*'own/one'"),
        ("{file}:Texts", r"tasks\['own/one'\] must be the Task of that id, got str 'do it'"),
    ],
)
def test_a_broken_path_names_the_place_and_the_cure(
    own_file: Path, name: str, message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        load_suite(name.format(file=own_file))


def test_a_split_holds_its_own_tasks_only() -> None:
    train, heldout = tasks_of("mini", "train"), tasks_of("mini", "heldout")
    assert {task.split for task in train} == {"train"}
    assert {task.split for task in heldout} == {"heldout"}
    assert len(train) + len(heldout) == len(tasks_of("mini")) == len(load_suite("mini").tasks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "x = 1\ny = z\n",
            r"cannot be loaded, fix it: NameError: name 'z' is not defined \(line 2\)",
        ),
        ("class A:\n  def f(:\n", r"cannot be loaded, fix it: SyntaxError: .*\(line 2\)"),
        (
            "class A:\n  def __init__(self):\n    1 / 0\n",
            r"A\(\) failed: ZeroDivisionError.*\(line 3\)",
        ),
        ("import sys\nsys.exit(4)\n", r"cannot be loaded, fix it: SystemExit: 4 \(line 2\)"),
        (
            "class A:\n  def __init__(self):\n    raise SystemExit(3)\n",
            r"A\(\) failed: SystemExit: 3 \(line 3\)",
        ),
    ],
)
def test_a_suite_file_that_fails_is_reported_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(TaskError, match=message):
        load_suite(f"{tmp_path}/a.py:A")


def test_a_suite_may_need_parts_for_some_of_its_tasks_alone(own_file: Path) -> None:
    suite = f"{own_file}:Needs"
    check_parts(suite, {}, ["own/two"])
    for tasks in (None, ["own/one"]):
        with pytest.raises(MissingPartError, match="at depth 2"):
            check_parts(suite, {"depth": 2}, tasks)
    check_parts(f"{own_file}:ready", {}, ["own/one"])  # needs nothing


def test_an_environment_without_all_methods_is_refused_with_those_that_it_lacks(
    own_file: Path,
) -> None:
    with pytest.raises(TaskError, match=r"make_env\(\) must .* Half has no evaluate and no close$"):
        make_env(f"{own_file}:HalfEnv")


@pytest.mark.parametrize(
    ("name", "seconds"), [("MySuite", 0.0), ("Long", 40.0), ("LongDepth", 30.0)]
)
def test_the_longest_reset_is_asked_for_with_the_options_that_it_takes(
    own_file: Path, name: str, seconds: float
) -> None:
    assert longest_reset_s(f"{own_file}:{name}", {"depth": 3, "wide": True}) == seconds


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("LongDepth", {}, r"longest_reset_s\(\) failed: TypeError: .*'depth'"),
        (
            "LongDepth",
            {"depth": []},
            r"longest_reset_s must return seconds from 0 on, got list \[\]",
        ),
        ("LongText", {}, "longest_reset_s must return seconds from 0 on, got str '40 s'"),
        ("LongDepth", {"depth": float("nan")}, "must return seconds from 0 on, got float nan"),
        (
            "LongNumber",
            {},
            "longest_reset_s must be a method that takes the options of make_env, got int 40",
        ),
    ],
)
def test_a_longest_reset_that_cannot_be_asked_for_is_one_line(
    own_file: Path, name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        longest_reset_s(f"{own_file}:{name}", options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class One:\n  def make_env(self): ...\n", "name its class, too: {file}:One"),
        (
            "class A:\n  def make_env(self): ...\nclass B(A): ...\nclass C: ...\n",
            "name its class, too: {file}:A or {file}:B",
        ),
        (
            "from envs.contract.registry import Suite\nclass Env: ...\n",
            "{file} has no suite: no class of it has a method make_env; its classes are Env",
        ),
    ],
)
@pytest.mark.parametrize("end", ["", ":"])
def test_a_suite_file_without_its_class_is_answered_with_the_classes_in_it(
    tmp_path: Path, text: str, message: str, end: str
) -> None:
    (file := tmp_path / "bad.py").write_text(text)
    with pytest.raises(TaskError) as error:
        load_suite(f"{file}{end}")
    assert str(error.value) == f"suite {file}{end}: {message.format(file=file)}"


def test_a_module_without_its_class_is_answered_so_too() -> None:
    with pytest.raises(TaskError, match=r"name its class, too: envs\.suites\.gym\.env:GymSuite$"):
        load_suite("envs.suites.gym.env")
