"""An explorer's view of an environment without a tree: cells to click, and a key of the picture.

make_explorable an environment of a suite, and what tells its elements
as_explorable   the environment itself where it is Explorable, else with a GridEnv around it
grid_state      the state of a screen that is known by its picture alone
coarse_key      a digest of light and dark in a coarse picture, by which it is known
GridEnv         the environment, with the cells of a grid as elements
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

from PIL import Image

from bus.errors import EnvError
from envs.actions import Action
from envs.base import GuiEnv, Observation, Verdict
from envs.elements import Element, Explorable, ScreenState, grid_elements
from envs.registry import load_suite, make_env

COARSE = 24
"""Cells of a coarse picture, across and down."""

STEP = 6
"""Least difference in grey of two neighbouring cells that counts, of 255."""


def make_explorable(suite: str, **options: object) -> tuple[GuiEnv, Explorable]:
    """An environment that plays `suite`, and what tells its elements; see envs.registry.make_env.

    A suite whose tree is its text `accessibility` is asked for it. Raises TaskError.
    """
    told = "accessibility" in getattr(load_suite(suite), "observes", ())
    return as_explorable(make_env(suite, observe=("accessibility",) if told else (), **options))


def as_explorable(env: GuiEnv) -> tuple[GuiEnv, Explorable]:
    """The environment to play, and what tells its elements; the same object twice."""
    if isinstance(env, Explorable):
        return env, env
    grid = GridEnv(env)
    return grid, grid


def grid_state(shown: Observation) -> ScreenState:
    """By the suite's own key of the screen, where it gives one; else by a coarse picture."""
    if shown.screen_key:
        return ScreenState(shown.screen_key, "", "no tree; the environment's own key of the screen")
    with Image.open(io.BytesIO(shown.screenshot)) as picture:
        key = coarse_key(picture)
    return ScreenState(key, "", f"no tree; light and dark of {COARSE}x{COARSE} cells compared")


def coarse_key(screen: Image.Image) -> str:
    """32 hex digits: the same for two screens whose neighbouring cells are lighter or darker alike.

    A difference hash: of each cell and the next on its right, whether it is darker, lighter or neither.
    """
    import numpy as np  # only where it is needed

    small = screen.convert("L").resize((COARSE + 1, COARSE), Image.Resampling.BOX)
    cells = np.asarray(small, dtype=np.int16)
    steps = cells[:, 1:] - cells[:, :-1]
    signs = (np.sign(steps) * (np.abs(steps) >= STEP)).astype(np.int8)
    return hashlib.blake2b(signs.tobytes(), digest_size=16).hexdigest()


class GridEnv:
    """Plays `env`; its elements are cells, its states coarse pictures. See envs.base.GuiEnv."""

    def __init__(self, env: GuiEnv, *, columns: int = 12, rows: int = 8) -> None:
        self.env = env
        self.columns = columns
        self.rows = rows
        self._shown: Observation | None = None

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """As `env` does."""
        self._shown, info = self.env.reset(seed=seed, options=options)
        return self._shown, info

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """As `env` does."""
        self._shown, reward, terminated, truncated, info = self.env.step(action)
        return self._shown, reward, terminated, truncated, info

    def evaluate(self) -> Verdict:
        """As `env` does."""
        return self.env.evaluate()

    def close(self) -> None:
        """As `env` does."""
        self._shown = None
        self.env.close()

    def elements(self) -> list[Element]:
        """The cells of the grid, and the screen to scroll."""
        shown = self._last()
        return grid_elements(shown.width, shown.height, columns=self.columns, rows=self.rows)

    def state(self) -> ScreenState:
        """By the suite's own key of the screen, where it gives one; else by a coarse picture."""
        return grid_state(self._last())

    def _last(self) -> Observation:
        if self._shown is None:
            raise EnvError("no episode is being played; call reset first")
        return self._shown
