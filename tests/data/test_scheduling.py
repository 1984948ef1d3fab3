"""Whole runs through the real ledger and database, under every scheduler, at random.

World   environment slots, rollout workers and a trainer that do what these may do, one event at a
        time; after each event it looks whether a promise is broken
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bus.messages import Batch, Lease, LeaseRequest, Outcome
from bus.weights import SyncDone, WeightsPublished
from dart_cli.config.schema import Config
from dart_cli.config.schema.data import OVER_PROVISION
from dart_cli.config.task_split import training_tasks
from dart_cli.data import ledger, pool
from dart_cli.data.ledger import Ledger
from dart_cli.data.replays import most_behind
from dart_cli.data.scheduler import NotYet
from dart_cli.data.store.open import open_store
from dart_cli.data.store.writer import Store
from tests.data.parts import (
    Clock,
    a_batch,
    assert_replays_are_conserved,
    assert_sums_are_conserved,
    batch_trained,
    heartbeat,
    hello,
    make_ledger,
    next_batch,
    picture,
    picture_of,
    pool_member,
    small_config,
    step_record,
    sync_done,
    trajectory_end,
)

SCHEDULINGS = ["rollout", "batch", "april", "oversample"]
OUTCOMES: list[Outcome] = ["pass", "fail"]
WORKERS = ["rollout-0", "rollout-1", "rollout-2"]


class World:
    """Slots, rollout workers and a trainer around one ledger."""

    def __init__(
        self,
        config: Config,
        store: Store,
        seed: int,
        *,
        slots: int,
        invalid: float = 0.1,
        success: tuple[float, float] = (0.5, 0.5),
    ) -> None:
        self.config = config
        self.store = store
        self.clock = Clock()
        self.draws = random.Random(seed)
        self.playing: dict[int, tuple[Lease, int] | None] = dict.fromkeys(range(slots))
        self.workers = dict.fromkeys(WORKERS, 0)  # that live, and the version each serves
        self.refused: dict[str, SyncDone] = {}
        self.version = 0  # the trainer's
        self.announced = 0  # that workers can take
        self.coming: WeightsPublished | None = None  # the version between the two, on its way
        self.updates: dict[int, int] = {}  # in each version
        self.batch: Batch | None = None  # that the trainer has
        self.invalid = invalid
        self.success = dict(zip(config.env.tasks, success, strict=True))
        self.leased: set[str] = set()
        self.limits = {task.id: task.max_steps for task in training_tasks(config)}
        self.told: Counter[str] = Counter()
        self.begin()
        self.ledger.weights_published(self._weights(0))

    def begin(self) -> None:
        """A data process starts on the database and hears the workers."""
        self.ledger = make_ledger(self.config, self.store, self.clock)
        for worker, version in self.workers.items():
            self.ledger.versions.observe(heartbeat(worker, version), is_new=True)
            if worker in self.refused:  # it tries again every few seconds
                self.ledger.versions.note_sync(self.refused[worker])

    # --- events -------------------------------------------------------------------------

    def lease(self, slot: int) -> None:
        """A free slot asks."""
        ours, turn = self.ledger, self.ledger.turn
        assert ours.suspended == bool(turn)
        found = ours.lease(LeaseRequest(worker="env-0", slot=slot, suites=["mini"]))
        if isinstance(found, NotYet):
            assert found.reason
            self.told[found.reason] += 1
            return
        is_new = found.trajectory_id not in self.leased  # else the answer was lost: the same again
        assert not (is_new and turn), f"leased in {turn}"
        assert 1 <= found.max_steps <= self.limits[found.task_id]
        if found.trajectory_id.endswith("-00") and is_new:
            assert found.max_steps == ours.leasing.step_limit(found.task_id)
        self.leased.add(found.trajectory_id)
        self.playing[slot] = (found, 0)

    def join(self, worker: str) -> None:
        """A rollout worker starts and takes the newest weights."""
        self.workers[worker] = self.announced
        self.refused.pop(worker, None)
        self.ledger.versions.observe(heartbeat(worker, -1), is_new=True)
        self.ledger.versions.observe(heartbeat(worker, self.announced), is_new=False)

    def leave(self, worker: str) -> None:
        """A rollout worker dies."""
        self.workers.pop(worker, None)
        self.refused.pop(worker, None)
        self.ledger.versions.forget(worker)

    def refuse(self, worker: str) -> None:
        """A rollout worker cannot take the newest weights and serves on with its own."""
        if worker in self.workers:
            self.refused[worker] = sync_done(worker, self.announced, "half of it is missing")
            self.ledger.versions.note_sync(self.refused[worker])

    def play(self, slot: int) -> None:
        """A slot takes a step, if the rollouts may work, or ends."""
        playing = self.playing[slot]
        assert playing is not None
        lease, steps = playing
        if steps == lease.max_steps or (steps and self.draws.random() < 0.4):
            self.end(slot)
            return
        if self.ledger.suspended or not self.workers:
            return
        newest = max(self.workers.values())  # the router knows what workers serve, nothing else
        fresh = [
            version
            for version in self.workers.values()
            if newest - version <= self.config.data.max_staleness
        ]
        # Few screens and actions, so that trajectories of a group meet on a screen and part again.
        drawn = crc32(f"{lease.trajectory_id}:{steps}".encode())
        image = picture("screen", drawn % 5)
        version = self.draws.choice(fresh)
        record = step_record(lease.trajectory_id, steps, version=version, image=image)
        action = {"kind": "click", "x": drawn % 3, "y": 2, "button": "left"}
        record = record.model_copy(update={"action": action})
        is_accepted = self.ledger.step(record).accepted
        self.playing[slot] = (lease, steps + 1) if is_accepted else None

    def end(self, slot: int) -> None:
        """An episode is over."""
        playing = self.playing[slot]
        assert playing is not None
        lease, steps = playing
        self.playing[slot] = None
        is_invalid = self.draws.random() < self.invalid
        judged: Outcome = "pass" if self.draws.random() < self.success[lease.task_id] else "fail"
        outcome: Outcome = "invalid" if is_invalid else judged
        self.ledger.end(trajectory_end(lease.trajectory_id, steps, outcome))

    def train(self) -> None:
        """The trainer asks for a batch, or has trained the one it has, or its weights are complete."""
        data = self.config.data
        if self.coming is not None and self.draws.random() < 0.5:
            self.announce()
            return
        if self.batch is None:
            formed = len(self.store.batches())
            found = next_batch(self.ledger, self.version)
            if isinstance(found, NotYet):
                self.told[found.reason] += 1
                return
            self.batch = found
            assert len(found.group_ids) == data.groups_per_batch
            row = self.store.batch(found.batch_id)
            rows = self.store.batch_rows(found.batch_id)
            told = {(s.trajectory_id, s.step): s for s in rows}
            fresh = [s for s in found.samples if told[s.trajectory_id, s.step].reason != "pool"]
            oldest = min(
                self.updates[span.version] for each in fresh for span in each.version_spans
            )
            every, train = self.config.weights.publish_every, self.config.train
            reuse = row.reuse
            most = most_behind(
                max_staleness=data.max_staleness,
                reused=reuse,
                reuse=train.reuse,
                publish_every=every,
            )
            assert self.updates[row.formed_version] - oldest <= most * every
            tokens = self.store.staleness(found.batch_id - 1, replays=reuse > 0)
            if row.id == len(self.store.batches()):
                assert sum(tokens.values()) == sum(len(each) for each in fresh)
            shown = {name for each in found.samples for name in found.image_hashes(each)}
            assert found.images.keys() == shown  # however old a member of the pool is
            assert self.ledger.suspended == data.takes_turns
            is_new = found.batch_id > formed and not reuse
            if is_new and data.scheduling == "oversample":
                assert not self.ledger.group_table.open
            return
        updates = self.ledger.updates + 1
        if updates % self.config.weights.publish_every == 0:
            self.announce()  # one at a time
            self.version += 1
            self.coming = self._weights(updates)
        assert self.ledger.batch_trained(batch_trained(self.batch.batch_id, self.version)).accepted
        self.batch = None

    def announce(self) -> None:
        """The version on its way is complete."""
        if self.coming is not None:
            assert self.ledger.weights_published(self.coming).accepted
            self.announced, self.coming = self.coming.policy_version, None

    def synchronise(self, worker: str) -> None:
        """A rollout worker takes the newest weights, if it lives."""
        if worker not in self.workers:
            return
        self.workers[worker] = self.announced
        self.ledger.versions.observe(heartbeat(worker, self.announced), is_new=False)

    def go_back(self) -> None:
        """The trainer died and begins at its last checkpoint, with weights of the next number."""
        newest = len(self.store.batches())
        last = self.draws.randint(max(0, newest - 2), newest)
        if self.coming is not None:  # which it was publishing: the number is free again
            self.version, self.coming = self.announced, None
        self.version += 1
        self.batch = None
        told = hello(last).model_copy(update={"policy_version": self.version})
        self.ledger.hello(told)
        self.coming = self._weights(last)
        self.announce()

    def restart(self) -> None:
        """Data dies and starts again: it stands where it stood and decides as it would have."""
        self.store.commit()
        before, limit, turn = picture_of(self.ledger), self.ledger.group_limit, self.ledger.turn
        self.begin()
        assert (picture_of(self.ledger), self.ledger.group_limit, self.ledger.turn) == (
            before,
            limit,
            turn,
        )

    def run(self, events: int, *, restarts: bool = True) -> None:
        """Anything may happen."""
        for _ in range(events):
            self.clock.now += self.draws.choice([0.0, 0.5, 2.0])
            event, slot = self.draws.random(), self.draws.choice(list(self.playing))
            if event < 0.72:
                (self.lease if self.playing[slot] is None else self.play)(slot)
            elif event < 0.84:
                self.train()
            elif event < 0.94:
                self.synchronise(self.draws.choice(WORKERS))
            elif event < 0.95:
                self.playing[slot] = None  # the slot broke and says nothing
            elif event < 0.96:
                self.ledger.take_back_expired()
            elif event < 0.965:
                self.go_back()
            elif event < 0.98:
                if restarts:
                    self.restart()
            elif event < 0.985:
                self.ledger.make_room(4)
            elif event < 0.995:
                self.draws.choice([self.join, self.leave])(self.draws.choice(WORKERS))
            else:
                self.refuse(self.draws.choice(WORKERS))
            self.look()

    def go_on(self, updates: int, rounds: int = 4000) -> None:
        """Everybody who is there works, one rollout worker at least: so many updates must come."""
        if not self.workers:
            self.join(WORKERS[0])
        wanted = self.ledger.updates + updates
        for _ in range(rounds):
            for slot, playing in self.playing.items():
                (self.lease if playing is None else self.play)(slot)
            for worker in self.workers:
                self.synchronise(worker)
            self.train()
            self.look()
            if self.ledger.updates >= wanted:
                return
        pytest.fail(f"no progress, last told: {list(self.told)[-5:]}")

    # --- promises -----------------------------------------------------------------------

    def look(self) -> None:
        """Look at what must hold at any moment."""
        data, group_table = self.config.data, self.ledger.group_table
        for group in group_table.groups.values():
            assert len(group.finished) + len(group.live) <= group.size
            assert min(2, data.group_size) <= group.size <= data.group_size
            assert group.size == data.group_size or data.dynamic_number
            if member := group.pool_member:
                assert (member.task_id, group.state) == (group.task_id, "ready")
                assert {attempt.outcome for attempt in group.finished} == {"fail"}
                assert 1 / (1 + len(group.finished)) <= data.pool_ratio
        if data.scheduling == "batch":
            assert len(group_table.groups) <= data.groups_per_batch
        if data.scheduling in ("april", "oversample"):
            assert len(group_table.groups) <= OVER_PROVISION * data.groups_per_batch
        owners = Counter((a.worker, a.slot) for _, a in group_table.live_attempts())
        assert max(owners.values(), default=0) <= 1

    def _weights(self, updates: int) -> WeightsPublished:
        self.clock.now += 0.001  # no two sets are published at the same moment
        self.updates[self.version] = updates
        return WeightsPublished(
            policy_version=self.version, path=f"w{self.version}", digest="d", updates=updates
        )


def a_config(run_dir: Path, *, publish_every: int = 1, reuse: int = 0, **data: Any) -> Config:
    config = small_config(run_dir, **{"max_open_groups": 0, **data})
    weights = config.weights.model_copy(update={"publish_every": publish_every})
    train = config.train.model_copy(update={"checkpoint_every": 1, "reuse": reuse})
    return config.model_copy(update={"weights": weights, "train": train})


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    scheduling = draw(st.sampled_from(SCHEDULINGS))
    size = draw(st.sampled_from([1, 2, 4]))
    by_baseline = st.sampled_from(["task_baseline", "step_baseline"])
    return {
        "advantage": draw(by_baseline) if size == 1 else "group_std",
        "task_sampling": draw(st.sampled_from(["frontier", "deviation"])),
        "scheduling": scheduling,
        "max_staleness": draw(st.sampled_from([0, 1, 4])),
        "early_stop": size > 1 and draw(st.booleans()),
        "publish_every": draw(st.sampled_from([1, 3])),
        "reuse": draw(st.sampled_from([0, 1, 2])),
        "group_size": size,
        "dynamic_number": size > 1 and draw(st.booleans()),
        "dynamic_length": draw(st.booleans()),
        "high_entropy": draw(st.sampled_from([0.3, 0.8, 1.0])),
        "pool_ratio": draw(st.sampled_from([0.0, 0.25, 0.5])),
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    runs(),
    st.integers(0, 2**32),
    st.sampled_from([1, 3, 12]),
    st.sampled_from([(0.5, 0.5), (0.1, 0.8)]),
)
def test_whatever_happens_nothing_is_lost_and_the_run_goes_on(
    tmp_path_factory: pytest.TempPathFactory,
    run: dict[str, Any],
    seed: int,
    slots: int,
    success: tuple[float, float],
) -> None:
    config = a_config(tmp_path_factory.mktemp("world") / "run", **run)
    with open_store(config.run.dir) as store:
        fill_pool(store, config.env.tasks)
        world = World(config, store, seed, slots=slots, success=success)
        world.run(250)
        assert_sums_are_conserved(world.ledger, store)
        world.go_on(2 + 3 * config.train.reuse)
        assert_sums_are_conserved(world.ledger, store)
        assert_replays_are_conserved(store, config.train.reuse)


def fill_pool(store: Store, tasks: list[str]) -> None:
    """Two successes of the first task from outside."""
    for name, source, steps in (("xa", "oracle", 2), ("xb", "imported", 3)):
        store.add_pool_member(
            *pool_member(name, task_id=tasks[0], source=source, steps=steps)  # type: ignore[arg-type]
        )


CURATED: dict[str, Any] = {
    "dynamic_number": True,
    "dynamic_length": True,
    "high_entropy": 0.8,
    "pool_ratio": 0.5,
}


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_and_history_give_the_same_decisions_with_restarts_or_without(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A data process that starts gives each lease its whole time again.
    monkeypatch.setattr(ledger, "LEASE_S", 1e6)
    monkeypatch.setattr(pool, "PER_TASK", 2)
    stories = []
    for name, restarts in (("through", False), ("again", False), ("restarted", True)):
        config = a_config(tmp_path / name, **CURATED)
        with open_store(config.run.dir) as store:
            fill_pool(store, config.env.tasks)
            world = World(config, store, seed, slots=12, success=(0.2, 0.9))
            world.run(2000, restarts=restarts)
            batches = [batch.id for batch in store.batches()]
            known = store.pool(evicted=True)
            stories.append(
                (
                    store.groups(),
                    store.trajectories(),
                    store.decisions(),
                    [store.batch_rows(batch_id) for batch_id in batches],
                    [(row.trajectory_id, row.added_at, row.evicted_at, row.used) for row in known],
                )
            )
    assert stories[0] == stories[1] == stories[2]
    groups, trajectories, _, rows, members = stories[0]
    assert any(group.pool_member for group in groups)
    assert len({group.size for group in groups}) > 1
    assert len({row.max_steps for row in trajectories}) > 1
    assert {row.reason for batch in rows for row in batch} == {"mixed", "pool", "low_entropy"}
    assert any(evicted_at for _, _, evicted_at, _ in members)
    assert any(used > 1 for *_, used in members)


REASONS = {"all_success", "all_fail", "single_member", "no_valid_member"}


@pytest.mark.parametrize("seed", range(4))
def test_april_loses_no_finished_trajectory_and_recycles_what_is_unfinished(
    tmp_path: Path, seed: int
) -> None:
    config = a_config(tmp_path / "run", scheduling="april", max_staleness=20)
    with open_store(config.run.dir) as store:
        world = World(config, store, seed, slots=16, invalid=0.0)
        world.go_on(8)
        assert {row.reason for row in store.groups("dropped")} <= REASONS
        assert any(max(store.staleness(batch.id - 1), default=0) for batch in store.batches())
        trained_on = {name for b in store.batches() for name in store.batch_groups(b.id)}
        waiting = set(world.ledger.group_table.groups)
        dropped = {row.id for row in store.groups("dropped")}
        assert {row.id for row in store.groups()} == trained_on | waiting | dropped


def test_without_recycling_what_is_unfinished_is_dropped_as_surplus(tmp_path: Path) -> None:
    config = a_config(
        tmp_path / "run",
        scheduling="oversample",
        max_staleness=20,
    )
    with open_store(config.run.dir) as store:
        world = World(config, store, 1, slots=16, invalid=0.0)
        world.go_on(4)
        assert {row.reason for row in store.groups("dropped")} - REASONS == {"surplus"}
        surplus = {row.id for row in store.groups("dropped") if row.reason == "surplus"}
        members = store.trajectories(group_ids=list(surplus))
        assert {(row.state, row.reason) for row in members} == {("dropped", "surplus")}


@pytest.mark.parametrize("reuse", [0, 1])
@pytest.mark.parametrize("scheduling", ["rollout", "batch"])
def test_with_no_staleness_allowed_the_run_is_on_policy_and_goes_on(
    tmp_path: Path, scheduling: str, reuse: int
) -> None:
    config = a_config(tmp_path / "run", scheduling=scheduling, max_staleness=0, reuse=reuse)
    with open_store(config.run.dir) as store:
        world = World(config, store, 5, slots=16)
        world.go_on(6 + 3 * reuse)
        assert set(store.staleness()) == {0}
        assert "stale" not in {row.reason for row in store.groups("dropped")}
        assert any(row.replay_of for row in store.batches()) == (reuse > 0)


def test_a_batch_wise_run_replaces_a_group_that_teaches_nothing(tmp_path: Path) -> None:
    config = a_config(tmp_path / "run", scheduling="batch", group_size=2)
    with open_store(config.run.dir) as store:
        world = World(config, store, 2, slots=4, invalid=0.0)
        world.go_on(4)
        assert {row.reason for row in store.groups("dropped")} <= {"all_success", "all_fail"}
        assert store.groups("dropped")


@pytest.fixture
def synchronous(tmp_path: Path) -> Config:
    return a_config(tmp_path / "run", scheduling="batch")


def test_the_trainers_turn_lasts_until_every_worker_has_the_newest_weights(
    synchronous: Config,
) -> None:
    with open_store(synchronous.run.dir) as store:
        world = World(synchronous, store, 0, slots=16, invalid=0.0)
        while world.batch is None:
            for slot, playing in world.playing.items():
                (world.lease if playing is None else world.play)(slot)
            assert not world.ledger.suspended
            world.train()
        ledger, batch = world.ledger, world.batch
        assert ledger.turn == f"the trainer's turn: batch {batch.batch_id} is not trained on yet"
        world.train()
        assert ledger.turn == "weights v1 are on their way"
        world.announce()
        assert ledger.turn == "rollout-0 and rollout-1 and rollout-2 must take weights v1 first"
        world.synchronise("rollout-1")
        ledger.versions.forget("rollout-2")  # it died
        assert ledger.turn == "rollout-0 must take weights v1 first"
        world.synchronise("rollout-0")
        assert not ledger.suspended


def test_a_synchronous_run_plays_before_the_first_weights_and_waits_for_a_worker_that_has_them(
    synchronous: Config,
) -> None:
    with open_store(synchronous.run.dir) as store:
        ledger: Ledger = make_ledger(synchronous, store)
        assert not ledger.suspended
        ledger.weights_published(
            WeightsPublished(policy_version=0, path="w0", digest="d", updates=0)
        )
        assert ledger.turn == "no rollout worker serves weights v0 yet"
        ledger.versions.observe(heartbeat("rollout-0", -1), is_new=True)
        assert ledger.suspended
        ledger.versions.observe(heartbeat("rollout-0", 0), is_new=False)
        assert not ledger.suspended


def test_a_trainer_that_goes_back_has_its_turn_until_it_has_caught_up(synchronous: Config) -> None:
    with open_store(synchronous.run.dir) as store:
        world = World(synchronous, store, 3, slots=16)
        world.go_on(3)
        world.version += 1
        world.ledger.hello(hello(1).model_copy(update={"policy_version": world.version}))
        world.batch = None
        assert "batch 2 is not trained" in world.ledger.turn
        again = a_batch(next_batch(world.ledger, world.version))
        assert again.batch_id == 2


def test_a_laggard_makes_room_for_fewer_groups_unless_it_is_too_far_behind(tmp_path: Path) -> None:
    config = a_config(tmp_path / "run", max_staleness=2)
    with open_store(config.run.dir) as store:
        world = World(config, store, 0, slots=1)
        limits = []
        for version in range(4):
            world.version = version
            world.coming = world._weights(version)
            world.announce()
            world.synchronise("rollout-0")
            world.synchronise("rollout-1")
            limits.append(world.ledger.group_limit)
        assert limits == [6, 4, 2, 6]  # rollout-2 is 0, 1, 2, 3 versions behind


def test_workers_are_behind_a_version_that_is_on_its_way(tmp_path: Path) -> None:
    """Its update is acknowledged: what is begun now is trained on after it."""
    config = a_config(tmp_path / "run", max_staleness=2)
    with open_store(config.run.dir) as store:
        world = World(config, store, 0, slots=1)
        for worker in ("rollout-0", "rollout-1", "rollout-2"):
            world.synchronise(worker)
        limits = [world.ledger.group_limit]
        for version in (1, 2):  # the trainer asks for a batch, neither is announced
            world.ledger.plan_batch(version)
            limits.append(world.ledger.group_limit)
        assert limits == [6, 4, 2]


def test_nothing_is_begun_while_every_worker_is_too_far_behind(tmp_path: Path) -> None:
    config = a_config(tmp_path / "run", max_staleness=0)
    with open_store(config.run.dir) as store:
        world = World(config, store, 0, slots=1)
        world.version = 1
        world.coming = world._weights(1)
        world.announce()
        world.lease(0)
        assert world.playing[0] is None
        [reason] = world.told
        assert "max_staleness = 0" in reason
        assert "1 version behind" in reason
        world.synchronise("rollout-1")
        world.lease(0)
        assert world.playing[0] is not None


@pytest.mark.parametrize("scheduling", ["rollout", "batch", "april"])
def test_with_groups_of_one_every_trajectory_with_a_verdict_is_trained_on(
    tmp_path: Path, scheduling: str
) -> None:
    config = a_config(
        tmp_path,
        scheduling=scheduling,
        group_size=1,
        groups_per_batch=4,
        advantage="step_baseline",
        max_staleness=1,
    )
    with open_store(tmp_path) as store:
        world = World(config, store, 1, slots=6, success=(0.9, 0.0))
        world.go_on(6)
        # Nothing but a trajectory without a verdict is dropped: not for its siblings, not as too old.
        assert {row.reason for row in store.trajectories() if row.reason} <= {"invalid"}
        assert {row.reason for row in store.groups("dropped")} <= {"no_valid_member"}
        assert world.ledger.updates >= 6
        assert_sums_are_conserved(world.ledger, store)
