"""A small run, its messages, and a ledger that is played on, for the tests of the data service."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from bus.messages import (
    Batch,
    BatchTrained,
    Heartbeat,
    Hint,
    Lease,
    LeaseRequest,
    Outcome,
    PointerCandidate,
    PointerMap,
    SampledTokens,
    StepRecord,
    StopReason,
    TrainerHello,
    TrajectoryEnd,
    VersionSpan,
)
from bus.packed import int32s
from bus.weights import SyncDone
from dart_cli.config.schema import Config
from dart_cli.config.task_split import training_tasks
from dart_cli.data.curate import FinishedGroup, Member
from dart_cli.data.ledger import Ledger
from dart_cli.data.loading import load
from dart_cli.data.replays import GAP
from dart_cli.data.scheduler import NotYet, make_scheduler
from dart_cli.data.store.rows import PoolRow, PoolSource
from dart_cli.data.store.steps import StepRow
from dart_cli.data.store.writer import Store
from envs.contract.blobs import content_hash
from tests.copies import copy_with


def small_config(
    run_dir: Path, *, train: dict[str, object] | None = None, **data: object
) -> Config:
    """Return the configuration of a run of two tasks in groups of four, two groups a batch."""
    settings = {"group_size": 4, "groups_per_batch": 2, "max_open_groups": 6, **data}
    tasks = [task.id for task in training_tasks(Config())[:2]]
    return Config.model_validate(
        {
            "run": {"dir": run_dir, "seed": 3},
            "env": {"tasks": tasks},
            "data": settings,
            "train": train or {},
        }
    )


def picture(*parts: object) -> bytes:
    """Return bytes that stand for a screenshot; other `parts` give other bytes."""
    return b"\x89PNG" + hashlib.blake2b(repr(parts).encode()).digest() * 20


def step_record(
    trajectory_id: str, step: int, *, version: int = 0, image: bytes | None = None
) -> StepRecord:
    """Return a step whose numbers follow from its trajectory and index."""
    image = image or picture(trajectory_id, step)
    tokens = [step + 1, step + 2, 7]
    return StepRecord(
        trajectory_id=trajectory_id,
        step=step,
        screenshot=image,
        media_type="image/png",
        image_hashes=[content_hash(image)],
        prompt_token_ids=[5] * 40 + [step],
        sampled=SampledTokens(
            token_ids=tokens,
            behaviour_logprobs=[-0.1 * (step + 1), -1 / 3, -2.0],
            entropies=[0.1, 0.2, 0.3 * (crc32(f"{trajectory_id}:{step}".encode()) % 7)],
            version_spans=[VersionSpan(version=version, start=0, end=3)],
        ),
        worker="rollout-0",
        text="Action: click(start_box='(1,2)')",
        action={"kind": "click", "x": 1, "y": 2, "button": "left"},
        error="",
        model_s=0.01,
        env_s=0.001,
        instruction="" if step else "click the red one",
        hint=Hint(start=step, end=step + 2, token_ids=int32s([9, step, 9])) if step % 2 else None,
    )


START, PAD, END = 90, 91, 92
"""The tokens of a pointer."""

DRAG = SampledTokens(
    token_ids=[5, START, PAD, END, 6, START, PAD, END, 7],
    behaviour_logprobs=[-0.5, -0.25, 0.0, -3.5, -0.125, -1.0, 0.0, -1 / 3, -2.0],
    entropies=[1.0, 0.5, 0.0, 4.0, 0.5, 0.25, 0.0, 2.0, 0.125],
    version_spans=[VersionSpan(version=0, start=0, end=9)],
    patches=[-1, -1, -1, 5, -1, -1, -1, 0, -1],
)
"""The answer of a policy that points to a screen of at least six cells: two pointers."""


def pointer_record(trajectory_id: str, step: int, **changes: object) -> StepRecord:
    """Return a step with the two pointers of a drag, each with its map."""
    heat = bytes([7, 0, 30, 1, 2, 255])
    best = PointerCandidate(x=5 / 6, y=0.75, score=0.5)
    maps = [
        PointerMap(position=3, rows=2, columns=3, heat=heat, candidates=[best]),
        PointerMap(position=7, rows=2, columns=3, heat=heat[::-1]),
    ]
    plain = step_record(trajectory_id, step)
    return copy_with(copy_with(plain, sampled=DRAG, pointed=maps), **changes)


def trajectory_end(
    trajectory_id: str, steps: int, outcome: Outcome = "pass", stop_reason: StopReason = "done"
) -> TrajectoryEnd:
    """Return the message for the end of an episode."""
    return TrajectoryEnd(
        trajectory_id=trajectory_id,
        steps=steps,
        outcome=outcome,
        reason="because",
        stop_reason=stop_reason,
        screenshot=picture(trajectory_id, "final"),
        reset_s=0.01,
        wall_s=0.1,
    )


def finished_group(name: str, outcomes: list[Outcome]) -> FinishedGroup:
    """Return a group whose members took two steps each."""
    return FinishedGroup(
        name, tuple(Member(f"{name}-{i:02d}", o, 2) for i, o in enumerate(outcomes))
    )


def pool_member(
    name: str,
    *,
    task_id: str = "mini/click",
    source: PoolSource = "oracle",
    steps: int = 2,
    has_logprobs: bool = False,
    added_at: float = 500.0,
    first: bytes | None = None,
) -> tuple[PoolRow, list[StepRow], dict[str, bytes]]:
    """Return a success from outside the run; `first` is its first screenshot."""
    row = PoolRow(name, "mini", task_id, 7, source, steps, has_logprobs, "", added_at, None, 0)
    rows, images = [], {}
    for number in range(steps):
        record = step_record(name, number, image=None if number else first)
        images[record.image_hashes[-1]] = record.screenshot
        rows.append(
            StepRow(
                trajectory_id=name,
                step=number,
                at=added_at,
                screenshot=record.image_hashes[-1],
                image_hashes=record.image_hashes,
                prompt_token_ids=record.prompt_token_ids,
                sampled=record.sampled,
                text=record.text,
                action=record.action,
                error="",
                model_s=0.0,
                env_s=0.0,
                worker="",
            )
        )
    return row, rows, images


@dataclass
class Clock:
    """A clock that a test sets; each reading advances it by `tick` seconds."""

    now: float = 1000.0
    tick: float = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def make_ledger(config: Config, store: Store, clock: Clock | None = None) -> Ledger:
    """Return a ledger as the service makes it."""
    tasks = training_tasks(config)
    store.begin_run(config.run.seed, config.model_dump_json(), tasks)
    clock = clock or Clock()
    return Ledger(config, store, tasks, make_scheduler(config, tasks), wall=clock, monotonic=clock)


def ask_lease(
    ledger: Ledger, slot: int, worker: str = "env-0", *, started_at: float = 0.0
) -> Lease:
    """Return a lease, which the ledger must give."""
    reply = ledger.lease(
        LeaseRequest(worker=worker, slot=slot, suites=["mini"], started_at=started_at)
    )
    assert isinstance(reply, Lease), reply
    return reply


def play(
    ledger: Ledger, slot: int, outcome: Outcome = "pass", *, steps: int = 2, version: int = 0
) -> Lease:
    """Lease, play and submit one trajectory."""
    lease = ask_lease(ledger, slot)
    for step in range(steps):
        assert ledger.step(step_record(lease.trajectory_id, step, version=version)).accepted
    assert ledger.end(trajectory_end(lease.trajectory_id, steps, outcome)).accepted
    return lease


def play_group(ledger: Ledger, outcomes: list[Outcome], *, steps: int = 2, version: int = 0) -> str:
    """Play one group with these outcomes, in order of its members; returns its id."""
    leases = [ask_lease(ledger, slot) for slot in range(len(outcomes))]
    assert len({lease.group_id for lease in leases}) == 1
    for lease, outcome in zip(leases, outcomes, strict=True):
        for step in range(steps):
            ledger.step(step_record(lease.trajectory_id, step, version=version))
        ledger.end(trajectory_end(lease.trajectory_id, steps, outcome))
    return leases[0].group_id


def pointing_config(run_dir: Path, **changes: object) -> Config:
    """Return `small_config` with a policy that points; without `changes` its engine is scripted."""
    defaults = small_config(run_dir).model_dump()
    changes = changes or {"rollout": {"engine": "scripted"}}
    return Config.model_validate({**defaults, "policy": {"pointing": "pointer"}, **changes})


def play_pointing(ledger: Ledger) -> list[str]:
    """Play the groups of one batch, whose members point twice in their one step.

    Returns the ids of the first group's trajectories.
    """
    names = []
    for _ in range(2):
        leases = [ask_lease(ledger, slot) for slot in range(len(MIXED))]
        for lease, outcome in zip(leases, MIXED, strict=True):
            ledger.step(pointer_record(lease.trajectory_id, 0))
            ledger.end(trajectory_end(lease.trajectory_id, 1, outcome))
            names.append(lease.trajectory_id)
    return names[: len(MIXED)]


def play_paths(ledger: Ledger, members: Sequence[tuple[Outcome, str]]) -> str:
    """Play one group, and return its id. Of each member its outcome and path are given.

    A path has a letter for each screen. The action on a screen depends on the screen that follows.
    """
    leases = [ask_lease(ledger, slot) for slot in range(len(members))]
    for member, (lease, (outcome, path)) in enumerate(zip(leases, members, strict=True)):
        for step, screen in enumerate(path):
            record = step_record(lease.trajectory_id, step, image=picture(screen))
            action = {
                "kind": "click",
                "x": ord((path + outcome)[step + 1]),
                "y": 2,
                "button": "left",
            }
            tokens = [*record.sampled.token_ids[:2], 10 + member]
            sampled = record.sampled.model_copy(update={"token_ids": tokens})
            record = record.model_copy(update={"action": action, "sampled": sampled})
            assert ledger.step(record).accepted
        ledger.end(trajectory_end(lease.trajectory_id, len(path), outcome))
    return leases[0].group_id


FORKED: list[tuple[Outcome, str]] = [
    ("pass", "abcd"), ("fail", "abx"), ("fail", "ayz"), ("pass", "abd")
]  # fmt: skip
"""For `play_paths`: of its two failures the first leaves the way of the passes at b, the second at a."""


MIXED: list[Outcome] = ["pass", "fail", "fail", "pass"]


def next_batch(ledger: Ledger, trainer_version: int, run_s: float = 0.0) -> Batch | NotYet:
    """Plan, load and file the trainer's next batch, and return it; `dart data` loads in a thread."""
    plan = ledger.plan_batch(trainer_version, run_s)
    if isinstance(plan, NotYet):
        return plan
    batch = ledger.file_batch(plan, load(ledger.store, plan))
    assert batch is not None  # nothing has changed meanwhile
    return batch


