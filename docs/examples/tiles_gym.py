"""A pixel game for gymnasium, and the hooks that make it a suite: hit the named tile three times.

`dart up docs/examples/tiles.toml` trains the tiny model on it (docs/environments/gym.md).
"""

import gymnasium
import numpy as np

from envs import Click, Verdict
from envs.suites.gym.hooks import GymHooks

COLOURS = {"red": (220, 40, 40), "green": (30, 160, 60), "blue": (40, 80, 220)}
CELLS = 4  # a side
PIXELS = 21  # a side of a cell
HITS = 3


class Tiles(gymnasium.Env):
    """Three tiles on a board of 16 cells. A hit moves all of them; the wrong tile ends the game."""

    observation_space = gymnasium.spaces.Box(0, 255, (CELLS * PIXELS, CELLS * PIXELS, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(CELLS * CELLS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal = str(self.np_random.choice(list(COLOURS)))
        self.hits = 0
        self._deal()
        return self._board(), {}

    def step(self, cell):
        hit = next((name for name, at in self.places.items() if at == cell), None)
        if hit == self.goal:
            self.hits += 1
            self._deal()
        terminated = hit not in (None, self.goal) or self.hits == HITS
        return self._board(), float(hit == self.goal), terminated, False, {}

    def _deal(self):
        cells = self.np_random.choice(CELLS * CELLS, len(COLOURS), replace=False)
        self.places = dict(zip(COLOURS, map(int, cells), strict=True))

    def _board(self):
        board = np.full((CELLS * PIXELS, CELLS * PIXELS, 3), 255, np.uint8)
        for name, cell in self.places.items():
            top, left = cell // CELLS * PIXELS, cell % CELLS * PIXELS
            board[top + 2 : top + PIXELS - 2, left + 2 : left + PIXELS - 2] = COLOURS[name]
        return board


gymnasium.register("Tiles-v0", entry_point=Tiles)


class TilesHooks(GymHooks):
    """Hooks for screens of 168x168 and clicks on cells; three hits are a pass."""

    env_id = "Tiles-v0"
    env_options = {}  # no render_mode: its observations are the pixels
    max_steps = 5

    def instruction(self, env, observation):
        return f"click the {env.goal} button"

    def image(self, env, observation):
        return observation.repeat(2, axis=0).repeat(2, axis=1)

    def action(self, action, env):
        if not isinstance(action, Click):
            return None  # any other action does nothing
        side = 2 * PIXELS
        return min(action.y // side, CELLS - 1) * CELLS + min(action.x // side, CELLS - 1)

    def verdict(self, episode):
        hits = episode.env.hits
        return Verdict("pass" if hits == HITS else "fail", f"{hits} of {HITS} hits", hits / HITS)

    def oracle(self, env, observation):
        row, column = divmod(env.places[env.goal], CELLS)
        return Click(x=(2 * column + 1) * PIXELS, y=(2 * row + 1) * PIXELS)
