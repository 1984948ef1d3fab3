"""TimedEnv: takes a GUI's time, shows something new at every step, and draws its verdict.

Actions change nothing. An episode ends by itself at a length drawn at its reset; each task has its
own pass probability, so that groups are nearly always mixed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.simulation.profiles import PROFILES, Profile, profile_named
from benchmarks.simulation.screens import screenshot
from benchmarks.simulation.times import read_times
from bus.errors import EnvError, TaskError
from envs.contract.actions import Action, Answer, Done, Fail
from envs.contract.base import Observation, Task, Verdict, task_of
from envs.contract.options import read_size
from envs.contract.screenshots import MEDIA_TYPES

TASKS = 32
LEAST_PASS, MOST_PASS = 0.2, 0.8
"""Success probability of the hardest and of the easiest task."""

SLOW_RESET = 10.0
"""A reset with an injected fault takes this many times as long."""

MIN_SIDE, MAX_SIDE = 128, 4096  # pixels


@dataclass(frozen=True)
class _EpisodePlan:
    """The random draws of an episode, made when it begins."""

    task: Task
    steps: int  # after which it ends
    passes: bool
    crash_at: int  # step at which the GUI breaks; 0 for never
    slow_reset: bool
    scene: int  # the desktop it shows


class TimedEnv:
    """An environment of suite `timed`; envs.contract.base.GuiEnv has the contract.

    Sleeps in the calling thread. Durations follow from `stream` and the number of the episode, not
    from the task's seed alone: the members of a group differ.
    """

    def __init__(
        self,
        tasks: Mapping[str, Task],
        profile: Profile,
        *,
        speedup: float,
        fault_rate: float,
        size: tuple[int, int],
        stream: str,
    ) -> None:
        self._tasks = tasks
        self._profile = profile
        self._speedup = speedup
        self._fault_rate = fault_rate
        self._size = size
        self._stream = stream
        self._number = 0  # of episodes begun
        self._rng = Random(stream)
        self._episode: _EpisodePlan | None = None
        self._steps = 0
        self._is_over = True

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start `options["task"]`, a Task of this suite or its id, after a reset's time."""
        task = task_of(options, self._tasks, TimedSuite.name)
        self._number += 1
        self._rng = Random(f"{self._stream}/{self._number}/{task.id}/{seed}")
        self._episode = self._draw(task)
        self._steps, self._is_over = 0, False
        times = SLOW_RESET if self._episode.slow_reset else 1.0
        self._sleep(times * self._profile.draw_reset_s(self._rng))
        info = {"instruction": task.instruction, "max_steps": self._profile.cap}
        return self._observe(), info

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take a step's time. Raises EnvError if this episode crashes, or is over."""
        episode = self._playing()
        if self._is_over:
            raise EnvError("the episode is over; call reset before the next step")
        self._steps += 1
        self._sleep(self._profile.draw_step_s(self._rng))
        if self._steps == episode.crash_at:
            self._episode = None
            raise EnvError(f"{episode.task.id}: the GUI crashed at step {self._steps} (injected)")
        self._is_over = self._steps >= episode.steps or isinstance(action, Done | Fail | Answer)
        reward = (self.evaluate().reward or 0.0) if self._is_over else 0.0
        return self._observe(), reward, self._is_over, False, {"steps": self._steps}

    def evaluate(self) -> Verdict:
        """Return a pass if the episode was drawn to pass and has reached its end."""
        episode = self._playing()
        if self._steps < episode.steps:
            return Verdict("fail", f"ended after {self._steps} of {episode.steps} steps")
        return Verdict("pass" if episode.passes else "fail", "drawn")

    def close(self) -> None:
        """Do nothing: nothing outlives the object. May be called twice."""
        self._episode = None

    def _draw(self, task: Task) -> _EpisodePlan:
        rng = self._rng
        steps = self._profile.draw_steps(rng)
        faulty, crashes = rng.random() < self._fault_rate, rng.random() < 0.5
        return _EpisodePlan(
            task,
            steps,
            passes=rng.random() < task.params["pass"],
            crash_at=rng.randint(1, steps) if faulty and crashes else 0,
            slow_reset=faulty and not crashes,
            scene=rng.getrandbits(16),
        )

    def _observe(self) -> Observation:
        width, height = self._size
        episode = self._playing()
        blob = screenshot(episode.scene, self._rng.getrandbits(64), width, height)
        return Observation(blob, MEDIA_TYPES["png"], width, height)

    def _sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds / self._speedup)

    def _playing(self) -> _EpisodePlan:
        if self._episode is None:
            raise EnvError("no episode is being played; call reset first")
        return self._episode


class TimedSuite:
    """A suite of tasks `timed/000` to `timed/031`, from the hardest to the easiest by `params["pass"]`."""

    name = "timed"

    def __init__(self) -> None:
        self.tasks: Mapping[str, Task] = {task.id: task for task in map(_task, range(TASKS))}
        self._numbers = itertools.count()

    def make_env(
        self,
        *,
        profile: str = "osworld",
        fault_rate: float = 0.0,
        size: Sequence[int] | str = (448, 336),
        seed: int | None = None,
        **times: object,
    ) -> TimedEnv:
        """Return an environment with the durations of `profile`, divided by the speed-up of `times`.

        The other times (times.py) are the engine's and the learner's.

        `fault_rate` is the share of episodes that suffer a fault: half crash at some step, half
        have a reset that is `SLOW_RESET` times as long. With a `seed` all draws repeat in every
        process, in the order in which it makes its environments; without one they never do, so that
        two processes of one run differ. Raises TaskError.
        """
        width, height = read_size(size)
        if not (MIN_SIDE <= width <= MAX_SIDE and MIN_SIDE <= height <= MAX_SIDE):
            raise TaskError(
                f"size must be {MIN_SIDE} to {MAX_SIDE} pixels a side, got {width}x{height}"
            )
        if not 0 <= fault_rate <= 1:
            raise TaskError(f"fault_rate must be 0 to 1, got {fault_rate:g}")
        profile_times = profile_named(profile)
        fresh = Random().getrandbits(64) if seed is None else seed
        return TimedEnv(
            self.tasks,
            profile_times,
            speedup=read_times(times).speedup,
            fault_rate=fault_rate,
            size=(width, height),
            stream=f"{fresh}/{next(self._numbers)}",
        )


def _task(index: int) -> Task:
    share = LEAST_PASS + (MOST_PASS - LEAST_PASS) * index / (TASKS - 1)
    return Task(
        f"timed/{index:03d}",
        TimedSuite.name,
        f"Do task {index} on this desktop.",
        max_steps=max(profile.cap for profile in PROFILES.values()),
        params={"pass": share},
    )
