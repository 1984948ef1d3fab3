"""The ledger's promises, with a real database and without sockets."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bus.errors import CheckpointError, ProtocolError
from bus.messages import (
    Batch,
    BatchTrained,
    Lease,
    LeaseRequest,
    Outcome,
    VersionSpan,
    WeightsPublished,
)
from dart_cli.config.schema import Config
from dart_cli.data.ledger import Ledger
from dart_cli.data.scheduler import NoLease
from dart_cli.data.store.open import open_store
from dart_cli.data.store.writer import Store
from envs.base import content_hash
from tests.altered import altered
from tests.data.parts import (
    MIXED,
    Clock,
    a_batch,
    ask_lease,
    assert_sums_are_conserved,
    hello,
    make_ledger,
    picture,
    picture_of,
    play,
    play_group,
    small_config,
    step_record,
    trained,
    trajectory_end,
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return small_config(tmp_path / "run")


@pytest.fixture
def store(config: Config) -> Iterator[Store]:
    with open_store(config.run.dir) as opened:
        yield opened


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(config: Config, store: Store, clock: Clock) -> Ledger:
    return make_ledger(config, store, clock)


def state_of(store: Store, trajectory_id: str) -> str:
    row = store.trajectory(trajectory_id)
    assert row is not None
    return f"{row.state}:{row.reason}" if row.reason else row.state


# --- playing --------------------------------------------------------------------------------


def test_a_trajectory_goes_through_the_ledger_state_by_state(ledger: Ledger, store: Store) -> None:
    leases = [ask_lease(ledger, slot) for slot in range(4)]
    name = leases[0].trajectory_id
    seen = [state_of(store, name)]
    ledger.step(step_record(name, 0))
    seen.append(state_of(store, name))
    ledger.end(trajectory_end(name, 1, "pass"))
    seen.append(state_of(store, name))
    for lease in leases[1:]:
        ledger.end(trajectory_end(lease.trajectory_id, 0, "fail"))
    play_group(ledger, MIXED)
    batch = a_batch(ledger.next_batch(0))
    seen.append(state_of(store, name))
    ledger.batch_trained(trained(batch.batch_id))
    seen.append(state_of(store, name))
    assert seen == ["leased", "playing", "finished", "batched", "trained"]


def test_the_members_of_a_group_share_task_and_seed_and_sample_differently(ledger: Ledger) -> None:
    leases = [ask_lease(ledger, slot) for slot in range(4)]
    assert len({(lease.group_id, lease.task_id, lease.task_seed) for lease in leases}) == 1
    assert len({lease.sampling.seed for lease in leases}) == 4
    other = ask_lease(ledger, 4)
    assert other.group_id != leases[0].group_id
    assert other.task_seed != leases[0].task_seed


def test_a_slot_whose_answer_was_lost_gets_the_same_lease_again(ledger: Ledger) -> None:
    assert ask_lease(ledger, 0) == ask_lease(ledger, 0)
    assert ask_lease(ledger, 0) != ask_lease(ledger, 1)
    assert ask_lease(ledger, 0) != ask_lease(ledger, 0, worker="env-1")


def test_a_slot_that_asks_anew_while_it_plays_has_given_up_the_old_one(
    ledger: Ledger, store: Store
) -> None:
    first = ask_lease(ledger, 0)
    ledger.step(step_record(first.trajectory_id, 0))
    second = ask_lease(ledger, 0)
    assert second.trajectory_id != first.trajectory_id
    assert state_of(store, first.trajectory_id) == "dropped:worker_lost"


def test_a_step_handed_in_twice_counts_once(ledger: Ledger, store: Store) -> None:
    lease = ask_lease(ledger, 0)
    record = step_record(lease.trajectory_id, 0)
    assert ledger.step(record).accepted
    assert ledger.step(record).accepted
    assert len(store.steps(lease.trajectory_id)) == 1


def test_an_end_handed_in_twice_counts_once(ledger: Ledger, store: Store) -> None:
    lease = play(ledger, 0, "pass")
    before = store.trajectory(lease.trajectory_id)
    assert ledger.end(trajectory_end(lease.trajectory_id, 2, "fail")).accepted
    assert store.trajectory(lease.trajectory_id) == before
    assert ledger.progress.all.passed == 1


def test_a_repeat_after_the_group_is_trained_still_changes_nothing(
    ledger: Ledger, store: Store
) -> None:
    group = play_group(ledger, MIXED)
    play_group(ledger, MIXED)
    ledger.batch_trained(trained(a_batch(ledger.next_batch(0)).batch_id))
    before = store.trajectories()
    assert ledger.step(step_record(f"{group}-00", 0)).accepted
    assert ledger.end(trajectory_end(f"{group}-00", 2)).accepted
    assert store.trajectories() == before


def test_an_unknown_trajectory_is_not_accepted(ledger: Ledger) -> None:
    ack = ledger.step(step_record("g999999-00", 0))
    assert not ack.accepted
    assert "g999999-00" in ack.note


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"behaviour_logprobs": [-1.0]}, "behaviour_logprobs"),
        ({"behaviour_logprobs": [-1.0, float("-inf"), -1.0]}, "behaviour_logprobs must be finite"),
        ({"entropies": []}, "entropies"),
        ({"entropies": [0.1, float("nan"), 0.1]}, "entropies must be finite"),
        ({"version_spans": []}, "version_spans"),
        ({"version_spans": [VersionSpan(version=0, start=1, end=3)]}, "version_spans"),
        ({"version_spans": [VersionSpan(version=-1, start=0, end=3)]}, "version_spans"),
        ({"token_ids": [1, 2, 2**31]}, "token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": []}, "must not be empty"),
        (
            {"token_ids": [], "behaviour_logprobs": [], "entropies": [], "version_spans": []},
            "must not be empty",
        ),
        ({"step": -1}, "step"),
        ({"model_s": float("nan")}, "times"),
        ({"image_hashes": []}, "image_hashes"),
        ({"screenshot": b"another"}, "image_hashes"),
    ],
)
def test_a_step_whose_parts_do_not_fit_is_refused_by_name(
    ledger: Ledger, store: Store, change: dict[str, object], named: str
) -> None:
    lease = ask_lease(ledger, 0)
    with pytest.raises(ProtocolError, match=named):
        ledger.step(altered(step_record(lease.trajectory_id, 0), **change))
    assert store.steps(lease.trajectory_id) == []


@pytest.mark.parametrize("change", [{"steps": 2**40}, {"steps": -1}, {"wall_s": float("inf")}])
def test_an_impossible_end_is_refused_and_the_lease_goes_on(
    ledger: Ledger, store: Store, change: dict[str, object]
) -> None:
    lease = ask_lease(ledger, 0)
    with pytest.raises(ProtocolError, match=lease.trajectory_id):
        ledger.end(trajectory_end(lease.trajectory_id, 0).model_copy(update=change))
    assert state_of(store, lease.trajectory_id) == "leased"


def test_a_trajectory_that_lacks_a_step_is_never_trained_on(ledger: Ledger, store: Store) -> None:
    lease = ask_lease(ledger, 0)
    ledger.step(step_record(lease.trajectory_id, 1))
    assert "1 of 2 steps" in ledger.end(trajectory_end(lease.trajectory_id, 2)).note
    assert state_of(store, lease.trajectory_id) == "dropped:incomplete"


def test_an_environment_that_gives_up_with_a_step_on_its_way_has_cancelled(
    ledger: Ledger, store: Store
) -> None:
    lease = ask_lease(ledger, 0)
    ledger.end(trajectory_end(lease.trajectory_id, 1, "invalid", "cancelled"))
    assert state_of(store, lease.trajectory_id) == "dropped:cancelled"


def test_a_trajectory_whose_prompt_image_is_unknown_is_never_trained_on(
    ledger: Ledger, store: Store
) -> None:
    lease = ask_lease(ledger, 0)
    record = step_record(lease.trajectory_id, 0)
    ledger.step(record.model_copy(update={"image_hashes": ["0" * 32, *record.image_hashes]}))
    ledger.end(trajectory_end(lease.trajectory_id, 1))
    assert state_of(store, lease.trajectory_id) == "dropped:incomplete"


# --- leases ---------------------------------------------------------------------------------


def test_a_lease_without_a_sign_of_life_is_taken_back_and_given_to_another(
    ledger: Ledger, store: Store, clock: Clock
) -> None:
    lost, kept = ask_lease(ledger, 0), ask_lease(ledger, 1)
    clock.now += 59
    assert ledger.take_back_expired() == 0
    ledger.renew([kept.trajectory_id])
    clock.now += 2
    assert ledger.take_back_expired() == 1
    assert state_of(store, lost.trajectory_id) == "dropped:lease_expired"
    assert state_of(store, kept.trajectory_id) == "leased"
    assert ask_lease(ledger, 2).group_id == lost.group_id


def test_a_step_renews_its_lease(ledger: Ledger, clock: Clock) -> None:
    lease = ask_lease(ledger, 0)
    for step in range(5):
        clock.now += 40
        ledger.step(step_record(lease.trajectory_id, step))
        assert ledger.take_back_expired() == 0


def test_what_is_handed_in_after_the_lease_was_lost_is_not_accepted(
    ledger: Ledger, store: Store, clock: Clock
) -> None:
    lease = ask_lease(ledger, 0)
    clock.now += 100
    ledger.take_back_expired()
    for ack in (
        ledger.step(step_record(lease.trajectory_id, 0)),
        ledger.end(trajectory_end(lease.trajectory_id, 1)),
    ):
        assert not ack.accepted
        assert "lease_expired" in ack.note
    assert state_of(store, lease.trajectory_id) == "dropped:lease_expired"


def test_a_dead_workers_leases_come_back_and_others_stay(ledger: Ledger) -> None:
    mine = [ask_lease(ledger, slot, "env-0") for slot in range(2)]
    other = ask_lease(ledger, 0, "env-1")
    assert ledger.take_back_from("env-0") == 2
    assert [attempt.id for _, attempt in ledger.group_table.live()] == [other.trajectory_id]
    assert ask_lease(ledger, 1, "env-1").trajectory_id not in {a.trajectory_id for a in mine}


def test_back_pressure_bounds_groups_that_play_or_wait(ledger: Ledger, config: Config) -> None:
    bound = config.data.max_open_groups
    for _ in range(2):
        play_group(ledger, MIXED)
    for slot in range((bound - 2) * config.data.group_size):
        ask_lease(ledger, slot)
    assert len(ledger.group_table.groups) == bound
    refused = ledger.lease(LeaseRequest(worker="env-0", slot=99, suites=["mini"]))
    assert isinstance(refused, NoLease)
    a_batch(ledger.next_batch(0))  # the consumer frees the places
    assert ask_lease(ledger, 99)


# --- groups ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("outcome", "reason"), [("fail", "all_fail"), ("pass", "all_success")])
def test_a_group_of_equal_rewards_is_dropped_with_the_reason(
    ledger: Ledger, store: Store, outcome: Outcome, reason: str
) -> None:
    group = play_group(ledger, [outcome] * 4)
    [row] = store.groups("dropped")
    assert (row.id, row.reason) == (group, reason)
    assert {f"{t.state}:{t.reason}" for t in store.trajectories()} == {f"dropped:{reason}"}
    assert [d.reason for d in store.decisions(f"{group}-00")] == [reason]
    assert ledger.group_table.groups == {}


def test_an_invalid_trajectory_is_never_trained_and_another_is_played_instead(
    ledger: Ledger, store: Store
) -> None:
    broken = play(ledger, 0, "invalid")
    group = play_group(ledger, MIXED)
    assert group == broken.group_id
    play_group(ledger, MIXED)
    batch = a_batch(ledger.next_batch(0))
    assert broken.trajectory_id not in {sample.trajectory_id for sample in batch.samples}
    assert state_of(store, broken.trajectory_id) == "dropped:invalid"


def test_a_group_with_too_many_invalid_members_makes_do_with_those_it_has(
    ledger: Ledger, store: Store
) -> None:
    group = play(ledger, 0, "pass").group_id
    play(ledger, 0, "fail")
    for _ in range(6):
        assert play(ledger, 0, "invalid").group_id == group
    assert store.groups("ready")[0].id == group
    assert ask_lease(ledger, 0).group_id != group


def test_early_stop_saves_the_second_half_of_an_all_success_group(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", early_stop=True)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        group = play_group(ledger, ["pass", "pass"])
        assert [(g.id, g.reason) for g in store.groups("dropped")] == [(group, "all_success")]
        mixed = play_group(ledger, ["pass", "fail"])
        assert play(ledger, 0, "pass").group_id == mixed


# --- batches --------------------------------------------------------------------------------


def test_advantages_of_a_served_batch_are_those_of_numpy(ledger: Ledger) -> None:
    drawn = {play_group(ledger, MIXED): MIXED}
    other: list[Outcome] = ["pass", "fail", "fail", "fail"]
    drawn[play_group(ledger, other, steps=3)] = other
    batch = a_batch(ledger.next_batch(0))
    wanted = {}
    for group, outcomes in drawn.items():
        rewards = np.array([float(outcome == "pass") for outcome in outcomes])
        for index, value in enumerate((rewards - rewards.mean()) / (rewards.std() + 1e-6)):
            wanted[f"{group}-{index:02d}"] = value
    assert len(batch.samples) == 4 * 2 + 4 * 3
    for sample in batch.samples:
        assert sample.advantage == pytest.approx(wanted[sample.trajectory_id], rel=1e-9)
        sent = step_record(sample.trajectory_id, sample.step)
        assert sample.prompt_token_ids == sent.prompt_token_ids
        assert sample.sampled.token_ids == sent.sampled.token_ids
        assert sample.sampled.behaviour_logprobs == sent.sampled.behaviour_logprobs
        assert [batch.images[name] for name in sample.image_hashes] == [sent.screenshot]


def test_of_the_complete_groups_those_opened_first_are_trained_first(ledger: Ledger) -> None:
    first = [ask_lease(ledger, slot) for slot in range(10, 14)]
    second, _ = play_group(ledger, MIXED), play_group(ledger, MIXED)
    for lease, outcome in zip(first, MIXED, strict=True):  # it finished last
        ledger.step(step_record(lease.trajectory_id, 0))
        ledger.end(trajectory_end(lease.trajectory_id, 1, outcome))
    assert a_batch(ledger.next_batch(0)).group_ids == [first[0].group_id, second]


def test_a_batch_is_served_again_until_it_is_acknowledged(ledger: Ledger) -> None:
    for _ in range(4):
        play_group(ledger, MIXED)
    first = a_batch(ledger.next_batch(0))
    assert a_batch(ledger.next_batch(0)) == first
    ledger.batch_trained(trained(first.batch_id))
    second = a_batch(ledger.next_batch(1))
    assert second.batch_id == 2
    assert not set(first.group_ids) & set(second.group_ids)


def test_without_enough_groups_the_trainer_is_told_what_is_missing(ledger: Ledger) -> None:
    play_group(ledger, MIXED)
    ask_lease(ledger, 0)
    found = ledger.next_batch(0)
    assert isinstance(found, NoLease)
    assert found.reason == "1 of 2 groups with a gradient are ready, 1 more play"


def test_a_trainer_that_waits_because_all_is_solved_is_told_so(ledger: Ledger) -> None:
    for _ in range(3):
        play_group(ledger, ["pass"] * 4)
    found = ledger.next_batch(0)
    assert isinstance(found, NoLease)
    assert found.reason.endswith("dropped since the last batch: 3 all_success")
    for _ in range(30):
        play_group(ledger, ["pass"] * 4)
    found = ledger.next_batch(0)
    assert isinstance(found, NoLease)
    assert found.reason.endswith("33 all_success; the policy solves these tasks, add harder ones")
    for _ in range(2):
        play_group(ledger, MIXED)
    ledger.batch_trained(trained(a_batch(ledger.next_batch(0)).batch_id))
    found = ledger.next_batch(1)
    assert isinstance(found, NoLease)
    assert "dropped" not in found.reason


def test_an_acknowledgement_said_twice_counts_once(ledger: Ledger, store: Store) -> None:
    for _ in range(2):
        play_group(ledger, MIXED)
    batch = a_batch(ledger.next_batch(0))
    for _ in range(2):
        assert ledger.batch_trained(trained(batch.batch_id)).accepted
    assert ledger.updates == 1
    assert len(store.metrics("loss")) == 1
    assert not ledger.batch_trained(trained(99)).accepted


def test_a_metric_that_is_not_finite_is_left_out(ledger: Ledger, store: Store) -> None:
    for _ in range(2):
        play_group(ledger, MIXED)
    metrics = {"loss": float("nan"), "grad_norm": float("inf"), "lr": 0.1}
    batch_id = a_batch(ledger.next_batch(0)).batch_id
    assert ledger.batch_trained(
        BatchTrained(batch_id=batch_id, policy_version=1, metrics=metrics)
    ).accepted
    assert [point.name for point in store.metrics()] == ["lr", "reward"]


def test_a_batchs_mean_reward_stands_among_its_metrics(ledger: Ledger, store: Store) -> None:
    play_group(ledger, ["pass", "pass", "pass", "fail"])
    play_group(ledger, ["pass", "fail", "fail", "fail"])
    ledger.batch_trained(trained(a_batch(ledger.next_batch(0)).batch_id))
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
        batches.append(a_batch(ledger.next_batch(number - 1)))
        ledger.batch_trained(trained(number))
    ledger.hello(hello(2))
    assert ledger.updates == 2
    again = []
    for number in (3, 4):
        again.append(a_batch(ledger.next_batch(number - 1)))
        ledger.batch_trained(trained(number))
    assert again == batches[2:]
    assert isinstance(ledger.next_batch(4), NoLease)
    assert ledger.updates == 4


def test_a_checkpoint_that_holds_a_batch_acknowledges_it(ledger: Ledger, store: Store) -> None:
    for _ in range(2):
        play_group(ledger, MIXED)
    a_batch(ledger.next_batch(0))
    ledger.hello(hello(1))
    assert ledger.updates == 1
    assert isinstance(ledger.next_batch(1), NoLease)
    assert {t.state for t in store.trajectories()} == {"trained"}


def test_a_checkpoint_of_another_run_is_refused(ledger: Ledger) -> None:
    with pytest.raises(CheckpointError, match=r"batch 7.*ends at 0.*different runs"):
        ledger.hello(hello(7))


def test_a_stale_group_never_ships(ledger: Ledger, store: Store, config: Config) -> None:
    old = play_group(ledger, MIXED, version=0)
    limit = config.data.max_staleness
    fresh = [play_group(ledger, MIXED, version=1) for _ in range(2)]
    batch = a_batch(ledger.next_batch(limit + 1))
    assert batch.group_ids == fresh
    assert [(g.id, g.reason) for g in store.groups("dropped")] == [(old, "stale")]


def test_a_group_that_became_stale_in_play_takes_no_more_work(
    ledger: Ledger, store: Store, config: Config
) -> None:
    leases = [ask_lease(ledger, slot) for slot in range(2)]
    ledger.step(step_record(leases[0].trajectory_id, 0, version=0))
    ledger.next_batch(config.data.max_staleness + 1)
    ack = ledger.step(step_record(leases[0].trajectory_id, 1, version=0))
    assert not ack.accepted
    assert "stale" in ack.note
    assert {t.state for t in store.trajectories()} == {"dropped"}


def test_what_is_dropped_in_play_tells_how_many_steps_were_played(
    ledger: Ledger, store: Store, config: Config
) -> None:
    for worker, steps in (("env-0", 2), ("env-1", 3), ("env-2", 0)):
        lease = ask_lease(ledger, 0, worker)
        for step in range(steps):
            ledger.step(step_record(lease.trajectory_id, step))
    ledger.take_back_from("env-0")
    ledger.next_batch(config.data.max_staleness + 1)
    ended = {(row.worker, row.reason): row.steps for row in store.episode_times()}
    assert ended == {("env-0", "worker_lost"): 2, ("env-1", "stale"): 3, ("env-2", "stale"): 0}


def test_staleness_of_trained_tokens_is_counted(ledger: Ledger, store: Store) -> None:
    play_group(ledger, MIXED, version=1)
    play_group(ledger, MIXED, version=3)
    ledger.next_batch(3)
    assert store.staleness() == {0: 4 * 2 * 3, 2: 4 * 2 * 3}


# --- a full database ------------------------------------------------------------------------


def train_batches(ledger: Ledger, numbers: range) -> list[Batch]:
    """Play, serve and train batches of these ids."""
    batches = []
    for number in numbers:
        for _ in range(2):
            play_group(ledger, MIXED, version=number - 1)
        batches.append(a_batch(ledger.next_batch(number - 1)))
        ledger.batch_trained(trained(number))
    return batches


@pytest.fixture
def often(tmp_path: Path) -> Config:
    """A trainer that writes a checkpoint after each update and keeps one."""
    config = small_config(tmp_path / "run")
    train = config.train.model_copy(update={"checkpoint_every": 1, "keep_checkpoints": 1})
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
        assert held == (batch.images if batch.batch_id > 3 else {})
    assert len(screens_of(store, f"{ready}-00")) == 3
    assert len(screens_of(store, playing.trajectory_id)) == 1
    assert all(store.steps(sample.trajectory_id) for batch in batches for sample in batch.samples)
    ledger.hello(hello(3))
    assert [a_batch(ledger.next_batch(3)).batch_id, ledger.updates] == [4, 3]


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


# --- starting again -------------------------------------------------------------------------


ANY_OUTCOME: list[Outcome] = ["pass", "fail", "fail", "pass", "invalid"]


def random_run(ledger: Ledger, clock: Clock, draws: random.Random, events: int) -> None:
    """Anything that env, train and time may do to a ledger."""
    playing: dict[int, tuple[Lease, int]] = {}
    version, batch_id = 0, 0
    for _ in range(events):
        clock.now += draws.choice([0.0, 0.5, 4.0])
        event, slot = draws.random(), draws.randrange(6)
        if event < 0.35 and slot not in playing:
            found = ledger.lease(LeaseRequest(worker="env-0", slot=slot, suites=["mini"]))
            if isinstance(found, Lease):
                playing[slot] = (found, 0)
        elif event < 0.65 and slot in playing:
            lease, step = playing[slot]
            if ledger.step(step_record(lease.trajectory_id, step, version=version)).accepted:
                playing[slot] = (lease, step + 1)
            else:
                del playing[slot]
        elif event < 0.9 and slot in playing:
            lease, steps = playing.pop(slot)
            steps += draws.random() < 0.05  # one that never came
            ledger.end(trajectory_end(lease.trajectory_id, steps, draws.choice(ANY_OUTCOME)))
        elif event < 0.92:
            ledger.take_back_expired()
        elif event < 0.94:
            playing.pop(slot, None)  # the slot broke and says nothing
        elif event < 0.945:
            newest = max((batch.id for batch in ledger.store.batches()), default=0)
            ledger.hello(hello(draws.randint(max(0, newest - 2), newest)))
            version, batch_id = ledger.trainer_version, 0
        elif event < 0.97:
            found_batch = ledger.next_batch(version)
            batch_id = found_batch.batch_id if isinstance(found_batch, Batch) else 0
        elif batch_id:
            version += 1
            ledger.batch_trained(trained(batch_id, version))
            ledger.weights_published(
                WeightsPublished(policy_version=version, path=f"w{version}", digest="d")
            )
            batch_id = 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.integers(0, 300))
def test_whatever_happens_nothing_is_lost_and_a_restart_goes_on_from_there(
    tmp_path_factory: pytest.TempPathFactory, seed: int, events: int
) -> None:
    run_dir = tmp_path_factory.mktemp("random") / "run"
    config = small_config(run_dir, max_staleness=1, early_stop=bool(seed % 2))
    clock = Clock()
    with open_store(run_dir) as store:
        ledger = make_ledger(config, store, clock)
        random_run(ledger, clock, random.Random(seed), events)
        store.commit()
        before = picture_of(ledger)
        assert_sums_are_conserved(ledger, store)
    with open_store(run_dir) as store:
        again = make_ledger(config, store, clock)
        assert picture_of(again) == before
        assert_sums_are_conserved(again, store)


def test_a_restarted_ledger_leases_what_is_missing(config: Config) -> None:
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        done, lost = play(ledger, 0), ask_lease(ledger, 1)
    clock = Clock(5000.0)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store, clock)
        clock.now += 61
        assert ledger.take_back_expired() == 1
        assert state_of(store, lost.trajectory_id) == "dropped:lease_expired"
        groups = [ask_lease(ledger, slot).group_id for slot in range(4)]
        assert groups == [done.group_id] * 3 + ["g000002"]


def test_a_restarted_ledger_serves_the_unacknowledged_batch_first(config: Config) -> None:
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        for _ in range(4):
            play_group(ledger, MIXED)
        before = a_batch(ledger.next_batch(0))
    with open_store(config.run.dir) as store:
        assert a_batch(make_ledger(config, store).next_batch(0)) == before


def test_a_task_taken_out_of_the_configuration_is_dropped_with_the_reason(config: Config) -> None:
    with open_store(config.run.dir) as store:
        lease = ask_lease(make_ledger(config, store), 0)
    kept = [task for task in config.env.tasks if task != lease.task_id]
    changed = config.model_copy(update={"env": config.env.model_copy(update={"tasks": kept})})
    with open_store(config.run.dir) as store:
        ledger = make_ledger(changed, store)
        assert store.groups("dropped")[0].reason == "task_removed"
        assert ask_lease(ledger, 0).task_id in kept


def test_the_same_seed_and_history_give_the_same_decisions(tmp_path: Path) -> None:
    stories = []
    for name in ("one", "two"):
        config = small_config(tmp_path / name)
        with open_store(config.run.dir) as store:
            ledger = make_ledger(config, store)
            random_run(ledger, Clock(), random.Random(11), 400)
            stories.append((store.trajectories(), store.decisions()))
    first, second = ([(t.id, t.state, t.sampling_seed) for t in s[0]] for s in stories)
    assert first == second
    assert stories[0][1] == stories[1][1]
