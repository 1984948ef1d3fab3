"""Suite desk: the applications behave like applications, also away from the solution."""

from __future__ import annotations

import pytest

from envs.contract.actions import Action, Click, Done, DoubleClick, Drag, KeyPress, Type
from envs.contract.registry import load_suite, make_env
from envs.suites.embedded.env import EmbeddedEnv
from envs.suites.embedded.tasks.files import FilesScene, differences
from envs.suites.embedded.tasks.forms import LoginScene
from envs.suites.embedded.tasks.panels import ControlScene
from envs.suites.embedded.tasks.settings import SettingsScene
from envs.suites.embedded.tasks.small import compute


def start(task: str, seed: int = 0) -> EmbeddedEnv:
    env = make_env("desk", slack=60)
    assert isinstance(env, EmbeddedEnv)
    env._tasks = {k: type(t)(**{**vars(t), "max_steps": 90}) for k, t in env._tasks.items()}
    env.reset(seed=seed, options={"task": task})
    return env


def at(env: EmbeddedEnv, name: str) -> tuple[int, int]:
    return next(widget for widget in env.widgets() if widget.name == name).centre


def press(env: EmbeddedEnv, name: str) -> None:
    x, y = at(env, name)
    env.step(Click(x=x, y=y))


def names(env: EmbeddedEnv) -> set[str]:
    return {widget.name for widget in env.widgets()}


def finish(env: EmbeddedEnv, action: Action | None = None) -> str:
    """The outcome after the action `done`."""
    _, _, _, _, info = env.step(action or Done())
    return str(info["verdict"].outcome)


def test_a_wrong_button_of_a_tool_box_is_harmless() -> None:
    env = start("desk/press")
    goal = env.oracle_action()
    for widget in env.widgets():
        if isinstance(goal, Click) and not widget.bbox.contains(goal.x, goal.y):
            _, reward, terminated, _, _ = env.step(Click(x=widget.centre[0], y=widget.centre[1]))
            assert (reward, terminated) == (0.0, False)
    _, reward, terminated, _, _ = env.step(goal)
    assert (reward, terminated) == (1.0, True)


@pytest.mark.parametrize(
    "task", ["desk/check", "desk/radio", "desk/combo", "desk/slider", "desk/tabs"]
)
def test_one_change_too_many_fails(task: str) -> None:
    env = start(task)
    action = env.oracle_action()
    while not isinstance(action, Done):
        env.step(action)
        action = env.oracle_action()
    assert env.evaluate().outcome == "pass"
    scene, _ = env._playing()
    assert isinstance(scene, ControlScene)
    extra = next(
        label for label, value in scene.values.items() if isinstance(value, bool | int | str)
    )
    before = scene.values[extra]
    scene.put(extra, not before if isinstance(before, bool) else "something else")
    verdict = env.evaluate()
    assert verdict.outcome == "fail"
    assert extra in verdict.reason


def test_a_wrong_password_is_refused_and_can_be_corrected() -> None:
    env = start("desk/login")
    press(env, "User")
    env.step(Type(text="Nobody\tnothing"))
    _, _, terminated, _, _ = env.step(KeyPress(keys=["tab"]))
    assert not terminated
    press(env, "submit")
    scene, _ = env._playing()
    assert isinstance(scene, LoginScene)
    assert scene.values["Password"] == ""
    for _ in range(12):
        _, reward, terminated, _, _ = env.step(env.oracle_action())
        if terminated:
            break
    assert reward == 1.0


def test_a_form_sent_too_early_fails_finally() -> None:
    env = start("desk/sign-up")
    x, y = at(env, "submit")
    _, reward, terminated, _, info = env.step(Click(x=x, y=y))
    assert (reward, terminated, info["verdict"].outcome) == (0.0, True, "fail")


def test_settings_count_only_once_applied_and_can_be_reverted() -> None:
    env = start("desk/settings-switch")
    scene, _ = env._playing()
    assert isinstance(scene, SettingsScene)
    while scene.values != scene.goal:
        env.step(env.oracle_action())
    assert env.evaluate().outcome == "fail"
    press(env, "revert")
    assert scene.values == scene.applied != scene.goal
    while scene.values != scene.goal:
        env.step(env.oracle_action())
    press(env, "apply")
    assert finish(env) == "pass"


def test_the_settings_search_shows_what_matches_and_finds_the_setting() -> None:
    env = start("desk/settings-level", seed=1)
    press(env, "search")
    env.step(Type(text="volu"))
    assert "Volume" in names(env)
    assert "Brightness" not in names(env)


