"""A run's tasks and seeds are split: what is held out is evaluated and never trained on."""

from __future__ import annotations

from typing import Any

import pytest

from dart_cli.collect import CollectOptions
from dart_cli.collect.collector import collected_tasks
from dart_cli.collect.quotas import Quota
from dart_cli.config.schema import Config
from dart_cli.config.task_split import trained_tasks, training_tasks, untrained_tasks
from dart_cli.data.scheduler import task_seed
from envs.contract.base import Task
from envs.contract.registry import find_task, tasks_of


def config(**env: Any) -> Config:
    return Config.model_validate({"env": env})


def ids(tasks: list[Task]) -> set[str]:
    return {task.id for task in tasks}


def test_globs_train_on_the_training_split_alone() -> None:
    chosen = config(tasks=["mini/*p*"])
    assert ids(training_tasks(chosen)) == {"mini/popup", "mini/page", "mini/dropdown"}
    assert ids(trained_tasks(chosen)) == ids(training_tasks(chosen))


def test_what_env_heldout_names_is_evaluated_apart_and_never_trained_on_or_collected() -> None:
    chosen = config(heldout=["mini/s*"])
    assert "mini/scroll" not in ids(training_tasks(chosen))
    assert len(training_tasks(chosen)) == len(tasks_of("mini", "train")) - 1
    assert ids(untrained_tasks(chosen)) == ids(tasks_of("mini", "heldout")) | {"mini/scroll"}
    with pytest.raises(Exception, match="held out"):
        collected_tasks(chosen, CollectOptions(tasks=("mini/scroll",)))
    assert ids(untrained_tasks(chosen, ["mini/scroll", "mini/click"])) == {"mini/scroll"}
    assert ids(trained_tasks(chosen, ["mini/scroll", "mini/click"])) == {"mini/click"}


def test_an_evaluation_never_takes_a_task_for_trained_that_the_run_does_not_train_on() -> None:
    """A glob of eval.tasks once counted all tasks of the training split as trained."""
    chosen = config(tasks=["mini/p*", "!mini/page"])
    assert ids(training_tasks(chosen)) == {"mini/popup"}
    for names in (["mini/p*"], ["mini/page", "mini/popup", "mini/popup+menu"]):
        assert ids(trained_tasks(chosen, names)) == {"mini/popup"}
        assert {"mini/page", "mini/popup+menu"} <= ids(untrained_tasks(chosen, names))
    assert ids(untrained_tasks(chosen, ["!mini/popup+*"])) == {
        task.id for task in tasks_of("mini", "heldout") if "popup" not in task.id
    }
    assert ids(trained_tasks(chosen, ["!mini/popup+*"])) == {"mini/popup"}


@pytest.mark.parametrize("seeds", [(0, 1_000_000), (7, 8), (100, 109), (3, 15_000), (0, 387_420)])
def test_training_seeds_meet_their_whole_range_and_nothing_else(seeds: tuple[int, int]) -> None:
    count = min(seeds[1] - seeds[0], 20_000)
    drawn = [task_seed(3, number, seeds) for number in range(1, count + 1)]
    assert len(set(drawn)) == count
    assert seeds[0] <= min(drawn) <= max(drawn) < seeds[1]


def test_collecting_ends_where_the_range_has_no_more_seeds() -> None:
    quota = Quota(find_task("mini", "mini/click"), CollectOptions(16), 0, seeds=(40, 45))
    quota.skip({("oracle", "mini/click", 7), ("oracle", "mini/click", 41)})
    played = []
    while quota.wants_more:
        played.append(quota.next_seed())
    assert sorted(played) == [40, 42, 43, 44]
