"""Which tasks a run trains on, and which it keeps for evaluation.

    training_tasks   the tasks that are leased: env.tasks, without held-out ones
    heldout_tasks    the tasks that the suite or env.heldout keeps out of training
    trained_tasks    the tasks of an evaluation that are trained on, with other seeds
    composed_tasks   the tasks of an evaluation that are never trained on; they are reported separately

A run is split twice: by task id, by the functions above, and by seed, at TRAIN_SEEDS of the schema.
"""

from __future__ import annotations

from collections.abc import Sequence

from dart_cli.config.schema import Config
from envs.contract.base import Task
from envs.contract.registry import select_tasks, tasks_of


def heldout_tasks(config: Config) -> list[Task]:
    """Return the tasks of the suite's held-out split, and those that env.heldout adds. Raises TaskError."""
    suite = config.env.suite
    tasks = {task.id: task for task in tasks_of(suite, "heldout")}
    if config.env.heldout:
        tasks |= {task.id: task for task in select_tasks(suite, config.env.heldout)}
    return list(tasks.values())


def training_tasks(config: Config) -> list[Task]:
    """Return the tasks that the run trains on: those in env.tasks, else all that are not held out.

    An id that env.tasks writes in full is always taken; rules/tasks.py refuses one that is held out. Raises
    TaskError for a suite or task that does not exist.
    """
    return select_tasks(config.env.suite, config.env.tasks, _free_tasks(config))


def trained_tasks(config: Config, only: Sequence[str] = ()) -> list[Task]:
    """Return the training tasks that an evaluation plays, on held-out seeds; `only` replaces eval.tasks.

    Raises TaskError for an unknown task.
    """
    if only:
        heldout = {task.id for task in heldout_tasks(config)}
        return [task for task in select_tasks(config.env.suite, only) if task.id not in heldout]
    patterns = config.eval.tasks or config.env.tasks
    return select_tasks(config.env.suite, patterns, _free_tasks(config))


def composed_tasks(config: Config, only: Sequence[str] = ()) -> list[Task]:
    """Return the held-out tasks that an evaluation plays; `only` replaces eval.compositions.

    Raises TaskError for an unknown task.
    """
    heldout = heldout_tasks(config)
    if only:
        ids = {task.id for task in heldout}
        return [task for task in select_tasks(config.env.suite, only) if task.id in ids]
    return select_tasks(config.env.suite, config.eval.compositions, heldout)


def _free_tasks(config: Config) -> list[Task]:
    """Return all tasks that are not held out."""
    heldout = {task.id for task in heldout_tasks(config)}
    return [task for task in tasks_of(config.env.suite) if task.id not in heldout]
