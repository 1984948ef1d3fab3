"""A ledger made on the same database goes on from there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bus.messages import Batch, Lease, LeaseRequest, Outcome
from bus.weights import WeightsPublished
from dart_cli.config.schema import Config
from dart_cli.data.ledger import Ledger
from dart_cli.data.store.open import open_store
from tests.data.parts import (
    MIXED,
    Clock,
    a_batch,
    ask_lease,
    assert_replays_are_conserved,
    assert_sums_are_conserved,
    batch_trained,
    hello,
    make_ledger,
    next_batch,
    picture_of,
    play,
    play_group,
    small_config,
    state_of,
    step_record,
    trajectory_end,
)

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
            found_batch = next_batch(ledger, version)
            batch_id = found_batch.batch_id if isinstance(found_batch, Batch) else 0
        elif batch_id:
            version += 1
            ledger.batch_trained(batch_trained(batch_id, version, is_skipped=draws.random() < 0.1))
            ledger.weights_published(
                WeightsPublished(
                    policy_version=version, path=f"w{version}", digest="d", updates=version
                )
            )
            batch_id = 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.integers(0, 300))
def test_whatever_happens_nothing_is_lost_and_a_restart_goes_on_from_there(
    tmp_path_factory: pytest.TempPathFactory, seed: int, events: int
) -> None:
    run_dir = tmp_path_factory.mktemp("random") / "run"
    reuse = seed % 3
    train = {"reuse": reuse}
    config = small_config(run_dir, train=train, max_staleness=1, early_stop=bool(seed % 2))
    clock = Clock()
    with open_store(run_dir) as store:
        ledger = make_ledger(config, store, clock)
        random_run(ledger, clock, random.Random(seed), events)
        store.commit()
        before = picture_of(ledger)
        assert_sums_are_conserved(ledger, store)
        assert_replays_are_conserved(store, reuse)
    with open_store(run_dir) as store:
        again = make_ledger(config, store, clock)
        assert picture_of(again) == before
        assert_sums_are_conserved(again, store)
        random_run(again, clock, random.Random(seed + 1), events)
        assert_sums_are_conserved(again, store)
        assert_replays_are_conserved(store, reuse)


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
        before = a_batch(next_batch(ledger, 0))
    with open_store(config.run.dir) as store:
        assert a_batch(next_batch(make_ledger(config, store), 0)) == before


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
