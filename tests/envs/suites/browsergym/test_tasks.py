"""Promises of the list of tasks, and of what is said to be missing: no browser, no BrowserGym."""

from __future__ import annotations

import base64
import io
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from bus.errors import EnvError, MissingPartError, TaskError
from envs.suites.browsergym import program
from envs.suites.browsergym import tasks as interpreter
from envs.suites.browsergym.env import with_images
from envs.suites.browsergym.suite import BrowsergymSuite
from envs.suites.browsergym.tasks import Registered, known_tasks, lacking, registered_tasks

ANSWER = {
    "version": "0.14.3",
    "tasks": ["openended", "miniwob.click-test", "webarena.7", "workarena.servicenow.a-l2"],
    "infeasible": ["webarena.7"],
    "failed": {},
}


def fake_python(folder: Path, answer: dict[str, object]) -> Path:
    """An interpreter that answers every request so, and notes that it was asked."""
    python = folder / "bin" / "python"
    python.parent.mkdir(exist_ok=True)
    python.write_text(
        f"#!/bin/sh\necho asked >> {folder}/asked\nread request\necho '{json.dumps(answer)}'\n"
    )
    python.chmod(0o755)
    return python


def test_the_known_tasks_are_those_of_the_release() -> None:
    tasks = known_tasks()
    assert Counter(task_id.split("/")[1].split(".")[0] for task_id in tasks) == {
        "miniwob": 125, "workarena": 33, "webarena": 812, "visualwebarena": 910, "assistantbench": 214,
    }  # fmt: skip
    steps = {task_id.split("/")[1].split(".")[0]: task.max_steps for task_id, task in tasks.items()}
    assert steps == {
        "miniwob": 10, "workarena": 15, "webarena": 30, "visualwebarena": 30, "assistantbench": 30,
    }  # fmt: skip


def test_an_interpreter_is_asked_for_its_tasks_once_until_it_changes(tmp_path: Path) -> None:
    python = fake_python(tmp_path, ANSWER)
    cache = tmp_path / "cache"
    answers = [registered_tasks(str(python), cache) for _ in range(2)]
    assert answers[0] == answers[1]
    assert (tmp_path / "asked").read_text() == "asked\n"
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    packages.mkdir(parents=True)
    assert registered_tasks(str(python), cache) == answers[0]
    assert (tmp_path / "asked").read_text() == "asked\nasked\n"


def test_packages_that_failed_are_asked_for_again(tmp_path: Path) -> None:
    python = fake_python(tmp_path, {**ANSWER, "failed": {"browsergym.webarena": "no network"}})
    for _ in range(2):
        assert registered_tasks(str(python), tmp_path / "cache").failed
    assert (tmp_path / "asked").read_text() == "asked\nasked\n"


def test_tasks_are_those_that_are_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(interpreter.VARIABLE, str(fake_python(tmp_path, ANSWER)))
    suite = BrowsergymSuite()
    tasks = suite.tasks
    assert "browsergym/webarena.7" not in suite.elsewhere
    assert suite.elsewhere["browsergym/webarena.8"].endswith("setup-browsergym browsergym-webarena")
    assert {task_id: (task.max_steps, task.feasible) for task_id, task in tasks.items()} == {
        "browsergym/miniwob.click-test": (10, True),
        "browsergym/webarena.7": (30, False),
        "browsergym/workarena.servicenow.a-l2": (50, True),
    }