def a_batch(reply: Batch | NotYet) -> Batch:
    """Return the reply, which must be a batch."""
    assert isinstance(reply, Batch), reply
    return reply


def batch_trained(
    batch_id: int, version: int | None = None, *, is_skipped: bool = False
) -> BatchTrained:
    """Return the trainer's acknowledgement of a batch."""
    after = batch_id if version is None else version
    metrics = {"loss": 1.0 / batch_id, "low_ess": float(is_skipped), "skipped": float(is_skipped)}
    return BatchTrained(batch_id=batch_id, policy_version=after, metrics=metrics)


def hello(last_batch_id: int) -> TrainerHello:
    """Return the hello of a trainer whose checkpoint ends at that batch."""
    return TrainerHello(
        policy_version=last_batch_id,
        last_batch_id=last_batch_id,
        updates=last_batch_id,
    )


def picture_of(ledger: Ledger) -> object:
    """Return all parts of a ledger that must survive a restart."""
    groups = {
        group.id: (
            group.state,
            group.task_seed,
            (group.size, group.max_steps),
            group.pool_member and group.pool_member.trajectory_id,
            {
                a.id: (a.state, a.outcome, a.reward, a.slot, a.versions, a.entropies)
                for a in group.attempts.values()
                if a.state != "dropped"
            },
            len(group.attempts),
        )
        for group in ledger.group_table.groups.values()
    }
    tasks = {
        task_id: (
            fares,
            ledger.leasing.next_size(task_id),
            ledger.leasing.step_limit(task_id),
            [member.trajectory_id for member in ledger.pool.members(task_id)],
            ledger.baselines.expected(task_id, 6),
        )
        for task_id, fares in ledger.progress.tasks.items()
    }
    batches, own = ledger._batches, ledger.progress.own
    replays = vars(batches._replays), batches._totals
    played = own.passed, own.completions, own.rewards.means, own.malformed.means
    return groups, ledger.group_table.opened, ledger.updates, ledger.weights, tasks, replays, played


