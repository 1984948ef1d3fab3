"""Groups of one: everything with a verdict is trained on, compared with what baselines expect."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bus.messages import Batch, Outcome, StepValue
from dart_cli.config.rules.check import find_mistakes
from dart_cli.config.schema import Config
from dart_cli.data.curate import BaselineComparison, FinishedGroup, Member, curate
from dart_cli.data.ledger import Ledger
from dart_cli.data.scheduler import NotYet
from dart_cli.data.store.open import open_store
from dart_cli.data.store.writer import Store
from tests.data.parts import (
    a_batch,
    assert_sums_are_conserved,
    batch_trained,
    file_member,
    make_ledger,
    next_batch,
    play,
    small_config,
)

BASELINES = ("task_baseline", "step_baseline")


def stream_config(run_dir: Path, advantage: str = "step_baseline", **data: object) -> Config:
    """Two tasks, four trajectories a batch, no groups."""
    settings = {"group_size": 1, "groups_per_batch": 4, "advantage": advantage, **data}
    return small_config(run_dir, **settings)


class Counts:
    """The recipe once more: counts by task and step, plainly."""

    def __init__(self, by_step: bool, decay: float = 0.95) -> None:
        self.by_step, self.decay = by_step, decay
        self.of: dict[tuple[str, int], tuple[float, float]] = {}

    def at(self, task: str, step: int) -> tuple[float, float]:
        while (task, step) not in self.of and step >= 0:
            step -= 1
        return self.of.get((task, step), (0.5, 0.5))

    def baselines(self, task: str, steps: int) -> list[float]:
        pairs = [self.at(task, step if self.by_step else -1) for step in range(steps)]
        return [passed / (passed + failed) for passed, failed in pairs]

    def learn(self, task: str, reward: float, steps: int) -> None:
        places = range(-1, steps) if self.by_step else [-1]
        old = {step: self.at(task, step) for step in places}
        for step, (passed, failed) in old.items():
            self.of[task, step] = (
                self.decay * passed + reward,
                self.decay * failed + 1 - reward,
            )


@pytest.mark.parametrize(
    ("advantage", "margin"),
    [("task_baseline", 0.0), ("step_baseline", 0.0), ("step_baseline", 0.1)],
)
def test_advantages_are_rewards_less_what_was_expected_before_the_batch(
    tmp_path: Path, advantage: str, margin: float
) -> None:
    config = stream_config(tmp_path, advantage, baseline_margin=margin)
    counts = Counts(advantage == "step_baseline")
    chance = random.Random(5)
    with open_store(tmp_path) as store:
        ledger = make_ledger(config, store)
        for number in range(1, 6):
            played: list[tuple[str, str, float, int]] = []
            for slot in range(4):
                steps, reward = chance.choice([1, 2, 4]), chance.choice([0.0, 1.0])
                lease = play(ledger, slot, "pass" if reward else "fail", steps=steps)
                played.append((lease.trajectory_id, lease.task_id, reward, steps))
            batch = a_batch(next_batch(ledger, number - 1))
            rows = store.batch_rows(batch.batch_id)
            expected = [b for _, task, _, steps in played for b in counts.baselines(task, steps)]
            wanted = [
                reward - each + margin
                for _, task, reward, steps in played
                for each in counts.baselines(task, steps)
            ]
            assert [row.baseline for row in rows] == expected
            assert [row.advantage for row in rows] == pytest.approx(wanted, abs=1e-12)
            assert {row.reason for row in rows} == {"baseline"}
            for _, task, reward, steps in played:
                counts.learn(task, reward, steps)
            found = {(t.task_id, t.step): (t.passed, t.failed) for t in store.baselines()}
            assert found == counts.of
            ledger.batch_trained(batch_trained(number))


def test_samples_tell_their_reward_and_what_was_expected(tmp_path: Path) -> None:
    """What a critic learns from; after a restart the same."""
    with open_store(tmp_path) as store:
        ledger = make_ledger(stream_config(tmp_path), store)
        for slot, outcome in enumerate(("pass", "fail", "pass", "fail")):
            play(ledger, slot, outcome)  # type: ignore[arg-type]
        batch = a_batch(next_batch(ledger, 0))
        for sample in batch.samples:
            assert sample.reward in (0.0, 1.0)
            assert sample.expected is not None
            assert sample.advantage == sample.reward - sample.expected
        again = a_batch(next_batch(make_ledger(stream_config(tmp_path), store), 0))
        assert again.samples == batch.samples


@pytest.mark.parametrize("restarts", [False, True])
def test_a_replay_has_the_advantages_that_a_critic_made(tmp_path: Path, *, restarts: bool) -> None:
    config = stream_config(tmp_path, groups_per_batch=1)
    train = config.train.model_copy(update={"reuse": 1, "critic": "gae"})
    config = config.model_copy(update={"train": train})
    with open_store(tmp_path) as store:
        ledger = make_ledger(config, store)
        served: list[Batch] = []
        for number in (1, 2, 3):
            play(ledger, number, "pass" if number % 2 else "fail")
            if restarts:
                ledger = make_ledger(config, store)
            batch = a_batch(next_batch(ledger, number - 1))
            served.append(batch)
            values = [
                StepValue(
                    group_id=each.group_id,
                    trajectory_id=each.trajectory_id,
                    step=each.step,
                    value=0.75,
                    advantage=10.0 * number + each.step,
                )
                for each in batch.samples
            ]
            told = [] if batch.reuse else values
            ledger.batch_trained(batch_trained(number).model_copy(update={"values": told}))
        first, _, again = served
        assert (again.reuse, again.group_ids) == (1, first.group_ids)
        assert [each.advantage for each in again.samples] == [10.0, 11.0]
        assert [each.expected for each in again.samples] == [e.expected for e in first.samples]
        rows = store.batch_rows(1)
        assert [(row.value, row.valued) for row in rows] == [(0.75, 10.0), (0.75, 11.0)]
        assert [row.advantage for row in rows] == [each.advantage for each in first.samples]


def test_nothing_is_dropped_because_its_rewards_are_alike(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        ledger = make_ledger(stream_config(tmp_path), store)
        for slot in range(4):
            play(ledger, slot, "pass")
        batch = a_batch(next_batch(ledger, 0))
        assert len(batch.samples) == 8
        assert {sample.advantage for sample in batch.samples} == {0.5}  # none was expected yet
        assert {row.baseline for row in store.batch_rows(1)} == {0.5}
        assert_sums_are_conserved(ledger, store)


def test_an_invalid_trajectory_is_replaced_and_teaches_no_baseline(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        ledger = make_ledger(stream_config(tmp_path, groups_per_batch=1), store)
        broken, replaced = play(ledger, 0, "invalid"), play(ledger, 0, "fail")
        assert broken.group_id == replaced.group_id
        assert {s.trajectory_id for s in a_batch(next_batch(ledger, 0)).samples} == {
            replaced.trajectory_id
        }
        [whole, *_] = store.baselines()
        assert (whole.passed, whole.failed) == (0.475, 1.475)
        play(ledger, 0, "invalid"), play(ledger, 0, "invalid")
        assert store.groups("dropped")[0].reason == "no_valid_member"
        assert_sums_are_conserved(ledger, store)


def test_a_success_of_the_pool_joins_a_failure_and_teaches_no_baseline(tmp_path: Path) -> None:
    config = stream_config(tmp_path, groups_per_batch=1, pool_ratio=0.5)
    config = config.model_copy(
        update={"env": config.env.model_copy(update={"tasks": config.env.tasks[:1]})}
    )
    with open_store(tmp_path) as store:
        file_member(store, config, "xa", steps=3)
        ledger = make_ledger(config, store)
        lease = play(ledger, 0, "fail", steps=2)
        next_batch(ledger, 0)
        rows = store.batch_rows(1)
        assert [(row.trajectory_id, row.reason) for row in rows] == [
            *[(lease.trajectory_id, "baseline")] * 2,
            *[("xa", "pool")] * 3,
        ]
        assert {row.baseline for row in rows} == {0.5}
        assert [row.advantage for row in rows] == [-0.5, -0.5, 0.5, 0.5, 0.5]
        assert {t.step: (t.passed, t.failed) for t in store.baselines()} == dict.fromkeys(
            (-1, 0, 1), (0.475, 1.475)
        )


def play_run(run_dir: Path, restarts: bool, advantage: str) -> list[object]:
    """Six batches; with restarts, a new ledger on the same database now and then."""
    config = stream_config(run_dir, advantage, task_sampling="deviation")
    chance, faults = random.Random(11), random.Random(4)
    store = open_store(run_dir)
    ledger = make_ledger(config, store)
    batches = 0
    outcomes: list[Outcome] = ["pass", "fail", "fail", "invalid"]
    while batches < 6:
        steps = chance.choice([1, 2, 3])
        play(ledger, 0, chance.choice(outcomes), steps=steps, version=batches)
        if not isinstance(next_batch(ledger, batches), NotYet):
            batches += 1
            if restarts:
                store, ledger = again(store, run_dir, config)  # served, not acknowledged
            ledger.batch_trained(batch_trained(batches))
        if restarts and faults.random() < 0.3:
            store, ledger = again(store, run_dir, config)
        assert_sums_are_conserved(ledger, store)
    rows = [store.batch_rows(batch.id) for batch in store.batches()]
    baselines = store.baselines()
    store.close()
    return [rows, baselines]


def again(store: Store, run_dir: Path, config: Config) -> tuple[Store, Ledger]:
    store.commit()
    store.close()
    store = open_store(run_dir)
    return store, make_ledger(config, store)


@pytest.mark.parametrize("advantage", BASELINES)
def test_baselines_of_a_run_with_restarts_are_those_of_a_run_without(
    tmp_path: Path, advantage: str
) -> None:
    assert play_run(tmp_path / "a", False, advantage) == play_run(tmp_path / "b", True, advantage)


def test_a_batch_that_was_never_filed_teaches_no_baseline(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        ledger = make_ledger(stream_config(tmp_path, groups_per_batch=2), store)
        play(ledger, 0, "fail"), play(ledger, 1, "pass")
        assert not isinstance(ledger.plan_batch(0), NotYet)
        assert store.baselines() == []


def test_steps_on_which_all_did_as_expected_have_advantage_zero() -> None:
    groups = [
        FinishedGroup(f"g{n}", (Member(f"g{n}-00", "fail", 3, reward=0.25),)) for n in range(4)
    ]
    found = curate(
        groups,
        groups_per_batch=4,
        max_staleness=0,
        advantage="step_baseline",
        comparison=BaselineComparison(lambda _, steps: [0.25] * steps),
    )
    assert [sample.advantage for sample in found.samples] == [0.0] * 12


@pytest.mark.parametrize(
    ("settings", "key", "cure"),
    [
        ({"group_size": 1}, "data.advantage", '"step_baseline"'),
        ({"advantage": "task_baseline"}, "data.group_size", "must be 1"),
        (
            {"group_size": 1, "advantage": "step_baseline", "early_stop": True},
            "data.early_stop",
            "set it to false",
        ),
        (
            {"group_size": 1, "advantage": "step_baseline", "dynamic_number": True},
            "data.dynamic_number",
            "set it to false",
        ),
    ],
)
def test_groups_of_one_and_baselines_need_each_other(
    settings: dict[str, object], key: str, cure: str
) -> None:
    config = Config.model_validate({"data": settings})
    [found] = [mistake for mistake in find_mistakes(config, "data") if mistake.subject == key]
    assert cure in str(found)
