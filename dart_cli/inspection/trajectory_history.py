"""What happened to one trajectory, in order, and why: `dart data why`, and the history on its page.

    explain_trajectory   the details of a trajectory -> its events, each with a time and a sentence
    Event                one of them

Every sentence follows from rows of the database: the lease, the steps, the verdict, the outcome of the
group, the batches that the trajectory was part of, and the weight of each step there. If the trajectory was
dropped, the rule is given with the numbers that decided.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bus.errors import StoreError
from dart_cli.data.curate import may_join
from dart_cli.data.groups import group_of
from dart_cli.data.ledger import LEASE_S
from dart_cli.data.replays import WHY_REFUSED, replay_subject
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import (
    BatchRow,
    GroupRow,
    JudgementRow,
    PoolRow,
    SampleRow,
    TrajectoryRow,
)
from dart_cli.data.versions import Lineage
from dart_cli.inspection.run_lookup import has_ended
from dart_cli.inspection.trajectories import Step, TrajectoryDetails, patch_words, why_left_out
from dart_cli.runtime.tables import verdict_words

_SAME_OUTCOME = "all {valid} valid members {outcome}: equal rewards teach nothing"
_WHY_GROUP = {
    "all_success": _SAME_OUTCOME.replace("{outcome}", "passed"),
    "all_fail": _SAME_OUTCOME.replace("{outcome}", "failed"),
    "equal_rewards": "all {valid} valid members have the same reward: that teaches nothing",
    "single_member": "one valid member cannot be compared with others",
    "no_valid_member": "none of {attempts} attempts had a verdict",
    "task_removed": "the run was started again without {task}",
    "surplus": "it was in play when the batch was full, and data.scheduling discards what is still in play",
}
_WHY_TRAJECTORY = {
    "invalid": "its environment or evaluator broke, or no completion came, so it does not measure the "
    "policy",
    "cancelled": "its environment process abandoned it",
    "lease_expired": "no step and no heartbeat for {lease_s:g} s",
    "worker_lost": "{row.worker} died, or its slot {row.slot} started again",
    "incomplete": "steps or images of {row.steps} steps were never submitted",
}


@dataclass(frozen=True)
class Event:
    """Something that happened to a trajectory."""

    text: str
    at: float | None = None  # unix seconds; None if it belongs to the event before it
    of_step: bool = False  # whether it is about one of the steps


def explain_trajectory(reader: Reader, details: TrajectoryDetails) -> list[Event]:
    """Return the events of one trajectory, oldest first."""
    subject = details.subject
    pool, row, group = subject.pool, subject.trajectory, subject.group
    events: list[Event] = []
    if row is not None and group is not None:
        events += _play_events(row, group, details.steps)
        events += _outcome_events(reader, row, group)
        events += map(_judge_event, details.judgements)
        if pool is not None:
            text = (
                f"joined the experience pool of {pool.task_id}; used in {pool.used} batches since"
            )
            events.append(Event(text, pool.added_at))
    elif pool is not None:
        events += _import_events(pool, details.steps)
    events += _training_events(reader, details)
    if pool is not None and pool.evicted_at is not None:
        events.append(Event("left the pool: newer successes took its place", pool.evicted_at))
    return events


# --- from lease to verdict -------------------------------------------------------------------


def _play_events(row: TrajectoryRow, group: GroupRow, steps: Sequence[Step]) -> Iterator[Event]:
    """Yield the lease, and each step."""
    limit = "" if row.max_steps is None else f", at most {row.max_steps} steps"
    yield Event(
        f"leased to {row.worker}, slot {row.slot}: {group.task_id}, seed {group.task_seed}, "
        f"attempt {row.attempt} of group {group.id} of {group.size}{limit}",
        row.leased_at,
    )
    for step in steps:
        by = f", {step.worker}" if step.worker else ""
        seconds = f"{step.model_s:.2f} s model, {step.env_s:.2f} s environment"
        yield Event(f"{_step_text(step)} ({_weights(step)}{by}; {seconds})", step.at, of_step=True)


def _step_text(step: Step) -> str:
    return f"step {step.step}: {' '.join(step.text.split())} -> {step.action_text}"


def _weights(step: Step) -> str:
    """Return the versions of the weights that sampled a step, in words."""
    if not step.versions:
        return "no version of this run's weights"
    oldest, newest = step.versions[0], step.versions[-1]
    return f"v{oldest}" + (f" to v{newest}" if newest > oldest else "")


def _outcome_events(reader: Reader, row: TrajectoryRow, group: GroupRow) -> Iterator[Event]:
    """Yield the verdict, the outcome of the group, and why the trajectory was dropped if it was."""
    is_over = has_ended(reader)
    if row.outcome is not None:
        yield Event(
            f"{verdict_words(row.outcome, row.reward)} after {row.steps} steps: "
            f"{row.verdict_reason} (stopped: {row.stop_reason})",
            row.ended_at,
        )
        yield from (Event(f"the application reported: {line}") for line in row.app_log.splitlines())
    elif row.state in ("leased", "playing"):
        cut_off = f"the run ended while it was {row.state}: it has no verdict"
        yield Event(cut_off if is_over else f"it is {row.state} now")
        return
    if row.state == "dropped" and group.reason != row.reason:
        why = _WHY_TRAJECTORY.get(row.reason, "never trained on")
        why = why.format(row=row, lease_s=LEASE_S)
        verdict_reason = f" ({row.verdict_reason})" if row.verdict_reason else ""
        yield Event(f"dropped ({row.reason}): {why}{verdict_reason}", row.ended_at)
        return
    members = reader.trajectories(group_ids=[group.id])
    if group.closed_at is not None:
        outcomes = [member.outcome for member in members]
        numbers = {outcome: outcomes.count(outcome) for outcome in ("pass", "fail", "invalid")}
        counts = ", ".join(f"{number} {outcome}" for outcome, number in numbers.items() if number)
        result = f"dropped ({group.reason})" if group.state == "dropped" else "ready for a batch"
        yield Event(
            f"its group {group.id} is over: {counts or 'no verdict'}; {result}", group.closed_at
        )
    if group.pool_member is not None:
        yield Event(
            f"{group.pool_member} of the pool joined the group, because all members had failed; it "
            f"played {_instance(reader.pool_member(group.pool_member), group)}"
        )
    if group.state == "dropped":
        yield Event(_why_dropped(reader, group, members))
    elif group.state == "open":
        live = sum(member.state in ("leased", "playing") for member in members)
        cut_off = f"the run ended before its group {group.id} was over"
        yield Event(
            cut_off if is_over else f"it waits for its group {group.id}: {live} more are in play"
        )
    elif group.state == "ready":
        cut_off = "the run ended before a batch took it; it stays ready if the run goes on"
        waits = "it waits for a batch: enough groups must be ready first"
        yield Event(cut_off if is_over else waits)


def _judge_event(row: JudgementRow) -> Event:
    """Return the event that a judge gave its verdict."""
    cost = f"{row.calls} calls and {row.seconds:.1f} s"
    outcome = verdict_words(row.outcome, row.score)
    return Event(
        f"judge {row.judge} ({row.use}): {outcome} after {cost}: {row.reason or '-'}", row.at
    )


def _instance(member: PoolRow | None, group: GroupRow) -> str:
    """Return which instance a member of the pool played, compared with the instance of the group."""
    if member is None:
        return "an unknown instance"
    which = "the same" if member.task_seed == group.task_seed else "another"
    return f"{which} instance, seed {member.task_seed}"


def _import_events(row: PoolRow, steps: Sequence[Step]) -> Iterator[Event]:
    """Yield how a trajectory that the run did not play came into the pool, and its steps."""
    logprobs = "known" if row.has_logprobs else "unknown, so it is weighted as a demonstration"
    origin = f", first {row.origin}" if row.origin else ""
    yield Event(
        f"came into the pool from outside the run: {row.task_id}, seed {row.task_seed}, source "
        f"{row.source}{origin}, {row.steps} steps, log-probabilities {logprobs}",
        row.added_at,
    )
    yield from (Event(_step_text(step), of_step=True) for step in steps)


# --- why its group was dropped ---------------------------------------------------------------


def _why_dropped(reader: Reader, group: GroupRow, members: Sequence[TrajectoryRow]) -> str:
    """Return the rule by which a group was dropped, and the numbers that decided."""
    if group.reason == "stale":
        return _why_stale(reader, group, members)
    valid = sum(member.outcome in ("pass", "fail") for member in members)
    text = _WHY_GROUP.get(group.reason, f"rule {group.reason}")
    text = text.format(valid=valid, attempts=len(members), task=group.task_id)
    return text + (_why_no_pool_member(reader, group, valid) if group.reason == "all_fail" else "")


def _why_no_pool_member(reader: Reader, group: GroupRow, valid: int) -> str:
    """Return why no success of the pool joined a group that failed altogether."""
    ratio = _setting(reader, "data", "pool_ratio")
    if not ratio:
        return "; data.pool_ratio = 0, so no success of the pool joins such a group"
    if not may_join(valid, ratio):
        return f"; one success among {valid + 1} would be a larger share than data.pool_ratio = {ratio}"
    return f"; the pool had no success of {group.task_id}"


def _why_stale(reader: Reader, group: GroupRow, members: Sequence[TrajectoryRow]) -> str:
    """Return the oldest version that sampled a token, beside the version of the trainer."""
    sampled_by = {
        span.version
        for member in members
        if member.reason == group.reason
        for step in reader.steps(member.id)
        for span in step.sampled.version_spans
    }
    published = [
        batch.trained_version
        for batch in reader.batches()
        if batch.trained_version is not None
        and batch.trained_at is not None
        and group.closed_at is not None
        and batch.trained_at <= group.closed_at
    ]
    lineage = Lineage(reader.versions(), _setting(reader, "weights", "publish_every") or 1)
    trainer = max(published, default=0)
    updates = lineage.updates(trainer)
    oldest = max(sampled_by, key=lambda version: lineage.behind(version, updates), default=0)
    return (
        f"its group's oldest token was sampled by v{oldest} (update "
        f"{lineage.updates(oldest)}), the trainer was at v{trainer} (update {updates}): "
        f"{lineage.behind(oldest, updates)} versions behind, data.max_staleness = "
        f"{_setting(reader, 'data', 'max_staleness')}"
    )


def _setting(reader: Reader, section: str, key: str) -> Any:
    """Return the value of a key when the run was last started; None if it never was."""
    try:
        return json.loads(reader.run().config).get(section, {}).get(key)
    except StoreError:  # the run was never started and holds only a pool
        return None


# --- what it was trained with ----------------------------------------------------------------


def _training_events(reader: Reader, details: TrajectoryDetails) -> Iterator[Event]:
    """Yield each batch that the trajectory was part of, with the weight of each of its steps there."""
    for batch_id in sorted({use.batch_id for step in details.steps for use in step.uses}):
        batch = reader.batch(batch_id)
        uses = [
            (step, use) for step in details.steps for use in step.uses if use.batch_id == batch_id
        ]
        yield Event(
            f"part of batch {batch.id}{_with_group(reader, details, batch)}: formed when the trainer "
            f"was at v{batch.formed_version}, mean reward {batch.reward:.2f}; "
            f"{sum(use.weight != 0 for _, use in uses)} of its {len(uses)} steps are trained on",
            batch.formed_at,
        )
        samples = reader.batch_rows(batch_id)
        for step, use in uses:
            yield Event(_use_text(step, use, batch, samples), of_step=True)
        if batch.state == "trained" and batch.trained_at is not None:
            yield Event(f"batch {batch.id} is trained{_new_weights(batch)}", batch.trained_at)
        else:
            cut_off = "the run ended before the trainer acknowledged it"
            waits = "the trainer has not acknowledged it yet"
            yield Event(f"batch {batch.id} is served, {cut_off if has_ended(reader) else waits}")
        yield from _replay_events(reader, batch_id)


def _new_weights(batch: BatchRow) -> str:
    return "" if batch.trained_version is None else f": weights v{batch.trained_version}"


def _replay_events(reader: Reader, batch_id: int) -> Iterator[Event]:
    """Yield the replays of a batch, and why there are no more of them if that was decided."""
    subject = replay_subject(batch_id)
    refusals = [decision for decision in reader.decisions(subject) if not decision.used]
    skipped = {refusal.batch_id for refusal in refusals}
    for batch in reader.replays(batch_id):
        result = f"is trained{_new_weights(batch)}" if batch.state == "trained" else "is served"
        result = "the trainer skipped" if batch.id in skipped else result
        yield Event(
            f"{subject} is replayed (use {batch.reuse + 1}) as batch {batch.id}, which {result}",
            batch.trained_at or batch.formed_at,
        )
    for refusal in refusals:
        why = WHY_REFUSED.get(refusal.reason, "")
        yield Event(f"{subject} is not trained on again ({refusal.reason}): {why}")


def _with_group(reader: Reader, details: TrajectoryDetails, batch: BatchRow) -> str:
    """Return the groups with which a member of the pool went into the batch; empty for other trajectories."""
    groups = reader.groups_by_id(reader.batch_groups(batch.id)).values()
    joined = [
        f"{group.id} ({_instance(details.subject.pool, group)})"
        for group in groups
        if group.pool_member == details.subject.id
    ]
    return f" with the all-fail group {', '.join(joined)}" if joined else ""


def _use_text(step: Step, use: SampleRow, batch: BatchRow, samples: Sequence[SampleRow]) -> str:
    """Return how a step was trained on, or why it was left out. `samples` are all of the batch."""
    entropy = step.entropy if use.entropy is None else use.entropy
    numbers = "" if entropy is None else f", entropy {entropy:.4f} nats"
    if use.gap_mean is not None and use.gap_largest is not None:
        numbers += (
            f", log-probabilities off by {use.gap_mean:+.4f} (trainer minus engine, mean over "
            f"tokens; {use.gap_largest:.4f} at most)"
        )
    numbers += "".join(f", {patch_words(patch)}" for patch in step.patches)
    if use.weight == 0:
        why = why_left_out(use)
        group = group_of(use.trajectory_id)
        entropies = [
            sample.entropy
            for sample in samples
            if sample.weight
            and sample.entropy is not None
            and group_of(sample.trajectory_id) == group
        ]
        if use.reason == "low_entropy" and entropies:
            why += (
                f"; the lowest entropy that is trained on in its group is {min(entropies):.4f} nats"
            )
        return f"step {step.step} is left out ({use.reason}{numbers}){': ' + why if why else ''}"
    expected = "" if use.baseline is None else f" (expected reward {use.baseline:.3f}"
    if use.value is not None:
        expected += f" by its task's baseline, {use.value:.3f} by the critic"
    expected += ")" if expected else ""
    weights = _weights(step)
    if step.versions:
        behind = batch.formed_version - step.versions[0]
        weights = f"sampled by weights {weights}, {behind} version{'s'[: behind != 1]} behind"
    return (
        f"step {step.step} is trained on ({use.reason}): advantage {use.trained_advantage:+.3f}"
        f"{expected}, weight {use.weight:.3g}{numbers}, {weights}"
    )