def test_an_interpreter_that_cannot_be_asked_leaves_the_known_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(interpreter.VARIABLE, str(fake_python(tmp_path, {"error": "No module"})))
    assert BrowsergymSuite().tasks == known_tasks()
    assert "No module; taking the tasks of BrowserGym 0.14.3" in caplog.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("miniwob.click-test", ""),
        ("miniwob.none", "has no task 'miniwob.none' there: install browsergym-miniwob"),
        ("webarena.3", "install browsergym-webarena in that interpreter; its package cannot be loaded: nltk"),
        ("webarena.7", "needs its backend: set WA_SHOPPING, WA_SHOPPING_ADMIN, WA_REDDIT, WA_GITLAB"),
        ("mine.x", "install the package that registers it"),
    ],
)  # fmt: skip
def test_what_a_task_lacks_is_one_line(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WA_SHOPPING", raising=False)
    failed = {"browsergym.webarena": "nltk", "browsergym.webarenalite": "other"}
    registered = Registered("0.14.3", ("miniwob.click-test", "webarena.7"), (), failed)
    missing = lacking(registered, [name])
    assert message in missing
    assert bool(missing) == bool(message)
    assert "\n" not in missing


def test_without_an_interpreter_the_cure_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(interpreter.VARIABLE, raising=False)
    monkeypatch.setattr(interpreter, "FOLDER", "not-there")
    monkeypatch.chdir(tmp_path)
    assert interpreter.find_interpreter() == ""
    with pytest.raises(MissingPartError, match=r"scripts/setup-browsergym .* env\.options\.python"):
        interpreter.need_interpreter()
    with pytest.raises(MissingPartError, match=r"env\.options\.python: no interpreter at nowhere"):
        interpreter.need_interpreter("nowhere")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "wide"}, "size must be WIDTHxHEIGHT"),
        ({"pause_s": -1.0}, "pause_s must be greater than or equal to 0"),
        ({"reset_s": 0.0}, "reset_s must be greater than 0"),
        ({"goal_images": "above"}, "goal_images must be .below. or .refuse."),
        ({"task_options": ["a"]}, "task_options must be a valid dictionary"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        BrowsergymSuite().make_env(**options)  # type: ignore[arg-type]


def png(colour: str, size: tuple[int, int]) -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", size, colour).save(encoded, "PNG")
    return encoded.getvalue()


def test_images_of_a_goal_stand_below_the_page_which_keeps_its_pixels() -> None:
    both = with_images(png("black", (200, 100)), [png("red", (400, 400)), png("blue", (10, 10))])
    whole = Image.open(io.BytesIO(both))
    assert whole.size == (200, 150)
    assert whole.crop((0, 0, 200, 100)).getcolors() == [(200 * 100, (0, 0, 0))]
    below = {colour: count for count, colour in whole.crop((0, 100, 200, 150)).getcolors() or ()}
    assert below[(255, 0, 0)] == 34 * 34  # made smaller, in its proportions
    assert below[(0, 0, 255)] == 10 * 10  # never larger


def test_an_image_that_cannot_be_read_breaks_the_reset() -> None:
    with pytest.raises(EnvError, match="an image of the goal cannot be read"):
        with_images(png("black", (200, 100)), [b"no image"])


def test_an_image_of_a_goal_is_a_data_url_and_nothing_is_fetched() -> None:
    data = base64.b64encode(b"image").decode()
    assert program.image_of({"url": f"data:image/png;base64,{data}"}) == b"image"
    for other in ("http://a.b/c.png", "file:///etc/passwd", "data:image/png;base64,%", "data:,a"):
        with pytest.raises(ValueError, match="an image of the goal"):
            program.image_of(other)


def test_tasks_of_webarena_that_cannot_be_done_are_read_from_its_task_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [{"fuzzy_match": "N/A"}, {"fuzzy_match": ["a"]}, {"exact_match": "N/A"}, None]
    tasks = [
        {"task_id": number, "eval": {"reference_answers": answer}}
        for number, answer in enumerate(answers)
    ]
    (tmp_path / "webarena").mkdir()
    (tmp_path / "webarena" / "__init__.py").touch()
    (tmp_path / "webarena" / "test.raw.json").write_text(json.dumps(tasks))
    assert program.unachievable() == []  # it is not installed
    monkeypatch.syspath_prepend(tmp_path)
    assert program.unachievable() == [0]
    monkeypatch.delitem(sys.modules, "webarena")
