"""The ledger's promises, with a real database and without sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.messages import (
    LeaseRequest,
    Outcome,
)
from dart_cli.config.schema import Config
from dart_cli.data import progress
from dart_cli.data.ledger import Ledger
from dart_cli.data.scheduler import NotYet
from dart_cli.data.store.open import open_store
from dart_cli.data.store.writer import Store
from dart_cli.inspection.run_counts import counts_of
from tests.data.parts import (
    MIXED,
    Clock,
    a_batch,
    ask_lease,
    batch_trained,
    make_ledger,
    next_batch,
    one_task,
    play,
    play_group,
    small_config,
    state_of,
    step_record,
    trajectory_end,
)


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
    batch = a_batch(next_batch(ledger, 0))
    seen.append(state_of(store, name))
    ledger.batch_trained(batch_trained(batch.batch_id))
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


def test_a_slot_that_asks_again_while_it_plays_has_given_up_the_old_lease(
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
    ledger.batch_trained(batch_trained(a_batch(next_batch(ledger, 0)).batch_id))
    before = store.trajectories()
    assert ledger.step(step_record(f"{group}-00", 0)).accepted
    assert ledger.end(trajectory_end(f"{group}-00", 2)).accepted
    assert store.trajectories() == before


def test_an_unknown_trajectory_is_not_accepted(ledger: Ledger) -> None:
    ack = ledger.step(step_record("g999999-00", 0))
    assert not ack.accepted
    assert "g999999-00" in ack.note


def test_a_trajectory_that_lacks_a_step_is_never_trained_on(ledger: Ledger, store: Store) -> None:
    lease = ask_lease(ledger, 0)
    ledger.step(step_record(lease.trajectory_id, 1))
    assert "1 of 2 steps" in ledger.end(trajectory_end(lease.trajectory_id, 2)).note
    assert state_of(store, lease.trajectory_id) == "dropped:incomplete"


def test_a_pass_that_lacks_a_step_counts_nowhere_also_after_a_restart(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", dynamic_length=True)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        lease = ask_lease(ledger, 0)
        limit = ledger.leasing.step_limit(lease.task_id)
        ledger.step(step_record(lease.trajectory_id, 0))
        end = trajectory_end(lease.trajectory_id, 2, "pass")
        assert "1 of 2 steps" in ledger.end(end).note
        again = ledger.end(end)
        assert (again.accepted, again.note) == (True, "submitted before")
        for seen in (ledger, make_ledger(config, store)):
            task = seen.progress.tasks[lease.task_id]
            assert (task.average.value, task.passed, task.invalid) == (None, 0, 1)
            assert seen.leasing.step_limit(lease.task_id) == limit
        assert store.longest_successes() == {}
        assert store.success_curve() == []
        assert make_ledger(config, store).progress.mean_success() is None


def test_an_environment_that_gives_up_with_a_step_on_its_way_has_cancelled(
    ledger: Ledger, store: Store
) -> None:
    lease = ask_lease(ledger, 0)
    ledger.end(trajectory_end(lease.trajectory_id, 1, "invalid", "cancelled"))
    assert state_of(store, lease.trajectory_id) == "dropped:cancelled"
    assert ledger.progress.all.invalid == 0  # the environment did not break


def test_an_episode_that_got_no_completion_is_invalid(ledger: Ledger, store: Store) -> None:
    """A prompt that is too long is too long each time: status must show it."""
    lease = ask_lease(ledger, 0)
    ledger.end(trajectory_end(lease.trajectory_id, 0, "invalid", "unanswered"))
    assert state_of(store, lease.trajectory_id) == "dropped:invalid"
    assert ledger.progress.all.invalid == 1


def test_a_trajectory_whose_prompt_image_is_unknown_is_never_trained_on(
    ledger: Ledger, store: Store
) -> None:
    lease = ask_lease(ledger, 0)
    record = step_record(lease.trajectory_id, 0)
    ledger.step(record.model_copy(update={"image_hashes": ["0" * 32, *record.image_hashes]}))
    ledger.end(trajectory_end(lease.trajectory_id, 1))
    assert state_of(store, lease.trajectory_id) == "dropped:incomplete"


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
    assert [attempt.id for _, attempt in ledger.group_table.live_attempts()] == [
        other.trajectory_id
    ]
    assert ask_lease(ledger, 1, "env-1").trajectory_id not in {a.trajectory_id for a in mine}


def test_back_pressure_bounds_groups_that_play_or_wait(ledger: Ledger, config: Config) -> None:
    bound = config.data.max_open_groups
    for _ in range(2):
        play_group(ledger, MIXED)
    for slot in range((bound - 2) * config.data.group_size):
        ask_lease(ledger, slot)
    assert len(ledger.group_table.groups) == bound
    refused = ledger.lease(LeaseRequest(worker="env-0", slot=99, suites=["mini"]))
    assert isinstance(refused, NotYet)
    a_batch(next_batch(ledger, 0))  # the consumer frees the places
    assert ask_lease(ledger, 99)


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


@pytest.mark.parametrize(("outcome", "reason"), [("fail", "all_fail"), ("pass", "all_success")])
def test_a_group_of_equal_rewards_is_trained_on_with_a_teacher(
    tmp_path: Path, outcome: Outcome, reason: str
) -> None:
    """Its advantages are 0; its row says what it lacks beside the teacher, and what it was used for."""
    config = small_config(tmp_path / "run")
    train = config.train.model_copy(update={"teacher_weight": 0.5})
    config = config.model_copy(update={"train": train})
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        same, mixed = play_group(ledger, [outcome] * 4), play_group(ledger, MIXED)
        assert make_ledger(config, store).group_table.groups.keys() == {same, mixed}
        batch = a_batch(next_batch(ledger, 0))
        advantages = {(s.group_id, s.advantage) for s in batch.samples}
        assert (same, 0.0) in advantages
        assert {group for group, advantage in advantages if advantage} == {mixed}
        rows = {row.id: (row.state, row.reason) for row in store.groups("batched")}
        assert rows == {same: ("batched", reason), mixed: ("batched", "")}
        reasons = {row.trajectory_id[:7]: row.reason for row in store.batch_rows(batch.batch_id)}
        assert reasons == {same: "teacher", mixed: "mixed"}
        assert store.decisions(same)[-1].reason == "teacher"


def test_an_invalid_trajectory_is_never_trained_and_another_is_played_instead(
    ledger: Ledger, store: Store
) -> None:
    broken = play(ledger, 0, "invalid")
    group = play_group(ledger, MIXED)
    assert group == broken.group_id
    play_group(ledger, MIXED)
    batch = a_batch(next_batch(ledger, 0))
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


def test_with_early_stop_success_is_of_the_first_half_of_each_group(tmp_path: Path) -> None:
    """Which members there are of the second half depends on the first: they do not count."""
    config, clock = one_task(tmp_path / "run", early_stop=True), Clock(tick=0.1)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store, clock)
        first = [ask_lease(ledger, slot).trajectory_id for slot in range(2)]
        _hand_in(ledger, first[1], "fail")
        second = [ask_lease(ledger, slot).trajectory_id for slot in (2, 3)]
        _hand_in(ledger, second[0], "pass")
        task = ledger.progress.tasks[config.env.tasks[0]]
        assert (task.average.value, task.passed, task.failed) == (0.0, 1, 1)
        ledger = make_ledger(config, store, clock)
        _hand_in(ledger, first[0], "invalid")  # the next one takes its place
        task = ledger.progress.tasks[config.env.tasks[0]]
        assert (task.counted, task.counters.passed) == (2, [1])
        _hand_in(ledger, second[1], "pass")
        _hand_in(ledger, ask_lease(ledger, 0).trajectory_id, "pass")
        assert (task.counted, task.passed, task.failed, task.invalid) == (2, 3, 1, 1)
        assert [row.id for row in store.trajectories() if row.counted] == [first[1], second[0]]
        [point] = store.success_curve()
        assert (point.trajectories, point.passed) == (2, 1)
        assert counts_of(store.counters()).success == 0.5
        known = ledger.progress.tasks
        assert make_ledger(config, store, clock).progress.tasks == known


def test_what_a_run_has_learned_is_the_same_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first half of each group, those with a verdict."""
    monkeypatch.setattr(progress, "NEWEST", 20)
    config, clock = one_task(tmp_path / "run", early_stop=True), Clock(tick=0.1)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store, clock)
        for _ in range(10):
            for outcome in ("pass", "pass"):
                play(ledger, 0, outcome)
            for outcome in ("fail", "pass", "pass", "pass"):
                group = play(ledger, 0, outcome).group_id
            ledger._closer.drop(ledger.group_table.groups[group], "stale")
        play(ledger, 0, "invalid")
        seen = ledger.progress.newest_success()
        assert (seen.counted, seen.passed) == (20, 15)
        assert make_ledger(config, store, clock).progress.newest_success() == seen


def _hand_in(ledger: Ledger, name: str, outcome: Outcome) -> None:
    ledger.step(step_record(name, 0))
    ledger.end(trajectory_end(name, 1, outcome))
