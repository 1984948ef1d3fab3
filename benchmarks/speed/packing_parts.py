"""Parts of benchmarks/speed/packing.py: episodes as long as asked for, whatever a random model writes.

AnyClick   an action parser in which every text is an action
LongDesk   suite `desk` with its oracle at the mouse, one task after another
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from dart_cli.config.schema import Config
from dart_cli.config.task_split import trained_tasks
from dart_cli.language.coordinates import CoordinateMap
from envs.contract.actions import Action, ActionError, Click
from envs.contract.base import Observation, Verdict
from envs.contract.registry import make_env


class AnyClick:
    """An action parser in which every text is a click; the text seeds its place."""

    limits: Mapping[str, str] = {}

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        """See Action parser."""
        rng = Random(text)
        return Click(x=rng.randrange(coordinates.width), y=rng.randrange(coordinates.height))

    def format(self, action: Action, coordinates: CoordinateMap, thought: str = "") -> str:  # noqa: ARG002
        """See Action parser."""
        raise ActionError("no text is known to mean this")

    def as_history(self, text: str) -> str:
        """See Action parser."""
        return text


class LongDesk:
    """A GuiEnv whose screens change at each step, since it does what the oracle would do.

    Where a task ends, the next one begins, so an episode lasts as long as its lease lets it.
    """

    def __init__(self, config: Config) -> None:
        self._env: Any = make_env(config.env.suite, **config.env.options)
        self._tasks = trained_tasks(config)
        self._seed = self._episodes = 0

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[Observation, dict[str, Any]]:
        """See GuiEnv."""
        self._seed, self._episodes = seed, 0
        first: tuple[Observation, dict[str, Any]] = self._env.reset(seed=seed, options=options)
        return first

    def step(self, _: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Do the oracle's action in place of the given one; see GuiEnv."""
        observation, _reward, terminated, truncated, info = self._env.step(
            self._env.oracle_action()
        )
        if terminated or truncated:
            self._episodes += 1
            task = self._tasks[(self._seed + self._episodes) % len(self._tasks)]
            observation, info = self._env.reset(seed=self._seed, options={"task": task})
        return observation, 0.0, False, False, info

    def evaluate(self) -> Verdict:
        """Return a failure: no task has this as its goal."""
        return Verdict("fail", "no task is the one")
