"""The arm `browsergym` of `benchmarks/interop/interop.py`: its MiniWoB through our adapter, and through its own step.

Actions are solutions that our suite `miniwob` finds for the same instance, half of them those of another seed. Its
own verdict is its reward. Its own side runs `env.step` with its default observation (DOM, accessibility tree) and
action set in a process of the same interpreter, once with the pause of ours (`own_*`) and, for a few
episodes, with its default delays (`own_default_steps_per_second`).
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.interop.parts import Adapter, Asked, Played, Result, compared
from bus.errors import EnvError
from envs.contract.actions import Action, Click, Type
from envs.contract.registry import check_parts, load_suite, make_env
from envs.suites.browsergym.tasks import benchmark_of, need_interpreter
from envs.tools.child_program import ChildProgram
from envs.tools.chromium import find_chromium
from envs.tools.miniwob_pages import find_pages

PAGES = (
    "click-test", "click-test-2", "click-button", "click-link", "click-dialog", "click-dialog-2",
    "focus-text-2", "enter-text", "click-color", "click-tab",
)  # fmt: skip
SCALE = 1.5  # pixels of its screenshots per pixel of ours
FIRST_DEADLINE_S = 120.0
DEFAULT_EPISODES = 5


class Own:
    """BrowserGym's own environment and action strings."""

    def __init__(self, plans: Sequence[Sequence[Action]], pause_s: float | None) -> None:
        source = Path(__file__).with_name("own_browsergym.py").read_text()
        variables = {"MINIWOB_URL": f"{find_pages().as_uri()}/"}
        self._program = ChildProgram(need_interpreter(), source, variables=variables)
        self._plans = plans
        self.screen = ""  # digest of the newest first screen's pixels
        self._about = {"chromium": str(find_chromium()), "pause_s": pause_s}

    def play(self, index: int) -> Played:
        """See Side."""
        played, reward = Played("invalid"), 0.0
        try:
            began = time.perf_counter()
            request = {"do": "reset", "task": name_of(index), "seed": index, **self._about}
            answer, _ = self._program.ask(request, FIRST_DEADLINE_S, "reset")
            self.screen = answer["screen"]
            played.reset_s = time.perf_counter() - began
            for action in self._plans[index]:
                request = {"do": "step", "action": string_of(action)}
                began = time.perf_counter()
                answer, _ = self._program.ask(request, FIRST_DEADLINE_S, "step")
                played.step_s.append(time.perf_counter() - began)
                reward = answer["reward"]
                if answer["ended"]:
                    break
        except EnvError as error:
            played.reason = str(error)
            return played
        played.outcome = "pass" if reward > 0 else "fail"
        return played

    def close(self) -> None:
        """End it."""
        self._program.close()


def name_of(index: int) -> str:
    """Return the task of an episode."""
    return f"miniwob.{PAGES[index % len(PAGES)]}"


def string_of(action: Action) -> str:
    """Return the action in BrowserGym's action set `coord`."""
    if isinstance(action, Click):
        return f"mouse_click({action.x}, {action.y})"
    assert isinstance(action, Type)
    return f"keyboard_type({action.text!r})"


def plan_of(index: int, steps: int, miniwob: Any) -> list[Action]:
    """Return the solution of the episode's instance, or of another one; clicks in pixels of its screenshots."""
    seed = index if index % 2 == 0 else index + 1000
    page = name_of(index).replace("miniwob.", "miniwob/")
    miniwob.reset(
        seed=int(np.random.RandomState(seed).randint(0, 1_000_000)), options={"task": page}
    )
    plan: list[Action] = []
    while len(plan) < steps:
        action = miniwob.oracle_action()
        if isinstance(action, Click):
            x, y = round(action.x * SCALE), round(action.y * SCALE)
            plan.append(action.model_copy(update={"x": x, "y": y}))
        else:
            plan.append(action)
        if miniwob.step(action)[2]:
            break
    return plan


def play(asked: Asked) -> Result:
    """Both sides, and its own with its default delays."""
    suite = load_suite("browsergym")
    check_parts("browsergym", {}, [f"browsergym/{name_of(index)}" for index in range(len(PAGES))])
    miniwob = make_env("miniwob")
    plans = [plan_of(index, asked.steps, miniwob) for index in range(asked.episodes)]
    miniwob.close()
    ours = Adapter(
        make_env("browsergym"),
        lambda index: suite.tasks[f"browsergym/{name_of(index)}"],
        lambda index: index,
        lambda index: plans[index],
    )
    own, default = Own(plans, benchmark_of("miniwob.x").pause_s), Own(plans, None)
    shown = min(len(PAGES), asked.episodes)
    try:
        result = compared(ours, own, asked)
        same = sum(first_screen(ours, index) == screen_of(own, index) for index in range(shown))
        slow = [default.play(index) for index in range(min(DEFAULT_EPISODES, asked.episodes))]
    finally:
        ours.env.close()
        own.close()
        default.close()
    steps, seconds = sum(len(each.step_s) for each in slow), sum(sum(each.step_s) for each in slow)
    result["own_default_steps_per_second"] = round(steps / seconds, 2) if seconds else None
    result |= {"first_screens": shown, "same_first_screens": same}
    return result


def first_screen(ours: Adapter, index: int) -> str:
    """Return a digest of the pixels that ours shows after a reset."""
    options = {"task": ours.task(index)}
    observation, _ = ours.env.reset(seed=ours.seed(index), options=options)
    pixels = np.asarray(Image.open(io.BytesIO(observation.screenshot)).convert("RGB"))
    return hashlib.sha256(pixels.tobytes()).hexdigest()


def screen_of(own: Own, index: int) -> str:
    """Return a digest of the pixels that BrowserGym's own side shows after a reset."""
    own.play(index)
    return own.screen
