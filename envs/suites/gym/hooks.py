"""The parts that a gymnasium environment lacks: its screen, the meaning of clicks, its verdict.

GymHooks   the base class of a user's hooks
Episode    the episode so far, from which the hooks give a verdict
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
    """An episode so far."""

    env: Any  # gymnasium's environment, unwrapped
    observation: Any  # the newest one
    info: dict[str, Any]  # of the newest step, or of reset
    rewards: list[float] = field(default_factory=list)  # one for each step
    terminated: bool = False  # the environment ended it
    truncated: bool = False  # the environment's limit ended it
    last_action: Action | None = None  # of the policy

    @property
    def total(self) -> float:
        """The sum of the rewards."""
        return sum(self.rewards)


class GymHooks:
    """The base class of hooks: a subclass defines `action` and `verdict`.

    Each environment has its own hooks object. In the methods, `env` is gymnasium's environment without its
    wrappers. Points of actions are in pixels of the image of `image`.
    """

    env_id: str = ""
    """The id for gymnasium.make, e.g. CartPole-v1; needed if the suite is named by this class."""
    env_options: Mapping[str, Any] = {"render_mode": "rgb_array"}
    """Keyword arguments of gymnasium.make."""
    tasks: Mapping[str, Mapping[str, Any]] = {"play": {}}
    """Name of a task -> `options` for the environment's reset."""
    max_steps: int = 50
    """Actions of the policy after which an episode is cut off."""

    def instruction(self, env: Any, observation: Any) -> str:  # noqa: ARG002 - for subclasses
        """Return the goal in words. It is called after a reset."""
        return "Play."

    def image(self, env: Any, observation: Any) -> Any:  # noqa: ARG002
        """Return the screen: an array [height, width, 3] of uint8, or an encoded PNG or JPEG."""
        return env.render()

    def action(self, action: Action, env: Any) -> Any:
        """Return the environment's action for an action of the policy; None if no step is to be made.

        It is not called for done, fail and answer, which end the episode.
        """
        raise NotImplementedError

    def verdict(self, episode: Episode) -> Verdict:
        """Return the verdict on the present state.

        It is also called right after reset, when it must not be a pass.
        """
        raise NotImplementedError

    def oracle(self, env: Any, observation: Any) -> Action:  # noqa: ARG002
        """Return the next action of a solution.

        Optional: `dart env check` and `dart data collect` play it.
        """
        raise NoOracleError(f"{type(self).__name__} has no oracle")
