"""A suite that any policy passes half the time: a model without skill gives mixed groups."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from typing import Any

from PIL import Image

from envs.contract.actions import Action
from envs.contract.base import Observation, Task, Verdict

SIDE = 168  # pixels, the tiny model's screen


class CoinEnv:
    """A plain screen and a coin thrown at reset; heads passes, whatever is done or not."""

    evaluate_acts = True  # else heads would be a task that is true at reset

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Throw the coin; the seed only tints the screen."""
        self._heads = random.random() < 0.5
        screen = Image.new("RGB", (SIDE, SIDE), (seed or 0) % 2**24)
        encoded = io.BytesIO()
        screen.save(encoded, "PNG")
        self._screen = Observation(encoded.getvalue(), "image/png", SIDE, SIDE)
        return self._screen, {"instruction": "click the red button"}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Any action ends the episode."""
        return self._screen, float(self._heads), True, False, {}

    def evaluate(self) -> Verdict:
        """What the coin says."""
        return Verdict("pass" if self._heads else "fail", "heads" if self._heads else "tails")

    def close(self) -> None:
        """Nothing to free."""


class CoinSuite:
    """One task to train on, one held out."""

    name = "coin"
    tasks: Mapping[str, Task] = {
        "coin/throw": Task("coin/throw", "coin", "click the red button", max_steps=1),
        "coin/again": Task(
            "coin/again", "coin", "click the red button", max_steps=1, split="heldout"
        ),
    }

    def make_env(self) -> CoinEnv:
        """A fresh environment."""
        return CoinEnv()
