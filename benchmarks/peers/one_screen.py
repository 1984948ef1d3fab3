"""A task of one step, for peers that play no more: the first screen of docs/examples/guests_env.py."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from envs.contract.base import Task

_guests: Any = import_module("docs.examples.guests_env")  # an example for users has no types


class OneScreenEnv(_guests.GuestsEnv):  # type: ignore[misc]
    """A list of guests on which one click ends the episode; it passes if it hits the named guest."""

    def step(self, action: Any) -> tuple[Any, ...]:
        """Do as the guest list, without its dialog."""
        look, _, _, truncated, info = super().step(action)
        self.removed = self.candidate
        terminated = self.candidate is not None
        reward = float(self.evaluate().outcome == "pass")
        return look, reward, terminated, truncated, info


class OneScreenSuite:
    """The suite that `env.suite` names."""

    name = "guests"
    tasks: ClassVar[dict[str, Task]] = {
        "guests/remove": Task("guests/remove", name, 'remove "{name}"', max_steps=1)
    }

    def make_env(self) -> OneScreenEnv:
        """Return a new list of guests."""
        return OneScreenEnv()
