"""What a gymnasium environment does not say of itself: its screen, its clicks, its verdict.

GymHooks   a class to derive from
Episode    what the verdict is given from
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bus.errors import NoOracleError
from envs.contract.actions import Action
from envs.contract.base import Verdict


@dataclass
class Episode:
    """One episode as far as it was played."""

    env: Any  # gymnasium's, unwrapped
    observation: Any  # the newest
    info: dict[str, Any]  # of the newest step, or of reset
    rewards: list[float] = field(default_factory=list)  # of each step
    terminated: bool = False  # the environment ended it
    truncated: bool = False  # the environment's limit ended it
    last_action: Action | None = None  # of the policy

    @property
    def total(self) -> float:
        """The sum of the rewards."""
        return sum(self.rewards)


class GymHooks:
    """Derive from it and write `action` and `verdict`; one object is made for each environment.

    `env` is gymnasium's environment without its wrappers. Points of actions are in pixels of what `image` gives.
    """

    env_id: str = ""
    """What gymnasium.make is given, e.g. CartPole-v1, where the suite is named by this class."""
    env_options: Mapping[str, Any] = {"render_mode": "rgb_array"}
    """Keyword arguments of gymnasium.make."""
    tasks: Mapping[str, Mapping[str, Any]] = {"play": {}}
    """Names of tasks -> `options` of the environment's reset."""
    max_steps: int = 50
    """Actions of the policy after which an episode is cut off."""

    def instruction(self, env: Any, observation: Any) -> str:  # noqa: ARG002 - for those who derive
        """Return the goal in words, after a reset."""
        return "Play."

    def image(self, env: Any, observation: Any) -> Any:  # noqa: ARG002
        """Return the screen: an array [height, width, 3] of uint8, or an encoded PNG or JPEG."""
        return env.render()

    def action(self, action: Action, env: Any) -> Any:
        """Return the environment's action for one of the policy's; None where it means nothing: no step is made.

        Not asked for done, fail and answer, which end the episode.
        """
        raise NotImplementedError

    def verdict(self, episode: Episode) -> Verdict:
        """Whether the task is done, from the state; also asked right after reset, when it must not be."""
        raise NotImplementedError

    def oracle(self, env: Any, observation: Any) -> Action:  # noqa: ARG002
        """Return the next action of a solution. Optional: `dart env check` and `dart data collect` play it."""
        raise NoOracleError(f"{type(self).__name__} has no oracle")
