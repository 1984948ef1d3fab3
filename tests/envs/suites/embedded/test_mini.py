"""Suite mini: what each kind of wrong action does, and that a base model is taught no order."""

from __future__ import annotations

import pytest

from envs.contract.actions import Click, Scroll
from envs.contract.registry import load_suite, make_env
from envs.suites.embedded.env import EmbeddedEnv
from envs.suites.embedded.scene import phrases
from envs.suites.embedded.theme import COLOURS
from scripts.grounding_screens import INSTRUCTIONS, KINDS, VOCABULARY, grounding_screen

TASKS = load_suite("mini").tasks


def start(task: str, seed: int = 0) -> tuple[EmbeddedEnv, str]:
    """An environment at the beginning of a task, and the colour that it is about."""
    env = make_env("mini", slack=20)
    assert isinstance(env, EmbeddedEnv)
    env._tasks = {k: type(t)(**{**vars(t), "max_steps": 30}) for k, t in env._tasks.items()}
    _, info = env.reset(seed=seed, options={"task": task})
    return env, next(word for word in info["instruction"].split() if word in COLOURS)


def press(env: EmbeddedEnv, name: str) -> tuple[float, bool]:
    """Click a widget by name; (reward, terminated)."""
    widget = next(widget for widget in env.widgets() if widget.name == name)
    x, y = widget.centre
    _, reward, terminated, _, _ = env.step(Click(x=x, y=y))
    return reward, terminated


def names(env: EmbeddedEnv) -> set[str]:
    return {widget.name for widget in env.widgets()}


def other(env: EmbeddedEnv, kind: str, colour: str) -> str:
    """A widget of that kind of another colour."""
    return next(w.name for w in env.widgets() if w.role == kind and w.colour != colour)


def test_the_wrong_button_ends_the_episode_as_failed() -> None:
    env, colour = start("mini/click")
    assert press(env, other(env, "button", colour)) == (0.0, True)
    assert env.evaluate().outcome == "fail"


def test_a_popup_hides_what_is_behind_until_it_is_closed() -> None:
    for seed in range(10):
        env, colour = start("mini/popup", seed)
        assert f"{colour}.button" not in names(env)
        assert press(env, sorted(names(env))[0]) == (0.0, False)
        assert press(env, f"{colour}.button") == (1.0, True)


def test_a_confirmation_can_be_cancelled_and_only_ok_commits() -> None:
    env, colour = start("mini/confirm")
    wrong = other(env, "button", colour)
    assert press(env, wrong) == (0.0, False)
    assert press(env, "confirm.close") == (0.0, False)
    assert press(env, f"{colour}.button") == (0.0, False)
    assert press(env, "confirm.ok") == (1.0, True)


def test_a_form_with_too_much_ticked_asks_for_confirmation_too_and_fails() -> None:
    env = make_env("composed")
    assert isinstance(env, EmbeddedEnv)
    env.reset(seed=1, options={"task": "composed/form+confirm"})
    boxes = sorted(name for name in names(env) if name.endswith(".box"))
    for name in (*boxes[:2], "submit"):
        assert press(env, name) == (0.0, False)
    assert press(env, "confirm.ok") == (0.0, True)


@pytest.mark.parametrize("task", load_suite("composed").tasks)
def test_every_composition_has_a_solution_and_steps_to_spare(task: str) -> None:
    env = make_env("composed")
    assert isinstance(env, EmbeddedEnv)
    for seed in range(5):
        _, info = env.reset(seed=seed, options={"task": task})
        for _ in range(info["need"]):
            _, reward, terminated, _, _ = env.step(env.oracle_action())
        assert terminated
        assert reward == 1.0
        assert info["max_steps"] > info["need"]


def test_ok_to_the_wrong_button_fails() -> None:
    env, colour = start("mini/confirm")
    press(env, other(env, "button", colour))
    assert press(env, "confirm.ok") == (0.0, True)


def test_a_menu_closes_by_a_press_outside_of_it() -> None:
    env, colour = start("mini/menu")
    press(env, "menu")
    assert f"{colour}.button" in names(env)
    env.step(Click(x=1, y=167))
    assert f"{colour}.button" not in names(env)


def test_pages_turn_both_ways() -> None:
    env, _ = start("mini/page")
    first = names(env)
    press(env, "next")
    press(env, "back")
    assert names(env) == first


def test_wrong_ticks_can_be_undone_and_are_not_submitted_unseen() -> None:
    env, colour = start("mini/form")
    wrong = other(env, "box", colour)
    assert press(env, "submit") == (0.0, False)  # an empty form is not sent
    for name in (wrong, f"{colour}.box", wrong):
        assert press(env, name) == (0.0, False)
    assert press(env, "submit") == (1.0, True)


