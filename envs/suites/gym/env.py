"""One environment of gymnasium behind the contract of envs/contract/base.py.

GymEnv     the environment
GymSuite   the suite `gym:ENV_ID`, with hooks by env.options.hooks, or `gym:file.py:MyHooks`
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from bus.errors import DartError, EnvError, MissingPartError, TaskError
from envs.contract.actions import Action, Answer, Done, Fail
from envs.contract.base import Observation, Task, Verdict, task_of
from envs.contract.blobs import image_type
from envs.contract.options import checked
from envs.contract.own_code import load_own
from envs.contract.screenshots import seen_size
from envs.suites.gym.hooks import Episode, GymHooks


class GymEnv:
    """Plays an environment of gymnasium. See envs.contract.base.GuiEnv for the contract.

    An error in gymnasium's environment or in a hook becomes an EnvError that names the place; the next
    reset makes a new environment.
    """

    def __init__(self, name: str, tasks: Mapping[str, Task], env_id: str, hooks: GymHooks) -> None:
        self._name = name  # of the suite
        self._tasks = tasks
        self._env_id = env_id
        self._hooks = hooks
        self._gym_env: Any = None
        self._episode: Episode | None = None
        self._steps_left = 0  # actions of the policy
        self._over = True
        self._closed = False

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start `options["task"]`, a Task of this suite or its id."""
        if self._closed:
            raise EnvError("the environment is closed")
        task = task_of(options, self._tasks, self._name)
        self._episode, self._over = None, True
        hooks, task_options = self._hooks, dict(self._hooks.tasks[task.params["name"]])
        with self._errors_named("reset"):
            if self._gym_env is None:
                self._gym_env = import_gymnasium().make(self._env_id, **hooks.env_options)
            observation, info = self._gym_env.reset(seed=seed, options=task_options or None)
        self._episode = Episode(self._gym_env.unwrapped, observation, dict(info))
        self._over = False
        free = (options or {}).get("free", False)
        self._steps_left = -1 if free else hooks.max_steps
        with self._errors_named("hook instruction"):
            instruction = hooks.instruction(self._episode.env, observation)
        return self._observation(), {"instruction": instruction, "max_steps": hooks.max_steps}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform the action that the hook returns for `action`; do nothing if it returns None."""
        episode = self._playing()
        if self._over:
            raise EnvError("the episode is over; call reset before the next step")
        episode.last_action = action
        reward, gym_action = 0.0, None
        if not isinstance(action, Done | Fail | Answer):
            with self._errors_named("hook action"):
                gym_action = self._hooks.action(action, episode.env)
        if gym_action is not None:
            with self._errors_named("step"):
                observation, reward, terminated, truncated, info = self._gym_env.step(gym_action)
                reward = float(reward)
            episode.observation, episode.info = observation, dict(info)
            episode.terminated, episode.truncated = bool(terminated), bool(truncated)
            episode.rewards.append(reward)
        ends = episode.terminated or isinstance(action, Done | Fail | Answer)
        self._steps_left -= 1
        truncated = episode.truncated or self._steps_left == 0
        self._over = ends or truncated
        info = {"did_nothing": gym_action is None}
        return self._observation(), reward, ends, truncated, info

    def evaluate(self) -> Verdict:
        """Return the verdict of the hook."""
        episode = self._playing()
        with self._errors_named("hook verdict"):
            verdict = self._hooks.verdict(episode)
            if not isinstance(verdict, Verdict):
                raise TypeError(f"wants a Verdict, got {verdict!r:.80}")
        return verdict

    def oracle_action(self) -> Action:
        """Return the next action of a solution from the hook. Raises NoOracleError if it has none."""
        episode = self._playing()
        with self._errors_named("hook oracle"):
            return self._hooks.oracle(episode.env, episode.observation)

    def close(self) -> None:
        """Close the environment; may be called twice."""
        self._closed = True
        self._drop()

    def _playing(self) -> Episode:
        if self._episode is None:
            raise EnvError("no episode is being played; call reset first")
        return self._episode

    def _drop(self) -> None:
        gym_env, self._gym_env, self._episode = self._gym_env, None, None
        if gym_env is not None:
            with suppress(Exception):
                gym_env.close()

    @contextmanager
    def _errors_named(self, what: str) -> Iterator[None]:
        """Turn an error inside into an EnvError that names `what`; a DartError is passed on."""
        try:
            yield
        except DartError:
            raise
        except Exception as error:
            self._drop()
            message = " ".join(str(error).split())[:300]
            raise EnvError(f"{self._name}: {what}: {type(error).__name__}: {message}") from error

    def _observation(self) -> Observation:
        episode = self._playing()
        with self._errors_named("hook image"):
            image = self._hooks.image(episode.env, episode.observation)
            if isinstance(image, bytes):
                media_type = image_type(image)
                if media_type is None:
                    raise TypeError("its bytes are no PNG, JPEG or WebP")
                with Image.open(io.BytesIO(image)) as opened:
                    return Observation(image, media_type, *seen_size(opened))
            pixels = np.asarray(image)
            if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
                raise TypeError(
                    f"wants uint8 [height, width, 3], got {pixels.dtype} {list(pixels.shape)}"
                )
            png = io.BytesIO()
            Image.fromarray(pixels).save(png, "PNG", compress_level=1)
            return Observation(png.getvalue(), "image/png", pixels.shape[1], pixels.shape[0])


def check_id(env_id: str) -> None:
    """Raise TaskError if gymnasium has no such environment. Imports the module that the id names."""
    gymnasium = import_gymnasium()
    try:
        gymnasium.spec(env_id)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise TaskError(
            f"gymnasium has no environment {env_id!r}: {' '.join(str(error).split())}; register it in "
            "the file of the hooks, or name the package that does: gym:my_package:MyEnv-v0"
        ) from None


def import_gymnasium() -> Any:
    """Return the package gymnasium. Raises MissingPartError with the install step."""
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        raise MissingPartError(
            f"suite gym needs the package {error.name}: pip install -e '.[gym]' in dart's folder"
        ) from None
    return gymnasium


_VERSION = re.compile(r"-v[0-9]+$")
MOST_STEPS = 1000
"""Step limit of tasks whose hooks an option names, since the tasks are made before the options are known."""


class GymSuite:
    """The suite of one environment of gymnasium.

    `of` is an id such as CartPole-v1 or ale_py:ALE/Pong-v5; then the option `hooks` names the hooks. Or it
    is the hooks, which name their environment: file.py:MyHooks or my_package.my_module:MyHooks.
    """

    def __init__(self, of: str) -> None:
        self.name = f"gym:{of}"
        self._hooks_path = of if ":" in of and not _VERSION.search(of) else ""
        if self._hooks_path:
            hooks = _hooks_of(self._hooks_path)
            self._env_id = hooks().env_id
            if not self._env_id:
                raise TaskError(f"suite {self.name}: its env_id is empty, set it to gymnasium's id")
            names, most = list(hooks.tasks), hooks.max_steps
        else:
            if not of:
                raise TaskError("suite gym: name an environment, e.g. gym:CartPole-v1")
            self._env_id, names, most = of, ["play"], MOST_STEPS
        self.tasks: Mapping[str, Task] = {
            task_id: Task(
                task_id, self.name, "{instruction}", max_steps=most, params={"name": name}
            )
            for name in names
            for task_id in [f"{_short(self._env_id)}/{name}"]
        }

    @checked
    def make_env(self, *, hooks: str = "") -> GymEnv:
        """Return a new environment, whose first reset makes gymnasium's environment.

        `hooks` names the class of hooks, e.g. file.py:MyHooks. Raises TaskError if the hooks cannot be loaded
        or lack a part.
        """
        if self._hooks_path and hooks:
            raise TaskError(f"suite {self.name} names its hooks; leave env.options.hooks out")
        if not (self._hooks_path or hooks):
            raise TaskError(
                f'suite {self.name} needs hooks: set env.options.hooks = "file.py:MyHooks" '
                "(docs/environments/gym.md)"
            )
        import_gymnasium()
        instance = _hooks_of(self._hooks_path or hooks)()
        if "play" not in instance.tasks and not self._hooks_path:
            raise TaskError(f"hooks {hooks} have tasks: name the suite gym:{hooks}")
        check_id(self._env_id)
        return GymEnv(self.name, self.tasks, self._env_id, instance)

    def check_parts(self, **_: object) -> None:
        """Raise MissingPartError if gymnasium is not installed."""
        import_gymnasium()


@lru_cache(maxsize=64)
def _hooks_of(path: str) -> type[GymHooks]:
    """Return the class of hooks at `path`.

    Its file runs once, since it may register environments. Raises TaskError.
    """
    import_gymnasium()
    hooks = load_own("hooks", path, path, once=True)
    if not isinstance(hooks, GymHooks):
        raise TaskError(f"hooks {path}: derive it from envs.suites.gym.hooks.GymHooks")
    for name in ("action", "verdict"):
        if getattr(type(hooks), name) is getattr(GymHooks, name):
            raise TaskError(f"hooks {path}: it needs a method {name}")
    if not (isinstance(hooks.max_steps, int) and 1 <= hooks.max_steps <= MOST_STEPS):
        raise TaskError(f"hooks {path}: max_steps must be 1 to {MOST_STEPS}, got {hooks.max_steps}")
    return type(hooks)


def _short(env_id: str) -> str:
    """Return an id without the module that registers it and without slashes, for the ids of tasks."""
    return env_id.rpartition(":")[2].replace("/", "-")
