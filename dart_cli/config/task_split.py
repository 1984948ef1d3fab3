"""Which tasks a run trains on, and which it keeps for evaluation.

    training_tasks    the tasks that are leased: env.tasks, without held-out ones
    heldout_tasks     the tasks that the suite or env.heldout keeps out of training
    evaluated_tasks   the tasks that an evaluation plays, of both kinds
    trained_tasks     those among them that are trained on: they are played with other seeds
    untrained_tasks   those among them that are never trained on: they are reported apart

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
    heldout = {task.id for task in heldout_tasks(config)}
    free = [task for task in tasks_of(config.env.suite) if task.id not in heldout]
    return select_tasks(config.env.suite, config.env.tasks, free)


def evaluated_tasks(config: Config, only: Sequence[str] = ()) -> list[Task]:
    """Return the tasks that an evaluation plays; `only` replaces eval.tasks.

    Without names, or with exclusions alone, these are the training tasks and all held-out tasks. Raises
    TaskError for an unknown task.
    """
    suite, patterns = config.env.suite, only or config.eval.tasks
    if all(pattern.startswith("!") for pattern in patterns):
        return select_tasks(suite, patterns, [*training_tasks(config), *heldout_tasks(config)])
    return select_tasks(suite, patterns)


def trained_tasks(config: Config, only: Sequence[str] = ()) -> list[Task]:
    """Return the tasks of an evaluation that the run trains on. Raises TaskError for an unknown task."""
    trained = {task.id for task in training_tasks(config)}
    return [task for task in evaluated_tasks(config, only) if task.id in trained]


def untrained_tasks(config: Config, only: Sequence[str] = ()) -> list[Task]:
    """Return the tasks of an evaluation that the run never trains on. Raises TaskError for an unknown task."""
    trained = {task.id for task in training_tasks(config)}
    return [task for task in evaluated_tasks(config, only) if task.id not in trained]
