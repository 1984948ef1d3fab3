"""A suite whose verdicts are decided by a coin, so that groups have a gradient.

    CoinSuite       another suite, unchanged except that half of its episodes pass
    suite_outcome   reads the suite's own outcome from the reason of a coin's verdict
    suite_file      writes the Python file by which a configuration names a CoinSuite

The miniature model passes no task, and a group whose episodes all fail has no gradient. The suite's evaluator
still runs as configured, and an episode that breaks stays invalid.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bus.messages import Outcome
from envs.contract.actions import Action
from envs.contract.base import GuiEnv, Observation, Verdict
from envs.contract.registry import load_suite

_REASON = re.compile(r"by a coin; the suite says (pass|fail): ")


def suite_outcome(reason: str) -> Outcome | None:
    """Return the outcome that the suite itself gave; None if no coin was tossed."""
    match = _REASON.match(reason)
    return None if match is None else match[1]  # type: ignore[return-value]  # as the pattern says


def suite_file(folder: Path, suite: str) -> str:
    """Write the file for `suite` into `folder`, and return the value for `env.suite` that names it."""
    path = folder / "suite.py"
    path.write_text(
        f"from dart_cli.smoke_test.coin_suite import CoinSuite\n\nsuite = CoinSuite({suite!r})\n",
        encoding="utf-8",
    )
    return f"{path}:suite"


class CoinSuite:
    """The suite `name`, except that a coin decides its verdicts. All other attributes are the suite's."""

    def __init__(self, name: str) -> None:
        self._suite = load_suite(name)
        inner = self._suite.make_env

        @functools.wraps(inner)  # the options of the suite are read from its signature
        def make_env(**options: Any) -> GuiEnv:
            env: GuiEnv = CoinEnv(inner(**options))
            return env

        self.make_env = make_env

    def __getattr__(self, name: str) -> Any:
        if name == "_suite":  # __init__ has not set it yet
            raise AttributeError(name)
        return getattr(self._suite, name)

    @property
    def name(self) -> str:
        """The name of the suite."""
        return self._suite.name

    @property
    def tasks(self) -> Mapping[str, Any]:
        """The tasks of the suite by id."""
        return self._suite.tasks


class CoinEnv:
    """An environment that is unchanged, except that a coin decides the final verdict.

    The coin is tossed at each reset.
    """

    def __init__(self, env: GuiEnv) -> None:
        self._env = env
        self._heads = self._acted = False

    def __getattr__(self, name: str) -> Any:
        if name == "_env":  # __init__ has not set it yet
            raise AttributeError(name)
        return getattr(self._env, name)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Toss the coin, and reset the environment."""
        self._heads, self._acted = random.random() < 0.5, False  # noqa: S311 - no secret
        return self._env.reset(seed=seed, options=options)

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform an action in the environment."""
        self._acted = True
        return self._env.step(action)

    def evaluate(self) -> Verdict:
        """Return the coin's verdict if the policy has acted and the environment's own verdict is valid."""
        verdict = self._env.evaluate()
        if verdict.outcome == "invalid" or not self._acted:
            return verdict
        reason = f"by a coin; the suite says {verdict.outcome}: {verdict.reason}"
        return Verdict("pass" if self._heads else "fail", reason, judgement=verdict.judgement)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
