"""GymSuite: `gym:ENV_ID` with env.options.hooks, or `gym:file.py:MyHooks`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from bus.errors import TaskError
from envs.base import Task
from envs.gym.env import GymEnv, check_id, import_gymnasium
from envs.gym.hooks import GymHooks
from envs.options import checked
from envs.own_code import load_own

_VERSION = re.compile(r"-v[0-9]+$")
MOST_STEPS = 1000
"""Of an episode whose hooks are named by an option: a task's limit is known before its options are."""


class GymSuite:
    """One environment of gymnasium.

    `of` is an id such as CartPole-v1 or ale_py:ALE/Pong-v5, whose hooks the option names, or hooks that
    name their environment: file.py:MyHooks, my_package.my_module:MyHooks.
    """

    def __init__(self, of: str) -> None:
        self.name = f"gym:{of}"
        self._named = of if ":" in of and not _VERSION.search(of) else ""
        if self._named:
            hooks = _hooks_of(self._named)
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
        """An environment of its own, which the first reset makes; `hooks` is file.py:MyHooks.

        Raises TaskError for hooks that cannot be loaded or lack a part.
        """
        if self._named and hooks:
            raise TaskError(f"suite {self.name} names its hooks; leave env.options.hooks out")
        if not (self._named or hooks):
            raise TaskError(
                f'suite {self.name} needs hooks: set env.options.hooks = "file.py:MyHooks" '
                "(docs/environments/gym.md)"
            )
        import_gymnasium()
        made = _hooks_of(self._named or hooks)()
        if "play" not in made.tasks and not self._named:
            raise TaskError(f"hooks {hooks} have tasks: name the suite gym:{hooks}")
        check_id(self._env_id)
        return GymEnv(self.name, self.tasks, self._env_id, made)

    def check_parts(self, **_: object) -> None:
        """Raise MissingPartError if gymnasium is not installed."""
        import_gymnasium()


@lru_cache(maxsize=64)
def _hooks_of(path: str) -> type[GymHooks]:
    """The class at `path`; its file is run once, since it may register environments. Raises TaskError."""
    import_gymnasium()
    found = load_own("hooks", path, path, once=True)
    if not isinstance(found, GymHooks):
        raise TaskError(f"hooks {path}: derive it from envs.gym.hooks.GymHooks")
    for name in ("action", "verdict"):
        if getattr(type(found), name) is getattr(GymHooks, name):
            raise TaskError(f"hooks {path}: it needs a method {name}")
    if not (isinstance(found.max_steps, int) and 1 <= found.max_steps <= MOST_STEPS):
        raise TaskError(f"hooks {path}: max_steps must be 1 to {MOST_STEPS}, got {found.max_steps}")
    return type(found)


def _short(env_id: str) -> str:
    """An id without the module that registers it, and without slashes: a task's id has one."""
    return env_id.rpartition(":")[2].replace("/", "-")
