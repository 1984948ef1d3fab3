"""Batches: what is in them, served again until they are acknowledged, and what a full database drops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bus.errors import CheckpointError
from bus.messages import (
    Batch,
    BatchTrained,
    LeaseRequest,
    Outcome,
)
from dart_cli.config.schema import Config
from dart_cli.data.ledger import Ledger
from dart_cli.data.scheduler import NotYet
from dart_cli.data.stalls import NO_GRADIENT
from dart_cli.data.store.writer import Store
from envs.contract.blobs import content_hash
from tests.data.parts import (
    MIXED,
    a_batch,
    ask_lease,
    batch_trained,
    hello,
    make_ledger,
    next_batch,
    picture,
    play_group,
    small_config,
    step_record,
    trajectory_end,
)


def test_advantages_of_a_served_batch_are_those_of_numpy(ledger: Ledger) -> None:
    drawn = {play_group(ledger, MIXED): MIXED}
    other: list[Outcome] = ["pass", "fail", "fail", "fail"]
    drawn[play_group(ledger, other, steps=3)] = other
    batch = a_batch(next_batch(ledger, 0))
    wanted = {}
    for group, outcomes in drawn.items():
        rewards = np.array([float(outcome == "pass") for outcome in outcomes])
        for index, value in enumerate((rewards - rewards.mean()) / (rewards.std() + 1e-6)):
            wanted[f"{group}-{index:02d}"] = value
    assert len(batch.samples) == 4 * 2 + 4 * 3
    for sample in batch.samples:
        assert sample.advantage == pytest.approx(wanted[sample.trajectory_id], rel=1e-9)
        sent = step_record(sample.trajectory_id, sample.step)
        assert batch.prompt(sample) == sent.prompt_token_ids
        assert list(batch.completion(sample)) == sent.sampled.token_ids
        assert list(sample.behaviour_logprobs) == sent.sampled.behaviour_logprobs
        assert sample.hint == sent.hint
        assert [batch.images[name] for name in batch.image_hashes(sample)] == [sent.screenshot]


def test_a_batch_keeps_its_place_in_the_run_when_it_is_served_again(
    ledger: Ledger, store: Store, config: Config
) -> None:
    """Also where a killed data process forgot the last seconds: time never goes back."""
    served = []
    for run_s in (40.0, 36.0, 70.0):
        play_group(ledger, MIXED)
        play_group(ledger, MIXED)
        batch = a_batch(next_batch(ledger, 0, run_s))
        assert a_batch(next_batch(ledger, 0, 999.0)) == batch
        ledger.batch_trained(batch_trained(batch.batch_id, 0))
        served.append(batch.run_s)
        ledger = make_ledger(config, store)
    assert served == [40.0, 40.0, 70.0]
    ledger.hello(hello(0))
    for run_s in served:
        batch = a_batch(next_batch(ledger, 0, 999.0))
        assert batch.run_s == run_s
        ledger.batch_trained(batch_trained(batch.batch_id, 0))


def test_a_batch_keeps_the_trajectories_that_were_over_when_it_was_formed(
    ledger: Ledger, store: Store, config: Config
) -> None:
    """All that ended count: trained on, dropped with their group, invalid, given up; not those in play."""
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"groups_per_batch": 1})}
    )
    ledger = make_ledger(config, store)
    play_group(ledger, ["pass", "pass", "pass", "pass"])  # dropped: no gradient
    play_group(ledger, MIXED)
    in_play = ask_lease(ledger, 40)
    served = [a_batch(next_batch(ledger, 0))]
    assert served[0].trajectories == ledger.trajectories == 8
    ledger.batch_trained(batch_trained(1, 0))
    ledger = make_ledger(config, store)
    assert ledger.trajectories == 8
    ledger.end(trajectory_end(in_play.trajectory_id, 0, "invalid"))  # it joins its group again
    assert ledger.trajectories == 9
    ask_lease(ledger, 41)
    ledger.take_back_from("env-0")
    play_group(ledger, MIXED)
    served.append(a_batch(next_batch(ledger, 0)))
    assert served[1].trajectories == ledger.trajectories == store.trajectories_over() > 10
    play_group(ledger, MIXED)
    ledger = make_ledger(config, store)
    ledger.hello(hello(0))
    for batch in served:
        assert a_batch(next_batch(ledger, 0)).trajectories == batch.trajectories
        ledger.batch_trained(batch_trained(batch.batch_id, 0))


def test_no_more_trajectories_are_begun_than_the_run_may_have(store: Store, config: Config) -> None:
    """Also after a restart; one that is lost counts, and is not replaced."""
    train = config.train.model_copy(update={"max_trajectories": 5})
    config = config.model_copy(update={"train": train})
    ledger = make_ledger(config, store)
    leases = [ask_lease(ledger, slot) for slot in range(5)]
    assert ask_lease(ledger, 4) == leases[4]  # its answer was lost
    for again in (ledger, make_ledger(config, store)):
        refused = again.lease(LeaseRequest(worker="env-0", slot=9, suites=["mini"]))
        assert isinstance(refused, NotYet)
        assert refused.reason == "the last of train.max_trajectories = 5 are in play"
        assert again.trajectories == 0
    ledger = make_ledger(config, store)
    ledger.end(trajectory_end(leases[0].trajectory_id, 0, "invalid"))
    assert ledger.take_back_from("env-0") == 4
    assert ledger.trajectories == 5
    assert isinstance(ledger.lease(LeaseRequest(worker="env-1", slot=0, suites=["mini"])), NotYet)


def test_of_the_complete_groups_those_opened_first_are_trained_first(ledger: Ledger) -> None:
    first = [ask_lease(ledger, slot) for slot in range(10, 14)]
    second, _ = play_group(ledger, MIXED), play_group(ledger, MIXED)
    for lease, outcome in zip(first, MIXED, strict=True):  # it finished last
        ledger.step(step_record(lease.trajectory_id, 0))
        ledger.end(trajectory_end(lease.trajectory_id, 1, outcome))
    assert a_batch(next_batch(ledger, 0)).group_ids == [first[0].group_id, second]


def test_a_batch_is_served_again_until_it_is_acknowledged(ledger: Ledger) -> None:
    for _ in range(4):
        play_group(ledger, MIXED)
    first = a_batch(next_batch(ledger, 0))
    assert a_batch(next_batch(ledger, 0)) == first
    ledger.batch_trained(batch_trained(first.batch_id))
    second = a_batch(next_batch(ledger, 1))
    assert second.batch_id == 2
    assert not set(first.group_ids) & set(second.group_ids)


def test_without_enough_groups_the_trainer_gets_what_is_missing(ledger: Ledger) -> None:
    play_group(ledger, MIXED)
    ask_lease(ledger, 0)
    found = next_batch(ledger, 0)
    assert isinstance(found, NotYet)
    assert found.reason == "1 of 2 groups with a gradient are ready, 1 more play"


def test_a_trainer_that_waits_because_all_is_solved_gets_that_reason(ledger: Ledger) -> None:
    for _ in range(3):
        play_group(ledger, ["pass"] * 4)
    found = next_batch(ledger, 0)
    assert isinstance(found, NotYet)
    assert found.reason.endswith("dropped since the last batch: 3 all_success")
    for _ in range(30):
        play_group(ledger, ["pass"] * 4)
    found = next_batch(ledger, 0)
    assert isinstance(found, NotYet)
    assert found.reason.endswith(f"33 all_success; {NO_GRADIENT['all_success']}")
    for _ in range(2):
        play_group(ledger, MIXED)
    ledger.batch_trained(batch_trained(a_batch(next_batch(ledger, 0)).batch_id))
    found = next_batch(ledger, 1)
    assert isinstance(found, NotYet)
    assert "dropped" not in found.reason


def test_an_acknowledgement_sent_twice_counts_once(ledger: Ledger, store: Store) -> None:
    for _ in range(2):
        play_group(ledger, MIXED)
    batch = a_batch(next_batch(ledger, 0))
    for _ in range(2):
        assert ledger.batch_trained(batch_trained(batch.batch_id)).accepted
    assert ledger.updates == 1
    assert len(store.metrics("loss")) == 1
    assert not ledger.batch_trained(batch_trained(99)).accepted


def test_a_metric_that_is_not_finite_is_left_out(ledger: Ledger, store: Store) -> None:
    for _ in range(2):
        play_group(ledger, MIXED)
    metrics = {"loss": float("nan"), "grad_norm": float("inf"), "lr": 0.1}
    batch_id = a_batch(next_batch(ledger, 0)).batch_id
    assert ledger.batch_trained(
        BatchTrained(batch_id=batch_id, policy_version=1, metrics=metrics)
    ).accepted
    assert [point.name for point in store.metrics()] == ["lr", "reward"]


def test_a_batchs_mean_reward_is_among_its_metrics(ledger: Ledger, store: Store) -> None:
    play_group(ledger, ["pass", "pass", "pass", "fail"])
    play_group(ledger, ["pass", "fail", "fail", "fail"])
    ledger.batch_trained(batch_trained(a_batch(next_batch(ledger, 0)).batch_id))
    [point] = store.metrics("reward")
    assert (point.step, point.value) == (1, 0.5)
    assert ledger.progress.metrics()["reward"] == 0.5


def test_batches_after_the_checkpoint_are_served_again_in_order_and_earlier_ones_never(
    ledger: Ledger,
) -> None:
    batches = []
    for number in range(1, 5):
        for _ in range(2):
            play_group(ledger, MIXED, version=number - 1)
        batches.append(a_batch(next_batch(ledger, number - 1)))
        ledger.batch_trained(batch_trained(number))
    ledger.hello(hello(2))
    assert ledger.updates == 2
    again = []
    for number in (3, 4):
        again.append(a_batch(next_batch(ledger, number - 1)))
        ledger.batch_trained(batch_trained(number))
    assert again == batches[2:]
    assert isinstance(next_batch(ledger, 4), NotYet)
    assert ledger.updates == 4


def test_a_checkpoint_that_holds_a_batch_acknowledges_it(ledger: Ledger, store: Store) -> None:
    for _ in range(2):
        play_group(ledger, MIXED)
    a_batch(next_batch(ledger, 0))
    ledger.hello(hello(1))
    assert ledger.updates == 1
    assert isinstance(next_batch(ledger, 1), NotYet)
    assert {t.state for t in store.trajectories()} == {"trained"}


def test_a_checkpoint_of_another_run_is_refused(ledger: Ledger) -> None:
    with pytest.raises(CheckpointError, match=r"batch 7.*ends at 0.*different runs"):
        ledger.hello(hello(7))


def test_a_stale_group_never_ships(ledger: Ledger, store: Store, config: Config) -> None:
    old = play_group(ledger, MIXED, version=0)
    limit = config.data.max_staleness
    fresh = [play_group(ledger, MIXED, version=1) for _ in range(2)]
    batch = a_batch(next_batch(ledger, limit + 1))
    assert batch.group_ids == fresh
    assert [(g.id, g.reason) for g in store.groups("dropped")] == [(old, "stale")]


def test_a_group_that_became_stale_in_play_takes_no_more_work(
    ledger: Ledger, store: Store, config: Config
) -> None:
    leases = [ask_lease(ledger, slot) for slot in range(2)]
    ledger.step(step_record(leases[0].trajectory_id, 0, version=0))
    next_batch(ledger, config.data.max_staleness + 1)
    ack = ledger.step(step_record(leases[0].trajectory_id, 1, version=0))
    assert not ack.accepted
    assert "stale" in ack.note
    assert {t.state for t in store.trajectories()} == {"dropped"}


def test_what_is_dropped_in_play_shows_how_many_steps_were_played(
    ledger: Ledger, store: Store, config: Config
) -> None:
    for worker, steps in (("env-0", 2), ("env-1", 3), ("env-2", 0)):
        lease = ask_lease(ledger, 0, worker)
        for step in range(steps):
            ledger.step(step_record(lease.trajectory_id, step))
    ledger.take_back_from("env-0")
    next_batch(ledger, config.data.max_staleness + 1)
    ended = {(row.worker, row.reason): row.steps for row in store.trajectories()}
    assert ended == {("env-0", "worker_lost"): 2, ("env-1", "stale"): 3, ("env-2", "stale"): 0}


def test_staleness_of_trained_tokens_is_counted(ledger: Ledger, store: Store) -> None:
    play_group(ledger, MIXED, version=1)
    play_group(ledger, MIXED, version=3)
    next_batch(ledger, 3)
    assert store.staleness() == {0: 4 * 2 * 3, 2: 4 * 2 * 3}


def train_batches(ledger: Ledger, numbers: range) -> list[Batch]:
    """Play, serve and train batches of these ids."""
    batches = []
    for number in numbers:
        for _ in range(2):
            play_group(ledger, MIXED, version=number - 1)
        batches.append(a_batch(next_batch(ledger, number - 1)))
        ledger.batch_trained(batch_trained(number))
    return batches


@pytest.fixture
def often(tmp_path: Path) -> Config:
    """A trainer that writes a checkpoint after each update, beside the next, and keeps one."""
    config = small_config(tmp_path / "run")
    train = config.train.model_copy(update={"checkpoint_every": 1})
    return config.model_copy(update={"train": train})


def test_making_room_removes_only_what_no_batch_can_need_again(often: Config, store: Store) -> None:
    ledger = make_ledger(often, store)
    batches = train_batches(ledger, range(1, 6))
    ready = play_group(ledger, MIXED, version=5)
    playing = ask_lease(ledger, 0)
    ledger.step(step_record(playing.trajectory_id, 0, version=5))
    while ledger.make_room(3):
        pass
    for batch in batches:
        held = store.screenshots(batch.images)
        assert held == (batch.images if batch.batch_id > 1 else {})
    assert len(screens_of(store, f"{ready}-00")) == 3
    assert len(screens_of(store, playing.trajectory_id)) == 1
    assert all(store.steps(sample.trajectory_id) for batch in batches for sample in batch.samples)
    ledger.hello(hello(2))
    assert [a_batch(next_batch(ledger, 2)).batch_id, ledger.updates] == [3, 2]


def screens_of(store: Store, trajectory_id: str) -> dict[str, bytes]:
    row = store.trajectory(trajectory_id)
    assert row is not None
    hashes = [step.screenshot for step in store.steps(trajectory_id)]
    return store.screenshots([*hashes, row.final_screenshot or ""])


def test_a_checkpoint_whose_batches_cannot_be_served_again_is_refused(
    often: Config, store: Store
) -> None:
    ledger = make_ledger(often, store)
    train_batches(ledger, range(1, 6))
    ledger.make_room(1000)
    with pytest.raises(CheckpointError, match=r"ends at batch 0; batch 1.*data\.max_gb"):
        ledger.hello(hello(0))
    assert ledger.updates == 5


def test_a_screenshot_that_is_shown_again_stays(often: Config, store: Store) -> None:
    ledger = make_ledger(often, store)
    common, rare = picture("common"), picture("rare")
    for slot, image in enumerate([common, rare, common, rare]):
        lease = ask_lease(ledger, slot)
        ledger.step(step_record(lease.trajectory_id, 0, image=image))
        ledger.end(trajectory_end(lease.trajectory_id, 1, "fail"))
    train_batches(ledger, range(1, 6))
    lease = ask_lease(ledger, 0)
    ledger.step(step_record(lease.trajectory_id, 0, image=common, version=5))
    ledger.make_room(1000)
    names = [content_hash(common), content_hash(rare)]
    assert list(store.screenshots(names)) == names[:1]