def test_unsaved_changes_are_asked_about_and_cancel_returns() -> None:
    env = start("desk/close")
    press(env, "window.close")
    assert {"ask.cancel", "ask.drop", "ask.save"} <= names(env)
    press(env, "ask.cancel")
    assert names(env) == {"window.close"}
    wrong = "ask.drop" if env._playing()[0].saves else "ask.save"  # type: ignore[attr-defined]
    press(env, "window.close")
    x, y = at(env, wrong)
    _, reward, terminated, _, _ = env.step(Click(x=x, y=y))
    assert (reward, terminated) == (0.0, True)


@pytest.mark.parametrize(
    ("text", "value"),
    [("12+3", "15"), ("12-15", "-3"), ("7*8", "56"), ("9/2", "4"), ("9/0", "error"), ("5", "5")],
)
def test_the_calculator_computes(text: str, value: str) -> None:
    assert compute(text) == value


# --- the file manager -------------------------------------------------------------------------


def files(task: str, seed: int = 0) -> tuple[EmbeddedEnv, FilesScene]:
    env = start(task, seed)
    scene, _ = env._playing()
    assert isinstance(scene, FilesScene)
    return env, scene


def a_file(scene: FilesScene) -> str:
    return next(name for name, below in scene.here.items() if below is None)


def a_folder(scene: FilesScene) -> str:
    return next(name for name, below in scene.here.items() if below is not None)


def test_deleting_the_wrong_file_fails() -> None:
    env, scene = files("desk/files-rename")
    press(env, f"entry.{a_file(scene)}")
    press(env, "delete")
    press(env, "ask.ok")
    assert finish(env) == "fail"


def test_a_delete_can_be_cancelled() -> None:
    env, scene = files("desk/files-delete")
    before = dict(scene.tree)
    press(env, f"entry.{a_file(scene)}")
    env.step(KeyPress(keys=["tab"]))
    press(env, "delete")
    env.step(KeyPress(keys=["escape"]))
    assert scene.tree == before
    assert "ask.ok" not in names(env)


def test_a_file_dragged_onto_a_folder_is_moved_into_it() -> None:
    env, scene = files("desk/files-move")
    name, folder = a_file(scene), a_folder(scene)
    env.step(Drag(path=[at(env, f"entry.{name}"), at(env, f"entry.{folder}")]))
    assert name not in scene.tree
    below = scene.tree[folder]
    assert below is not None
    assert name in below


def test_a_folder_is_entered_by_a_double_click_and_left_by_up() -> None:
    env, scene = files("desk/files-open")
    folder = a_folder(scene)
    x, y = at(env, f"entry.{folder}")
    env.step(DoubleClick(x=x, y=y))
    assert scene.path == (folder,)
    press(env, "up")
    assert scene.path == ()


def test_the_context_menu_does_the_same_as_the_tool_bar() -> None:
    env, scene = files("desk/files-rename")
    name = a_file(scene)
    x, y = at(env, f"entry.{name}")
    env.step(Click(x=x, y=y, button="right"))
    press(env, "menu.rename")
    env.step(Type(text="other.txt\n"))
    assert "other.txt" in scene.tree
    assert name not in scene.tree


def test_a_taken_name_is_refused() -> None:
    env, scene = files("desk/files-new")
    before = dict(scene.tree)
    press(env, "new")
    env.step(Type(text=a_folder(scene) + "\n"))
    assert names(env) == {"ask.ok", "ask.close"}
    press(env, "ask.ok")
    assert scene.tree == before


def test_a_folder_cannot_be_moved_into_itself() -> None:
    env, scene = files("desk/files-move")
    folder = a_folder(scene)
    press(env, f"entry.{folder}")
    press(env, "cut")
    x, y = at(env, f"entry.{folder}")
    env.step(DoubleClick(x=x, y=y))
    press(env, "paste")
    assert folder in scene.tree


def test_differences_name_the_path() -> None:
    assert differences({"a": {"x": None}}, {"a": {"x": None}}) == []
    assert differences({"a": {"x": None}}, {"a": {"y": None}}) == [
        "/a/x should not be there",
        "/a/y is missing",
    ]
    assert differences({"a": None}, {"a": {}}) == ["/a is of the wrong kind"]


def test_template_names_of_the_desk_are_unique() -> None:
    tasks = load_suite("desk").tasks
    assert len(tasks) == len(set(tasks)) >= 20
