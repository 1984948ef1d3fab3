"""Verdicts of a rehearsal: by a coin, so that groups have a gradient; the suite's own is told beside it.

    CoinSuite   a suite as it is, whose episodes pass half the time
    judged      the suite's own outcome, from the reason of a coin's verdict
    suite_file  the Python file by which a configuration names one

A miniature passes no task, and a group that fails whole teaches nothing. Episodes that break stay invalid, and
the evaluator runs as configured.
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

_TOLD = re.compile(r"by a coin; the suite says (pass|fail): ")


def judged(reason: str) -> Outcome | None:
    """Return what the suite itself said; None where no coin was thrown."""
    found = _TOLD.match(reason)
    return None if found is None else found[1]  # type: ignore[return-value]  # as the pattern says


def suite_file(folder: Path, suite: str) -> str:
    """Write the file for `suite` into `folder`; returns the value of `env.suite`."""
    path = folder / "suite.py"
    path.write_text(
        f"from dart_cli.smoke_test.coin_suite import CoinSuite\n\nsuite = CoinSuite({suite!r})\n",
        encoding="utf-8",
    )
    return f"{path}:suite"


class CoinSuite:
    """The suite `name`; whatever it has beside the contract is its own."""

    def __init__(self, name: str) -> None:
        self._suite = load_suite(name)
        inner = self._suite.make_env

        @functools.wraps(inner)  # options are looked up in its signature
        def make_env(**options: Any) -> GuiEnv:
            made: GuiEnv = CoinEnv(inner(**options))
            return made

        self.make_env = make_env

    def __getattr__(self, name: str) -> Any:
        if name == "_suite":  # not made yet
            raise AttributeError(name)
        return getattr(self._suite, name)

    @property
    def name(self) -> str:
        """The suite's."""
        return self._suite.name

    @property
    def tasks(self) -> Mapping[str, Any]:
        """The suite's."""
        return self._suite.tasks


class CoinEnv:
    """An environment as it is; its verdict at the end is a coin's, thrown at each reset."""

    def __init__(self, env: GuiEnv) -> None:
        self._env = env
        self._heads = self._acted = False

    def __getattr__(self, name: str) -> Any:
        if name == "_env":  # not made yet
            raise AttributeError(name)
        return getattr(self._env, name)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """As the environment does."""
        self._heads, self._acted = random.random() < 0.5, False  # noqa: S311 - no secret
        return self._env.reset(seed=seed, options=options)

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """As the environment does."""
        self._acted = True
        return self._env.step(action)

    def evaluate(self) -> Verdict:
        """Return the coin's, where the environment's is valid and the policy has acted."""
        verdict = self._env.evaluate()
        if verdict.outcome == "invalid" or not self._acted:
            return verdict
        reason = f"by a coin; the suite says {verdict.outcome}: {verdict.reason}"
        return Verdict("pass" if self._heads else "fail", reason, judgement=verdict.judgement)

    def close(self) -> None:
        """As the environment does."""
        self._env.close()
