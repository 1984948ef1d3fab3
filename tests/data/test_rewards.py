"""Rewards between 0 and 1 in the ledger: what has a gradient, what it is, and that it survives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bus.messages import Outcome
from dart_cli.config.schema import Config
from dart_cli.config.task_split import training_tasks
from dart_cli.data.ledger import Ledger
from dart_cli.data.progress import RunProgress
from dart_cli.data.scheduler import NotYet, make_scheduler
from dart_cli.data.store.open import open_store
from tests.data.parts import (
    a_batch,
    ask_lease,
    file_member,
    make_ledger,
    next_batch,
    one_task,
    small_config,
    step_record,
    task_of,
    trajectory_end,
)

Judged = tuple[Outcome, float]

FAILURES: list[Judged] = [("fail", 0.0), ("fail", 0.5), ("fail", 0.25), ("fail", 0.25)]
PASSES: list[Judged] = [("pass", 1.0), ("pass", 0.75), ("pass", 1.0), ("pass", 1.0)]
ALIKE: list[Judged] = [("fail", 0.25)] * 4


def play_group(ledger: Ledger, judged: list[Judged]) -> str:
    """Play one group whose members get these verdicts, two steps each; returns its id."""
    leases = [ask_lease(ledger, slot) for slot in range(len(judged))]
    for lease, verdict in zip(leases, judged, strict=True):
        submit(ledger, lease.trajectory_id, verdict)
    [group_id] = {lease.group_id for lease in leases}
    return group_id


def submit(ledger: Ledger, name: str, verdict: Judged) -> None:
    """Two steps and the end of one trajectory."""
    for step in range(2):
        ledger.step(step_record(name, step))
    outcome, reward = verdict
    ledger.end(trajectory_end(name, 2, outcome).model_copy(update={"reward": reward}))


@pytest.mark.parametrize("judged", [FAILURES, PASSES])
def test_with_values_a_group_has_a_gradient_where_rewards_differ(
    tmp_path: Path, judged: list[Judged]
) -> None:
    config = one_task(tmp_path / "run", reward="value")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        play_group(ledger, judged)
        batch = a_batch(next_batch(ledger, 0))
        rewards = np.array([reward for _, reward in judged])
        wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        got = [sample.advantage for sample in batch.samples]
        np.testing.assert_allclose(got, np.repeat(wanted, 2), rtol=1e-9)
        assert store.batch(1).reward == pytest.approx(rewards.mean())


@pytest.mark.parametrize(
    ("judged", "reason"), [(FAILURES, "all_fail"), (PASSES, "all_success"), (ALIKE, "all_fail")]
)
def test_with_outcomes_rewards_are_kept_and_change_nothing(
    tmp_path: Path, judged: list[Judged], reason: str
) -> None:
    config = one_task(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        play_group(ledger, judged)
        assert isinstance(next_batch(ledger, 0), NotYet)
        assert [group.reason for group in store.groups("dropped")] == [reason]
        assert [row.reward for row in store.trajectories()] == [reward for _, reward in judged]


def test_equal_values_have_no_gradient_whatever_the_outcomes(tmp_path: Path) -> None:
    config = one_task(tmp_path / "run", reward="value")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        play_group(ledger, ALIKE)
        play_group(ledger, [("pass", 0.5), ("fail", 0.5), ("fail", 0.5), ("fail", 0.5)])
        play_group(ledger, [("fail", sum([0.1] * 3)), *[("fail", 0.3)] * 3])
        reasons = [group.reason for group in store.groups("dropped")]
        assert reasons == ["all_fail", "equal_rewards", "all_fail"]


def test_with_values_a_success_of_the_pool_joins_failures_without_a_gradient_alone(
    tmp_path: Path,
) -> None:
    config = one_task(tmp_path / "run", reward="value", pool_ratio=0.2)
    with open_store(config.run.dir) as store:
        file_member(store, config)
        ledger = make_ledger(config, store)
        play_group(ledger, FAILURES)
        play_group(ledger, ALIKE)
        drawn = [group.pool_member for group in store.groups("ready", "batched")]
        assert drawn == [None, "xa"]
        first, second = (a_batch(next_batch(ledger, 0)), a_batch(next_batch(ledger, 0)))
        assert first.batch_id == second.batch_id, "served until it is trained on"


def test_early_stop_ends_a_group_only_where_the_passes_have_one_reward(tmp_path: Path) -> None:
    config = one_task(tmp_path / "run", reward="value", early_stop=True)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        for rewards, over in (((1.0, 0.75), False), ((0.75, 0.75), True)):
            leases = [ask_lease(ledger, slot) for slot in range(2)]
            for lease, reward in zip(leases, rewards, strict=True):
                submit(ledger, lease.trajectory_id, ("pass", reward))
            following = ask_lease(ledger, 0)
            assert (following.group_id != leases[0].group_id) == over
            if not over:
                submit(ledger, following.trajectory_id, ("pass", 1.0))
                submit(ledger, ask_lease(ledger, 0).trajectory_id, ("pass", 1.0))


def test_with_values_frontier_and_group_size_follow_the_reward(tmp_path: Path) -> None:
    """No trajectory passes: by success all groups would be of full size, and the task at the floor."""
    config = one_task(tmp_path / "run", reward="value", dynamic_number=True)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        play_group(ledger, [("fail", 0.9)] * 4)
        assert ask_lease(ledger, 0).group_id == "g000002"
        assert store.groups()[1].size == 2, "as at 90 % success"
        task = ledger.progress.tasks[task_of(config)]
        assert (task.average.value, task.reward.value) == (0.0, pytest.approx(0.9))
        store.commit()
    with open_store(config.run.dir) as store:
        assert make_ledger(config, store).progress.tasks[task_of(config)] == task


def test_with_values_a_task_of_varied_rewards_is_played_more_than_one_of_equal_ones() -> None:
    values = Config.model_validate({"data": {"reward": "value"}})
    tasks = training_tasks(values)[:2]
    varied, equal = (task.id for task in tasks)
    progress = RunProgress([varied, equal], 0.0)
    for number in range(200):
        progress.count(varied, False, 0, 0.9 * (number % 2))  # never passed
        progress.count(equal, number % 2 == 0, 0, 0.5)
    weights = make_scheduler(values, tasks).probabilities(progress.estimates("value"))
    assert weights[varied] == pytest.approx(0.81 / 0.91, abs=0.01)
    weights = make_scheduler(Config(), tasks).probabilities(progress.estimates("outcome"))
    assert weights[equal] == pytest.approx(1 / 1.1, abs=0.01)


def test_cancelled_episodes_are_no_invalid_ones(tmp_path: Path) -> None:
    config = one_task(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        for reason in ("cancelled", "environment"):
            name = ask_lease(ledger, 0).trajectory_id
            ledger.step(step_record(name, 0))
            ledger.end(trajectory_end(name, 1, "invalid", reason))  # type: ignore[arg-type]
        task = ledger.progress.tasks[task_of(config)]
        assert (task.invalid, task.invalid_after_action, ledger.progress.all.invalid) == (1, 1, 1)
    with open_store(config.run.dir) as store:
        assert make_ledger(config, store).progress.tasks[task_of(config)] == task


def test_rewards_survive_a_restart_in_the_middle_of_a_group(tmp_path: Path) -> None:
    config = one_task(tmp_path / "run", reward="value")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        leases = [ask_lease(ledger, slot) for slot in range(4)]
        for lease, verdict in zip(leases[:2], FAILURES, strict=False):
            submit(ledger, lease.trajectory_id, verdict)
        store.commit()
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        for lease in leases[2:]:
            submit(ledger, lease.trajectory_id, ("fail", 0.25))
        samples = a_batch(next_batch(ledger, 0)).samples
        rewards = np.array([reward for _, reward in FAILURES])
        wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        np.testing.assert_allclose(
            [sample.advantage for sample in samples], np.repeat(wanted, 2), rtol=1e-9
        )


def test_rewards_of_steps_are_filed(tmp_path: Path) -> None:
    config = one_task(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        name = ask_lease(ledger, 0).trajectory_id
        ledger.step(step_record(name, 0).model_copy(update={"reward": 0.25}))
        ledger.step(step_record(name, 1))
        assert [step.reward for step in store.steps(name)] == [0.25, None]


# --- replacements ----------------------------------------------------------------------------


def test_a_group_replaces_as_many_invalid_episodes_as_it_has_members_over_restarts(
    tmp_path: Path,
) -> None:
    config = one_task(tmp_path / "run")
    played = 0
    while played < 20:  # a new process for each episode
        with open_store(config.run.dir) as store:
            ledger = make_ledger(config, store)
            lease = ask_lease(ledger, 0)
            if lease.group_id != "g000001":
                break
            played += 1
            ledger.step(step_record(lease.trajectory_id, 0))
            ledger.end(trajectory_end(lease.trajectory_id, 1, "invalid", "environment"))
            store.commit()
    assert played == 8
    with open_store(config.run.dir) as store:
        assert store.groups("dropped")[0].reason == "no_valid_member"


def test_a_task_that_always_breaks_does_not_take_the_run(tmp_path: Path) -> None:
    """It has no verdict, which counts as 50 % success: the frontier would play it most of all."""
    config = small_config(tmp_path / "run", group_size=2)
    broken = config.env.tasks[0]
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        played = dict.fromkeys(config.env.tasks, 0)
        for _ in range(400):
            lease = ask_lease(ledger, 0)
            played[lease.task_id] += 1
            name, passes = lease.trajectory_id, int(lease.group_id[1:]) % 2 == 0
            ledger.step(step_record(name, 0))
            if lease.task_id == broken:
                ledger.end(trajectory_end(name, 1, "invalid", "environment"))
            else:
                ledger.end(trajectory_end(name, 1, "pass" if passes else "fail"))
        assert played[broken] < 0.4 * sum(played.values()), played


def test_a_reset_that_ends_its_process_counts_as_an_attempt(tmp_path: Path) -> None:
    config = one_task(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        names = [
            ask_lease(ledger, 0, started_at=float(start)).trajectory_id for start in range(1, 12)
        ]
        again = ask_lease(ledger, 0, started_at=11.0).trajectory_id
        assert again == names[-1], "the same process is answered again"
        assert names[:8] == [f"g000001-{number:02d}" for number in range(8)]
        assert names[8] == "g000002-00", "after its replacements the group is over"
