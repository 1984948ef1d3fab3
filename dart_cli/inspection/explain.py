"""What happened to one trajectory, in order, and why: `dart data why`.

    explain_trajectory   a Subject -> its events, each with moment, sentence and numbers
    print_events         the same on a terminal

Every sentence follows from rows of the database: the lease, the steps, the verdict, the outcome of
its group, the batches it was part of and the weight of each of its steps there. If it was dropped,
the rule is given with the numbers that decided.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from rich.console import Console

from bus.errors import StoreError
from dart_cli.data.curate import may_join
from dart_cli.data.groups import group_of
from dart_cli.data.lineage import restored
from dart_cli.data.replay import WHY_REFUSED, replay_subject
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import BatchRow, GroupRow, PoolRow, SampleRow, StepRow, TrajectoryRow
from dart_cli.evaluation.marks import action_words
from dart_cli.inspection.find import Subject, has_ended
from dart_cli.inspection.text import versions_words
from dart_cli.policy.pointer.patches import DrawnPatch, drawn, drawn_patches
from dart_cli.runtime.tables import moment, verdict_words

LEFT_OUT: dict[str, str] = {
    "low_entropy": "the policy was most certain here; data.high_entropy leaves such steps out",
}
"""Why a step of a batch is not trained on, in words."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a trajectory."""

    text: str
    at: float | None = None  # unix seconds; None where it belongs to the event before it
    numbers: dict[str, Any] = field(default_factory=dict)


def explain_trajectory(reader: Reader, subject: Subject) -> list[Event]:
    """The events of one trajectory, oldest first."""
    events: list[Event] = []
    steps = reader.steps(subject.id)
    trajectory, group = subject.trajectory, subject.group
    if trajectory is not None and group is not None:
        events += _played(trajectory, group, steps)
        events += _judged(reader, trajectory, group)
    elif subject.pool is not None:
        events += _came_in(subject.pool, steps)
    if subject.pool is not None and trajectory is not None:
        events.append(_joined_pool(subject.pool))
    events += _trained(reader, subject, steps)
    if subject.pool is not None and subject.pool.evicted_at is not None:
        events.append(
            Event("left the pool: newer successes took its place", subject.pool.evicted_at)
        )
    return events


def print_events(console: Console, events: Sequence[Event]) -> None:
    """One line for each event; one that belongs to the event before it is indented."""
    for event in events:
        when = f"{moment(event.at)}  " if event.at is not None else " " * 23
        console.print(f"{when}{event.text}", soft_wrap=True)


