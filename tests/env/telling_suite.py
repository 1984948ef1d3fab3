"""A suite whose environments have a text beside each screenshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from envs.contract.actions import Action
from envs.contract.base import Observation, ObservedKind, Task, Verdict
from tests.env.unruly_suite import SCREEN


class TellingSuite:
    name = "telling"
    tasks: ClassVar = {"telling/one": Task("telling/one", "telling", "wait", max_steps=2)}
    observes = ("accessibility", "terminal")

    def make_env(self, *, observe: Sequence[ObservedKind] = ()) -> TellingEnv:
        return TellingEnv(observe)


class TellingEnv:
    def __init__(self, observe: Sequence[ObservedKind]) -> None:
        self._observe = observe

    def _look(self) -> Observation:
        size = SCREEN.width, SCREEN.height
        texts = {kind: f"told: {kind} ä" for kind in self._observe}
        return Observation(SCREEN.screenshot, SCREEN.media_type, *size, texts)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        return self._look(), {"instruction": "wait"}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        return self._look(), 0.0, False, False, {}

    def evaluate(self) -> Verdict:
        return Verdict("fail", "nothing was done")

    def close(self) -> None:
        """Nothing is open."""