def assert_sums_are_conserved(ledger: Ledger, store: Store) -> None:
    """Assert that each trajectory is in play, pending, in one batch, trained, or dropped for a reason.

    Each step of a trajectory in a batch must be trained on, or left out for a reason.
    """
    rows = store.trajectories()
    live = {attempt.id for _, attempt in ledger.group_table.live_attempts()}
    pending = {a.id for group in ledger.group_table.groups.values() for a in group.finished}
    for row in rows:
        reasons = [decision for decision in store.decisions(row.id) if decision.reason != "pool"]
        assert (row.id in live) == (row.state in ("leased", "playing"))
        assert (row.id in pending) == (row.state == "finished")
        assert (row.batch_id is not None) == (row.state in ("batched", "trained"))
        assert bool(row.reason) == (row.state == "dropped")
        assert [d.used for d in reasons] == {
            "dropped": [False],
            "batched": [True],
            "trained": [True],
        }.get(row.state, [])
        assert row.outcome != "invalid" or row.state == "dropped"
    assert {row.trajectory_id for row in store.pool()} == {
        member.trajectory_id
        for task_id in {row.task_id for row in store.pool(evicted=True)}
        for member in ledger.pool.members(task_id)
    }
    for batch in store.batches():
        _assert_steps_are_conserved(store, batch.replay_of or batch.id)
        assert store.batch_steps(batch.id) == store.batch_steps(batch.replay_of or batch.id)


