"""Which tasks a run trains on, and which it keeps for evaluation.

    training_tasks   what is leased: env.tasks, never what is held out
    heldout_tasks    what its suite holds out, and what env.heldout does
    trained_tasks    trained on, and evaluated on held-out seeds
    composed_tasks   never trained on, and reported separately

A run is split twice: by id, by the functions above, and by seed: TRAIN_SEEDS of the schema.
"""

from __future__ import annotations

from collections.abc import Sequence

from dart_cli.config.schema import Config
from envs.contract.base import Task
from envs.contract.registry import select_tasks, tasks_of


def heldout_tasks(config: Config) -> list[Task]:
    """Return the suite's held-out split, and what env.heldout adds to it. Raises TaskError."""
    suite = config.env.suite
    held = {task.id: task for task in tasks_of(suite, "heldout")}
    if config.env.heldout:
        held |= {task.id: task for task in select_tasks(suite, config.env.heldout)}
    return list(held.values())


def training_tasks(config: Config) -> list[Task]:
    """Return the tasks the run trains on: those env.tasks names, else all that are not held out.

    An id that env.tasks writes out is taken as it is; rules/tasks.py refuses one that is held out.
    Raises TaskError for a suite or task that does not exist.
    """
    return select_tasks(config.env.suite, config.env.tasks, _free(config))


def trained_tasks(config: Config, only: Sequence[str] = ()) -> list[Task]:
    """Return the tasks evaluated on held-out seeds. Raises TaskError for an unknown one."""
    if only:
        held = {task.id for task in heldout_tasks(config)}
        return [task for task in select_tasks(config.env.suite, only) if task.id not in held]
    wanted = config.eval.tasks or config.env.tasks
    return select_tasks(config.env.suite, wanted, _free(config))


def composed_tasks(config: Config, only: Sequence[str] = ()) -> list[Task]:
    """Return the tasks never trained on. Raises TaskError for an unknown one."""
    held = heldout_tasks(config)
    if only:
        ids = {task.id for task in held}
        return [task for task in select_tasks(config.env.suite, only) if task.id in ids]
    return select_tasks(config.env.suite, config.eval.compositions, held)


def _free(config: Config) -> list[Task]:
    """All tasks that are not held out."""
    held = {task.id for task in heldout_tasks(config)}
    return [task for task in tasks_of(config.env.suite) if task.id not in held]
