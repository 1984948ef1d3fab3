"""A suite whose solution is a few clicks at pixels that follow from the seed, without a hint in words."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from typing import Any

from PIL import Image

from envs.contract.actions import Action, Click, Scroll, Type
from envs.contract.base import Observation, Task, Verdict

SIDE = 168  # pixels, the tiny model's screen
STEPS = 3


class ShelfEnv:
    """A screen whose colour counts the right actions so far; one wrong action ends the episode."""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Choose the actions by task and seed."""
        task: Task = (options or {})["task"]
        rng = random.Random(f"{task.id}/{seed}")
        clicks = [Click(x=rng.randrange(SIDE), y=rng.randrange(SIDE)) for _ in range(STEPS)]
        last: Mapping[str, Action] = {
            "shelf/sideways": Scroll(x=9, y=9, dx=5, dy=0),
            "shelf/long": Type(text="a long text " * 20),
        }
        self._actions: list[Action] = [*clicks[:-1], last.get(task.id, clicks[-1])]
        self._done = 0
        return self._screen(), {"instruction": "press the places"}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Go on if the action is the next one, else end."""
        is_right = action == self._actions[self._done]
        self._done += is_right
        over = not is_right or self._done == len(self._actions)
        return self._screen(), float(over and is_right), over, False, {}

    def evaluate(self) -> Verdict:
        """Pass after the last action."""
        done = self._done == len(self._actions)
        return Verdict("pass" if done else "fail", f"{self._done} actions were right")

    def oracle_action(self) -> Action:
        """The next action."""
        return self._actions[self._done]

    def close(self) -> None:
        """Nothing to free."""

    def _screen(self) -> Observation:
        encoded = io.BytesIO()
        Image.new("RGB", (SIDE, SIDE), (40 * self._done, 90, 90)).save(encoded, "PNG")
        return Observation(encoded.getvalue(), "image/png", SIDE, SIDE)


class ShelfSuite:
    """Clicks; and two tasks whose last action some action languages or limits do not allow."""

    name = "shelf"
    tasks: Mapping[str, Task] = {
        name: Task(name, "shelf", "press the places", max_steps=STEPS + 1)
        for name in ("shelf/click", "shelf/sideways", "shelf/long")
    }

    def make_env(self) -> ShelfEnv:
        """A fresh environment."""
        return ShelfEnv()