def assert_replays_are_conserved(store: Store, reuse: int) -> None:
    """Assert that each use of a batch comes once, in order, in time and for a reason; none after a refusal."""
    rows = store.batches()
    assert [row.id for row in rows] == list(range(1, len(rows) + 1))
    uses: dict[int, list[int]] = {}  # of a batch -> the batches that are uses of it
    since_fresh = 0
    for row in rows:
        if row.replay_of is None:
            assert row.reuse == 0
            uses[row.id], since_fresh = [row.id], 0
        else:
            since_fresh += 1
            assert since_fresh <= reuse
            assert row.reuse == len(uses[row.replay_of]) <= reuse
            assert row.id - uses[row.replay_of][-1] >= GAP
            uses[row.replay_of].append(row.id)
    for first, ids in uses.items():
        decisions = store.decisions(f"batch {first}")
        assert [decision.batch_id for decision in decisions if decision.used] == ids[1:]
        assert all(decision.reason == "replay" for decision in decisions if decision.used)
        refusals = [decision for decision in decisions if not decision.used]
        assert refusals in ([], decisions[-1:])
        skipped_ids = [batch_id for batch_id in ids[1:] if _is_skipped(store, batch_id)]
        assert bool(refusals) or not skipped_ids


def _is_skipped(store: Store, batch_id: int) -> bool:
    return any(metric.value for metric in store.metrics("skipped") if metric.step == batch_id)