def test_one_tick_too_many_fails() -> None:
    env, colour = start("mini/form")
    press(env, other(env, "box", colour))
    press(env, f"{colour}.box")
    assert press(env, "submit") == (0.0, True)


def test_another_choice_of_a_list_can_be_made() -> None:
    env, colour = start("mini/dropdown")
    press(env, "list")
    assert press(env, other(env, "swatch", colour)) == (0.0, False)
    press(env, "list")
    assert press(env, f"{colour}.swatch") == (1.0, True)


def test_the_trash_takes_only_the_selected_file() -> None:
    env, colour = start("mini/delete")
    assert press(env, "trash") == (0.0, False)
    press(env, other(env, "file", colour))
    press(env, f"{colour}.file")
    assert press(env, "trash") == (1.0, True)
    env, colour = start("mini/delete")
    press(env, other(env, "file", colour))
    assert press(env, "trash") == (0.0, True)


def test_a_list_scrolls_by_arrows_and_by_the_wheel_alike() -> None:
    env, _ = start("mini/scroll")
    press(env, "down")
    by_arrow = names(env)
    press(env, "up")
    row = next(widget for widget in env.widgets() if widget.role == "button")
    env.step(Scroll(x=row.centre[0], y=row.centre[1], dy=2))
    assert names(env) == by_arrow


def test_a_folder_opens_and_can_be_left() -> None:
    env, colour = start("mini/folder")
    press(env, "folder")
    assert f"{colour}.button" in names(env)
    press(env, "back")
    assert "folder" in names(env)


@pytest.mark.parametrize("task", TASKS)
def test_targets_are_at_least_24_pixels_wide_and_high(task: str) -> None:
    env = make_env("mini")
    assert isinstance(env, EmbeddedEnv)
    for seed in range(25):
        _, info = env.reset(seed=seed, options={"task": task})
        for _ in range(info["need"]):
            for widget in env.widgets():
                assert widget.bbox.width >= 24, widget
                assert widget.bbox.height >= 24, widget
            env.step(env.oracle_action())


@pytest.mark.parametrize("task", TASKS)
def test_instructions_are_of_the_closed_vocabulary(task: str) -> None:
    env = make_env("mini")
    for seed in range(40):
        _, info = env.reset(seed=seed, options={"task": task})
        assert info["instruction"] in INSTRUCTIONS
        assert set(info["instruction"].split()) <= set(VOCABULARY)


def test_kinds_that_hide_a_button_share_one_instruction() -> None:
    kinds_used = ("click", "popup", "menu", "page", "confirm", "tabs", "scroll", "folder")
    assert {TASKS[f"mini/{kind}"].instruction for kind in kinds_used} == {
        "click the {colour} button"
    }


# --- grounding --------------------------------------------------------------------------------


def test_a_grounding_screen_is_the_same_for_the_same_seed() -> None:
    one, again = grounding_screen(11), grounding_screen(11)
    assert one.observation == again.observation
    assert one.questions == again.questions


def test_each_question_has_one_answer_that_is_on_the_screen() -> None:
    instructions_seen, kinds = set(), set()
    for seed in range(600):
        screen = grounding_screen(seed)
        kinds.add(screen.kind)
        assert screen.image.size == (168, 168)
        instructions = [instruction for instruction, _ in screen.questions]
        assert len(instructions) == len(set(instructions))
        assert not set(instructions) & set(screen.absent)
        for instruction, box in screen.questions:
            assert instruction in INSTRUCTIONS
            assert min(box.width, box.height) >= 24
            assert 0 <= box.x0 < box.x1 <= 168
            assert 0 <= box.y0 < box.y1 <= 168
        instructions_seen |= set(instructions)
    assert instructions_seen == set(INSTRUCTIONS)
    assert kinds == set(KINDS)


def test_the_answer_to_a_colour_question_shows_that_colour() -> None:
    for seed in range(200):
        screen = grounding_screen(seed)
        for instruction, box in screen.questions:
            colour = next((word for word in instruction.split() if word in COLOURS), None)
            if colour is not None:
                pixels = screen.image.crop(box).getcolors(65536) or []
                assert COLOURS[colour] in {value for _, value in pixels}, (seed, instruction)


def test_phrases_name_every_widget_that_a_mini_screen_can_show() -> None:
    env = make_env("mini")
    assert isinstance(env, EmbeddedEnv)
    for task in TASKS:
        for seed in range(10):
            _, info = env.reset(seed=seed, options={"task": task})
            for _ in range(info["need"]):
                for widget in env.widgets():
                    assert phrases(widget.role, widget.name, widget.colour)
                env.step(env.oracle_action())
