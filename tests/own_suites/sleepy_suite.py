"""A suite whose evaluator sleeps: any action ends the episode, and no verdict comes."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from typing import Any

from PIL import Image

from envs.contract.actions import Action
from envs.contract.base import Observation, Task, Verdict

SIDE = 56  # pixels


class SleepyEnv:
    """A black screen."""

    def reset(
        self,
        *,
        seed: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Observation, dict[str, Any]]:
        """The same screen for every seed."""
        encoded = io.BytesIO()
        Image.new("RGB", (SIDE, SIDE)).save(encoded, "PNG")
        self._screen = Observation(encoded.getvalue(), "image/png", SIDE, SIDE)
        return self._screen, {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Any action ends the episode."""
        return self._screen, 0.0, True, False, {}

    def evaluate(self) -> Verdict:
        """Sleeps forever."""
        threading.Event().wait()
        raise AssertionError("it is never woken")

    def close(self) -> None:
        """Nothing to free."""


class SleepySuite:
    """One task."""

    name = "sleepy"
    tasks: Mapping[str, Task] = {"sleepy/task": Task("sleepy/task", "sleepy", "click", max_steps=1)}

    def make_env(self) -> SleepyEnv:
        """A fresh environment."""
        return SleepyEnv()