def _assert_steps_are_conserved(store: Store, batch_id: int) -> None:
    """Assert that each step of the batch's groups, and of the pool's members in them, has one row."""
    rows = store.batch_rows(batch_id)
    groups = [group for group in store.groups() if group.batch_id == batch_id]
    members = [row for row in store.trajectories(group_ids=[g.id for g in groups]) if row.batch_id]
    pool_members = [
        member for g in groups if g.pool_member and (member := store.pool_member(g.pool_member))
    ]
    own = [(row.id, step) for row in members for step in range(row.steps or 0)]
    pool_steps = [(row.trajectory_id, step) for row in pool_members for step in range(row.steps)]
    own_rows = [s for s in rows if s.reason != "pool"]
    pool_rows = [s for s in rows if s.reason == "pool"]
    assert sorted((s.trajectory_id, s.step) for s in own_rows) == sorted(own)
    assert sorted((s.trajectory_id, s.step) for s in pool_rows) == sorted(pool_steps)
    assert all((s.weight == 0) == (s.reason == "low_entropy") for s in rows)
    assert [(s.trajectory_id, s.step, s.advantage) for s in rows if s.weight] == [
        (s.trajectory_id, s.step, s.advantage) for s in store.batch_steps(batch_id)
    ]
    for group in groups:
        of_group = [row for row in members if row.group_id == group.id]
        assert len({row.max_steps for row in of_group}) == 1
        outcomes = {row.outcome for row in of_group}
        if group.size == 1 and not group.pool_member:
            assert outcomes in ({"pass"}, {"fail"})
        else:
            assert outcomes == ({"fail"} if group.pool_member else {"pass", "fail"})


def heartbeat(
    worker: str,
    version: int = -1,
    *,
    state: str = "ready",
    trajectories: Sequence[str] = (),
    waiting_for: str = "",
    host: str = "here",
    pid: int = 1,
) -> Heartbeat:
    """Return the heartbeat of a process; its role follows from its name."""
    return Heartbeat(
        role=next((role for role in ("rollout", "train") if worker.startswith(role)), "env"),
        worker=worker,
        host=host,
        pid=pid,
        started_at=1.0,
        sent_at=2.0,
        endpoint="",
        policy_version=version,
        state=state,
        waiting_for=waiting_for,
        waiting_s=0.0,
        gauges={"slots": 2.0},
        trajectories=list(trajectories),
    )


def sync_done(worker: str, version: int, error: str = "") -> SyncDone:
    """Return the message of a rollout worker that has taken a weight set, or refused it."""
    return SyncDone(
        worker=worker,
        policy_version=version,
        error=error,
        waited_s=0.5,
        transfer_s=0.25,
        pause_s=0.125,
        in_flight=3,
    )


def state_of(store: Store, trajectory_id: str) -> str:
    row = store.trajectory(trajectory_id)
    assert row is not None
    return f"{row.state}:{row.reason}" if row.reason else row.state


FAILED: list[Outcome] = ["fail"] * 4


PASSED: list[Outcome] = ["pass"] * 4


def one_task(run_dir: Path, **data: object) -> Config:
    """Return the configuration of a run of one task, one group of four a batch."""
    config = small_config(run_dir, **{"groups_per_batch": 1, **data})
    return config.model_copy(
        update={"env": config.env.model_copy(update={"tasks": config.env.tasks[:1]})}
    )


def task_of(config: Config) -> str:
    return config.env.tasks[0]


def file_member(store: Store, config: Config, name: str = "xa", **changes: object) -> None:
    """Add a success of the run's task from outside to the pool."""
    fields = {"task_id": task_of(config), **changes}
    assert store.add_pool_member(*pool_member(name, **fields))  # type: ignore[arg-type]


def train(ledger: Ledger, version: int) -> Batch:
    """Serve and acknowledge a batch, which must be ready, and return it."""
    batch = a_batch(next_batch(ledger, version))
    ledger.batch_trained(batch_trained(batch.batch_id, version + 1))
    return batch