def events_as_json(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The events as plain values."""
    return [asdict(event) for event in events]


# --- from lease to verdict -------------------------------------------------------------------


def _played(
    trajectory: TrajectoryRow, group: GroupRow, steps: Sequence[StepRow]
) -> Iterator[Event]:
    limit = "" if trajectory.max_steps is None else f", at most {trajectory.max_steps} steps"
    yield Event(
        f"leased to {trajectory.worker}, slot {trajectory.slot}: {group.task_id}, seed "
        f"{group.task_seed}, attempt {trajectory.attempt} of group {group.id} of {group.size}{limit}",
        trajectory.leased_at,
        {"worker": trajectory.worker, "slot": trajectory.slot, "max_steps": trajectory.max_steps},
    )
    for step in steps:
        did = action_words(step.action) if step.action else f"no action: {step.error}"
        by = f", {step.worker}" if step.worker else ""
        sampled = sorted({span.version for span in step.sampled.version_spans})
        weights = f"v{sampled[0]}" + (f" to v{sampled[-1]}" if len(sampled) > 1 else "")
        yield Event(
            f"step {step.step}: {' '.join(step.text.split())} -> {did} "
            f"({weights}{by}; {step.model_s:.2f} s model, {step.env_s:.2f} s env)",
            step.at,
            {"step": step.step, "versions": sampled, "model_s": step.model_s, "env_s": step.env_s},
        )


def _judged(reader: Reader, trajectory: TrajectoryRow, group: GroupRow) -> Iterator[Event]:
    """Its verdict, its group's outcome, and why it was dropped if it was."""
    if trajectory.outcome is not None:
        yield Event(
            f"{verdict_words(trajectory.outcome, trajectory.reward)} after {trajectory.steps} steps: "
            f"{trajectory.verdict_reason} "
            f"(stopped: {trajectory.stop_reason})",
            trajectory.ended_at,
            {
                "outcome": trajectory.outcome,
                "reward": trajectory.reward,
                "steps": trajectory.steps,
            },
        )
    elif trajectory.state in ("leased", "playing"):
        if has_ended(reader):
            yield Event(f"the run ended while it was {trajectory.state}: it has no verdict")
        else:
            yield Event(f"it is {trajectory.state} now")
        return
    members = reader.trajectories(group_ids=[group.id])
    judged = {
        outcome: sum(member.outcome == outcome for member in members)
        for outcome in ("pass", "fail", "invalid")
    }
    if trajectory.state == "dropped" and group.reason != trajectory.reason:
        yield Event(
            _why_alone(reader, trajectory), trajectory.ended_at, {"rule": trajectory.reason}
        )
        return
    if group.closed_at is not None:
        counts = ", ".join(f"{number} {outcome}" for outcome, number in judged.items() if number)
        outcome_of_group = (
            f"dropped ({group.reason})" if group.state == "dropped" else "ready for a batch"
        )
        yield Event(
            f"its group {group.id} is over: {counts or 'no verdict'}; {outcome_of_group}",
            group.closed_at,
            {"group": group.id, **judged},
        )
    if group.pool_member is not None:
        yield Event(
            f"{group.pool_member} of the pool joined the group: all its members had failed; it "
            f"played {_instance(reader.pool_member(group.pool_member), group)}"
        )
    if group.state == "dropped":
        text, numbers = _why_dropped(reader, group, members)
        yield Event(text, None, {"rule": group.reason, **numbers})
    elif group.state == "open":
        live = sum(member.state in ("leased", "playing") for member in members)
        if has_ended(reader):
            yield Event(f"the run ended before its group {group.id} was over")
        else:
            yield Event(f"it waits for its group {group.id}: {live} more are in play")
    elif group.state == "ready":
        if has_ended(reader):
            yield Event("the run ended before a batch took it; it stays ready if the run goes on")
        else:
            yield Event("it waits for a batch: enough groups must be ready first")


def _instance(member: PoolRow | None, group: GroupRow) -> str:
    """Which instance a member of the pool played, beside that of the group it joined."""
    if member is None:
        return "an instance that is not known any more"
    if member.task_seed == group.task_seed:
        return f"the same instance, seed {member.task_seed}"
    return f"another instance, seed {member.task_seed}"


def _came_in(row: PoolRow, steps: Sequence[StepRow]) -> Iterator[Event]:
    known = "known" if row.known else "unknown, so it is weighted as a demonstration"
    origin = f", first {row.origin}" if row.origin else ""
    yield Event(
        f"came into the pool from outside the run: {row.task_id}, seed {row.task_seed}, source "
        f"{row.source}{origin}, {row.steps} steps, log-probabilities {known}",
        row.added_at,
        asdict(row),
    )
    for step in steps:
        did = action_words(step.action) if step.action else f"no action: {step.error}"
        yield Event(f"step {step.step}: {' '.join(step.text.split())} -> {did}")


def _joined_pool(row: PoolRow) -> Event:
    return Event(
        f"joined the experience pool of {row.task_id}; used in {row.used} batches since",
        row.added_at,
        {"used": row.used},
    )


# --- why it was dropped ----------------------------------------------------------------------


def _why_alone(reader: Reader, trajectory: TrajectoryRow) -> str:
    """For a trajectory that was dropped by itself, independently of its group."""
    why = {
        "invalid": "its environment or evaluator broke, or no completion came, so it does not measure the "
        "policy",
        "cancelled": "its environment process abandoned it",
        "lease_expired": f"no step and no heartbeat for data.lease_s = {_data(reader, 'lease_s')} s",
        "worker_lost": f"{trajectory.worker} died, or its slot {trajectory.slot} started again",
        "incomplete": f"steps or images of {trajectory.steps} steps were never handed in",
    }
    said = f" ({trajectory.verdict_reason})" if trajectory.verdict_reason else ""
    return f"dropped ({trajectory.reason}): {why.get(trajectory.reason, 'never trained on')}{said}"


def _why_dropped(
    reader: Reader, group: GroupRow, members: Sequence[TrajectoryRow]
) -> tuple[str, dict[str, Any]]:
    """The rule by which a group was dropped, and the numbers that decided."""
    valid = sum(member.outcome in ("pass", "fail") for member in members)
    if group.reason == "stale":
        return _why_stale(reader, group, members)
    texts: dict[str, Callable[[], str]] = {
        "all_success": lambda: f"all {valid} valid members passed: equal rewards teach nothing",
        "all_fail": lambda: (
            f"all {valid} valid members failed: equal rewards teach nothing{_no_help(reader, group, valid)}"
        ),
        "equal_rewards": lambda: (
            f"all {valid} valid members have the same reward: that teaches nothing"
        ),
        "single_member": lambda: "one valid member cannot be compared with others",
        "no_valid_member": lambda: f"none of {len(members)} attempts had a verdict",
        "task_removed": lambda: f"the run was started again without {group.task_id}",
        "surplus": lambda: "it was in play when the batch was full, and data.recycle is off",
    }
    text = texts.get(group.reason, lambda: f"rule {group.reason}")()
    return text, {"valid": valid, "attempts": len(members)}


def _no_help(reader: Reader, group: GroupRow, valid: int) -> str:
    """Why no success of the pool joined an all-fail group."""
    ratio = _data(reader, "pool_ratio")
    if not ratio:
        return "; data.pool_ratio = 0, so no success of the pool joins such a group"
    if not may_join(valid, ratio):
        return f"; one success among {valid + 1} would be a larger share than data.pool_ratio = {ratio}"
    return f"; the pool had no success of {group.task_id}"


def _why_stale(
    reader: Reader, group: GroupRow, members: Sequence[TrajectoryRow]
) -> tuple[str, dict[str, Any]]:
    counted = [member for member in members if member.reason == group.reason]
    seen = {
        span.version
        for member in counted
        for step in reader.steps(member.id)
        for span in step.sampled.version_spans
    }
    trained = [
        batch.trained_version
        for batch in reader.batches()
        if batch.trained_version is not None
        and batch.trained_at is not None
        and group.closed_at is not None
        and batch.trained_at <= group.closed_at
    ]
    lineage = restored(reader, _set(reader, "weights", "publish_every") or 1)
    trainer = max(trained, default=0)
    at = lineage.position(trainer)
    oldest = max(seen, key=lambda version: lineage.behind(version, at), default=0)
    behind = lineage.behind(oldest, at)
    limit = _data(reader, "max_staleness")
    text = (
        f"its group's oldest token was sampled by v{oldest} (update "
        f"{lineage.position(oldest).updates}), the trainer was at v{trainer} (update {at.updates}): "
        f"{behind} versions behind, data.max_staleness = {limit}"
    )
    return text, {
        "oldest_version": oldest,
        "trainer_version": trainer,
        "behind": behind,
        "max_staleness": limit,
    }


def _data(reader: Reader, key: str) -> Any:
    """A key of [data] as the run was last started."""
    return _set(reader, "data", key)


def _set(reader: Reader, section: str, key: str) -> Any:
    """A key of the configuration as the run was last started."""
    try:
        return json.loads(reader.run().config).get(section, {}).get(key)
    except StoreError:  # never started: it holds only a pool
        return None


# --- what it was trained with ----------------------------------------------------------------


def _trained(reader: Reader, subject: Subject, steps: Sequence[StepRow]) -> Iterator[Event]:
    """Each batch it was part of, and the weight of each of its steps there."""
    by_step = {step.step: step for step in steps}
    samples: dict[int, list[SampleRow]] = {}
    for row in reader.sample_rows(subject.id):
        samples.setdefault(row.batch_id, []).append(row)
    for batch_id, rows in samples.items():
        batch = reader.batch(batch_id)
        own = [row for row in rows if not row.is_fork]
        yield Event(
            f"part of batch {batch.id}{_joined(reader, subject, batch)}: formed when the trainer "
            f"was at v{batch.formed_version}, mean reward {batch.reward:.2f}; "
            f"{sum(row.weight != 0 for row in own)} of its {len(own)} steps are trained on",
            batch.formed_at,
            {"batch": batch.id, "formed_version": batch.formed_version},
        )
        everyone = reader.batch_rows(batch_id)
        for row in rows:
            yield _weighed(row, by_step.get(row.step), batch, everyone)
        if batch.state == "trained" and batch.trained_at is not None:
            version = "" if batch.trained_version is None else f": weights v{batch.trained_version}"
            yield Event(f"batch {batch.id} is trained{version}", batch.trained_at)
        else:
            acknowledged = "the run ended before the trainer acknowledged it"
            if not has_ended(reader):
                acknowledged = "the trainer has not acknowledged it yet"
            yield Event(f"batch {batch.id} is served, {acknowledged}")
        yield from _used_again(reader, batch_id)


def _used_again(reader: Reader, batch_id: int) -> Iterator[Event]:
    """The replays of a batch, and why there are no more where that was decided."""
    subject = replay_subject(batch_id)
    refused = [told for told in reader.decisions(subject) if not told.used]
    skipped = {told.batch_id for told in refused}
    for batch in reader.replays(batch_id):
        version = "" if batch.trained_version is None else f": weights v{batch.trained_version}"
        done = f"is trained{version}" if batch.state == "trained" else "is served"
        done = "the trainer skipped" if batch.id in skipped else done
        yield Event(
            f"{subject} comes again (use {batch.reuse + 1}) as batch {batch.id}, which {done}",
            batch.trained_at or batch.formed_at,
            {"batch": batch.id, "replay_of": batch_id, "reuse": batch.reuse},
        )
    for told in refused:
        why = WHY_REFUSED.get(told.reason, "")
        yield Event(
            f"{subject} is not trained on again ({told.reason}): {why}",
            None,
            {"rule": told.reason, "batch": told.batch_id},
        )


def _joined(reader: Reader, subject: Subject, batch: BatchRow) -> str:
    """The group with which a member of the pool went into the batch."""
    groups = reader.groups_by_id(reader.batch_groups(batch.id)).values()
    helped = [
        f"{group.id} ({_instance(subject.pool, group)})"
        for group in groups
        if group.pool_member == subject.id
    ]
    return f" with the all-fail group {', '.join(helped)}" if helped else ""


def _weighed(
    row: SampleRow, step: StepRow | None, batch: BatchRow, everyone: Sequence[SampleRow]
) -> Event:
    entropy = row.entropy
    if entropy is None and step is not None and step.sampled.entropies:
        entropy = fmean(drawn(step.sampled.entropies, step.sampled.patches))
    nats = "" if entropy is None else f", entropy {entropy:.4f} nats"
    if row.gap_mean is not None and row.gap_largest is not None:
        nats += (
            f", log-probabilities off by {row.gap_mean:+.4f} (trainer minus engine, mean over "
            f"tokens; {row.gap_largest:.4f} at most)"
        )
    numbers = asdict(row) | {"entropy": entropy}
    patches = [] if step is None else drawn_patches(step.sampled, step.pointed)
    if patches and not row.is_fork:
        numbers["patches"] = [asdict(each) for each in patches]
        nats += "".join(map(_pointed, patches))
    if row.is_fork:
        return Event(
            f"step {row.step} is a fork: on this screen {row.fork_trajectory_id}, which passed, did "
            f"something else at its step {row.fork_step}; that is trained on from here, advantage "
            f"{row.advantage:+.3f}",
            numbers=numbers,
        )
    if row.weight == 0:
        why = LEFT_OUT.get(row.reason, "")
        kept = [
            each.entropy
            for each in everyone
            if each.weight != 0
            and each.entropy is not None
            and group_of(each.trajectory_id) == group_of(row.trajectory_id)
        ]
        if row.reason == "low_entropy" and kept:
            why += f"; the least of those kept in its group has {min(kept):.4f} nats"
        return Event(
            f"step {row.step} is left out ({row.reason}{nats}){': ' + why if why else ''}",
            numbers=numbers,
        )
    behind = _behind(step, batch)
    return Event(
        f"step {row.step} is trained on ({row.reason or 'mixed'}): advantage {row.advantage:+.3f}"
        f"{_parts(row)}, weight {row.weight:.3g}{nats}{behind}",
        numbers=numbers,
    )


def _pointed(each: DrawnPatch) -> str:
    known = each.logprob is not None and each.entropy is not None
    told = f" (log-prob {each.logprob:.4f}, entropy {each.entropy:.4f})" if known else ""
    return f", patch {each.patch} at token {each.token}{told}"


def _parts(row: SampleRow) -> str:
    """What an advantage is made of, where that is more than the outcome among its siblings."""
    if row.baseline is not None:
        return f" of a reward where {row.baseline:.3f} was expected"
    if not row.screen_advantage:
        return ""
    return f" (outcome {row.outcome_advantage:+.3f}, screen {row.screen_advantage:+.3f})"


def _behind(step: StepRow | None, batch: BatchRow) -> str:
    if step is None or not step.sampled.version_spans:
        return ", no version of this run's weights"
    sampled = [span.version for span in step.sampled.version_spans]
    most = batch.formed_version - min(sampled)
    words = versions_words(min(sampled), max(sampled))
    return f", {words}, {most} version{'' if most == 1 else 's'} behind"
