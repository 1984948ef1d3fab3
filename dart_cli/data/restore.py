"""What a ledger has in memory, read from the store at each start of `dart data`.

restored_groups    the live groups with their attempts
restore_progress   how tasks fare, and the newest metrics
newest_weights     the weight set that was published last
"""

from __future__ import annotations

from collections.abc import Mapping

from bus.weights import WeightsPublished
from dart_cli.algo.advantage import RewardKind
from dart_cli.algo.selection import mean_entropy
from dart_cli.config.schema import DataConfig
from dart_cli.data.groups import Attempt, Group, GroupTable, most_attempts
from dart_cli.data.own_play import restored
from dart_cli.data.progress import RunProgress
from dart_cli.data.store.rows import GroupRow, TrajectoryRow
from dart_cli.data.store.writer import Store
from envs.base import Task

METRICS_OF = 100
"""Batches, the newest ones, whose metrics are read again."""


def restored_groups(
    store: Store, tasks: Mapping[str, Task], data: DataConfig, now: float
) -> GroupTable:
    """The groups that are open or wait for a batch, with every attempt at them.

    `now` in monotonic seconds: a lease may have been played on while no data process was running.
    It gets its whole time again, and its worker's heartbeats or their absence decide.
    """
    table = GroupTable(opened=store.newest_group())
    for row in store.groups("open", "ready"):
        table.add(_group(store, row, tasks.get(row.task_id), data))
    for member in store.trajectories(group_ids=list(table.groups)):
        group = table.groups[member.group_id]
        group.max_steps = member.max_steps or group.max_steps  # of all its leases alike
        table.add_attempt(group, _attempt(store, member, data, now))
    return table


def restore_progress(progress: RunProgress, store: Store, formed: int, kind: RewardKind) -> None:
    """Go on from what was written down; `formed` is the newest batch's id, `kind` is data.reward.

    A run of an older dart has no row of a task yet: it gets them from its trajectories.
    """
    if rows := store.task_progress():
        progress.restore(rows)
    else:
        for judged in store.outcomes():
            if not judged.cancelled:
                progress.outcome(judged.task_id, judged.outcome, judged.steps)
            if judged.counted:
                passed = judged.outcome == "pass"
                progress.count(judged.task_id, passed, judged.oldest_version, judged.reward)
        for task_id, task in progress.tasks.items():
            store.save_task(task.row(task_id))
        store.commit()
    progress.own = restored(store, kind)
    for point in store.metrics(after=formed - METRICS_OF):
        progress.train_metrics(point.step, {point.name: point.value})


def newest_weights(store: Store) -> WeightsPublished | None:
    """The weight set that was published last; None before the first."""
    newest = store.newest_version()
    if newest is None:
        return None
    return WeightsPublished(
        policy_version=newest.policy_version,
        path=newest.path,
        digest=newest.digest,
        updates=newest.updates or 0,  # of an older dart: unknown
    )


def _group(store: Store, row: GroupRow, task: Task | None, data: DataConfig) -> Group:
    group = Group(
        row.id,
        row.number,
        row.suite,
        row.task_id,
        row.task_seed,
        row.size,
        task.max_steps if task else 0,  # without its task it is dropped
        most_attempts(row.size, data.replacements),
        "open" if row.state == "open" else "ready",
    )
    if row.pool_member is not None:
        group.pool_member = store.pool_member(row.pool_member)
    return group


def _attempt(store: Store, row: TrajectoryRow, data: DataConfig, now: float) -> Attempt:
    attempt = Attempt(row.id, row.attempt, row.worker, row.slot, row.sampling_seed, now)
    if row.outcome is not None:
        attempt.judged(row.outcome, row.reward, data.reward)
    attempt.steps = row.steps or 0
    attempt.counted = bool(row.counted)
    match row.state:
        case "leased" | "playing" | "finished" | "dropped":
            attempt.state = row.state
        case "batched" | "trained":
            attempt.state = "finished"
    if attempt.state in ("playing", "finished"):
        attempt.versions = store.versions_sampled(row.id)
        attempt.entropies = {
            step: mean_entropy(values) for step, values in store.entropies(row.id).items()
        }
    return attempt
