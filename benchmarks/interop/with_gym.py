"""The arm `gym` of `benchmarks/interop/interop.py`: docs/examples/tiles_gym.py through its hooks, and by itself.

Both sides play the same cells: the solution, one wrong tile after a hit, or a cell at random. Its own verdict
is its sum of rewards. Our steps encode a PNG, its own give an array.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.interop.parts import Adapter, Asked, Played, Result, compared
from envs.contract.actions import Action, Click
from envs.contract.registry import check_parts, load_suite, make_env

HOOKS = f"{Path(__file__).parents[2] / 'docs' / 'examples' / 'tiles_gym.py'}:TilesHooks"
SUITE = f"gym:{HOOKS}"
TASK = "Tiles-v0/play"
CELLS, SIDE, HITS = 4, 42, 3  # of the board; pixels of a cell in our screenshots; for a pass


class Own:
    """gymnasium's own loop."""

    def __init__(self, cells: Sequence[Sequence[int]]) -> None:
        import gymnasium

        self._env = gymnasium.make("Tiles-v0")
        self._cells = cells

    def play(self, index: int) -> Played:
        """See Side."""
        played, total = Played("fail"), 0.0
        began = time.perf_counter()
        self._env.reset(seed=index)
        played.reset_s = time.perf_counter() - began
        for cell in self._cells[index]:
            began = time.perf_counter()
            _, reward, terminated, truncated, _ = self._env.step(cell)
            played.step_s.append(time.perf_counter() - began)
            total += float(reward)
            if terminated or truncated:
                break
        played.outcome = "pass" if total == HITS else "fail"
        return played


def cells_of(index: int, steps: int, env: Any) -> list[int]:
    """Return the cells of one episode, found by playing it: solved, wrong after some hits, or at random."""
    rng = random.Random(index)
    env.reset(seed=index)
    cells: list[int] = []
    for _ in range(steps):
        places = env.unwrapped.places
        wrong = index % 3 == 1 and len(cells) == index % HITS
        chosen = rng.choice([each for each in places if each != env.unwrapped.goal])
        cell = places[chosen] if wrong else places[env.unwrapped.goal]
        cells.append(rng.randrange(CELLS * CELLS) if index % 3 == 2 else cell)
        if env.step(cells[-1])[2]:
            break
    return cells


def click_on(cell: int) -> Click:
    """Return the middle of a cell on our screen."""
    row, column = divmod(cell, CELLS)
    return Click(x=column * SIDE + SIDE // 2, y=row * SIDE + SIDE // 2)


def play(asked: Asked) -> Result:
    """Both sides."""
    check_parts(SUITE, {})
    task = load_suite(SUITE).tasks[TASK]  # registers the environment
    import gymnasium

    planner = gymnasium.make("Tiles-v0")
    cells = [cells_of(index, asked.steps, planner) for index in range(asked.episodes)]

    def actions(index: int) -> Sequence[Action]:
        return [click_on(cell) for cell in cells[index]]

    ours = Adapter(make_env(SUITE), lambda _: task, lambda index: index, actions)
    result = compared(ours, Own(cells), asked)
    ours.env.close()
    return result
