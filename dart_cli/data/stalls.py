"""Find which process waits for which, since when, and the likely fix: a snapshot -> stalls.

    diagnose   returns all stalls: first the causes, then the waits that follow from them
    AlertLog   logs each stall once when it begins and once when it is over

A wait is no stall as long as the other side makes progress. An environment may wait long for a lease while
the trainer computes, and a trainer for a batch while steps come in. So each rule examines the other side.
If no rule applies and the whole run has been quiet for `stall_s`, every long wait is reported, so that each
hang is reported at last.

A run that plays and does not learn is reported, too. This is decided by what the policy itself played, since
members of the experience pool and replays make batches even if the policy never passes a task.

`stall_s` is the longest time without progress; a silent process is reported as soon as it counts as dead.
The data service makes the stalls for its log and for each snapshot, and `dart status` shows them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from bus.messages import Waiting
from bus.snapshot import OwnView, ProcessView, Snapshot, StallView
from dart_cli.config.schema.weights import PERMIT_S

log = logging.getLogger(__name__)

KINDS = (
    *("gone", "stopped", "silent", "environment", "engine", "permit"),
    *("update", "model", "data", "tasks", "success", "actions", "invalid", "sight", "waits"),
)
MODEL_S = 300.0
"""Loading a model is no stall before this time."""
PATIENCE = 1 / 3
"""Share of its deadline that a call of an environment may take before it is a stall."""
LONG = 30
"""An update or a batch is reported, although others make progress, if it takes so many times `stall_s` and
several times as long as the last one."""
_MOST_CAUSES = 2  # most causes that the text of an effect names
TELLING_DROPS = 32
"""Number of groups dropped for one reason since the last batch, from which on the reason is reported."""
_TELLING_SHARE = 0.9  # of the groups that ended since the last batch
INVALID_SHARE = 0.2
"""Share of a task's recent episodes that may be invalid."""
TELLING_INVALID = 5
"""Number of invalid episodes of a task, from which on their share is reported."""
NO_GRADIENT = {
    "all_fail": "the policy never solves these tasks: add easier ones, or record successes with "
    "`dart data collect`, then learn them with `dart tune`, or set data.pool and data.pool_ratio "
    "(docs/operations.md)",
    "all_success": "the policy always solves these tasks: add harder ones, or end the run",
}
"""Why a group was dropped -> the likely cause and its fix."""
HARDLY = 0.01
"""With running baselines, trajectories have hardly a gradient if every task's success is within this of 0,
or of 1."""


FAILED_UPDATES = 20
"""Updates without a success of the policy after which a run is reported to learn nothing."""
FAILED_TRAJECTORIES = 512
"""Fewest trajectories that must have failed meanwhile. If a policy passes 1 in 100, all of these fail with a
probability of 0.6 %."""
RISE = 0.02
"""Rise of the mean reward, from the run's first trajectories to its newest, that counts as learning."""
MALFORMED_SHARE = 0.2
"""Share of malformed completions among the newest from which a rise is reported."""
MALFORMED_RISE = 0.1
"""Rise of this share, since the run's first completions, that is reported."""
MOSTLY_MALFORMED = 0.5
"""Share of malformed completions that is reported even without a rise, unless it has clearly fallen."""
_CLEARLY_FELL = 0.8  # a share below so much of the first share has clearly fallen
_MALFORMED_WINDOWS = 4  # windows of completions before a share without a rise is reported
SUCCESSES_FIRST = (
    "successes to begin with, from `dart data collect`, then `dart tune` on them and a new run from that "
    "folder; easier tasks; or a lower train.lr (docs/operations.md)"
)


def diagnose(snapshot: Snapshot) -> list[StallView]:
    """Return all stalls; none if the run makes progress, is over, or its data service ends."""
    if snapshot.stopping or snapshot.ending:
        return []
    living = [process for process in snapshot.processes if process.alive]
    # 1. What stands still by itself.
    causes = [_silence(process) for process in snapshot.processes if _is_missed(process)]
    causes += _held_permits(snapshot)
    for process in living:
        for wait in process.waits:
            causes += _cause(snapshot, process, wait)
    # 2. What waits for that.
    effects = _effects(snapshot, living, causes)
    # 3. Why the run plays and does not learn.
    tasks = [*_tasks(snapshot), *_hardly_any_gradient(snapshot)]
    learning = [*(tasks or _unsuccessful(snapshot)), *_malformed(snapshot)]
    return [*causes, *effects, *learning, *_invalid(snapshot), *_blind(snapshot)]


_SILENCES = {
    "gone": "exited unexpectedly, {silent_s:.0f} s ago; start it again, "
    "logs/{worker}.log shows why",
    "failed": "has ended: {error}; fix that and start it again",
    "stopped": "is stopped (SIGSTOP, Ctrl-Z or a debugger), silent for {silent_s:.0f} s; "
    "kill -CONT {pid} lets it go on",
    "blocked": "is stuck in the kernel (a disk, a network file system, a GPU driver), silent for "
    "{silent_s:.0f} s; see dmesg",
    "running": "lives but has been silent for {silent_s:.0f} s: its machine is overloaded or its "
    "event loop hangs; dart status --stacks shows where",
    "": "has been silent for {silent_s:.0f} s; see that its host is up, and start it again",
}
"""Liveness of a silent process -> the text about it."""


def _is_missed(process: ProcessView) -> bool:
    """Return True if a process is silent and has not announced its end."""
    return not process.alive and process.state != "stopping"


def _silence(process: ProcessView) -> StallView:
    """Return the stall of a process whose heartbeats have stopped."""
    worker, pid, silent_s = process.worker, process.pid, process.heartbeat_age_s
    has_failed = process.liveness == "gone" and process.error
    template = _SILENCES.get("failed" if has_failed else process.liveness, _SILENCES[""])
    text = template.format(worker=worker, pid=pid, silent_s=silent_s, error=process.error)
    return StallView(
        kind=process.liveness if process.liveness in ("gone", "stopped") else "silent",
        who=worker,
        since_s=silent_s,
        text=f"{worker} (pid {pid} on {process.host}) {text}",
    )


def _held_permits(snapshot: Snapshot) -> Iterator[StallView]:
    """Yield a stall for each worker that takes new weights for too long while others wait for a permit."""
    waiting = [
        process.worker
        for process in snapshot.processes
        if any(wait.on == "permit" for wait in process.waits)
    ]
    for holder, held_s in snapshot.permits.items():
        others = [worker for worker in waiting if worker != holder]
        if held_s >= snapshot.stall_s and others:
            yield StallView(
                kind="permit",
                who=holder,
                since_s=held_s,
                text=f"{_worker_names(others)} waits for {holder}, which has held the permit to take new "
                f"weights for {held_s:.0f} s; after {PERMIT_S:.0f} s the next one may, "
                f"logs/{holder}.log shows what it does",
            )


def _cause(snapshot: Snapshot, process: ProcessView, wait: Waiting) -> Iterator[StallView]:
    """Yield the stall of one wait, if it is a stall whatever the other processes do."""
    who, waited_s = process.worker, wait.longest_s
    text = ""
    kind = wait.on
    if waited_s < snapshot.stall_s:
        return
    if wait.on == "environment":
        if waited_s < PATIENCE * wait.deadline_s:
            return
        text = (
            f"{who} has waited {waited_s:.0f} s for {wait.what}; the environment hangs or is slow"
        )
    elif wait.on == "data":
        text = f"{who} has waited {waited_s:.0f} s for {wait.what}; see logs/data.log and its disk"
    elif wait.on == "model" and waited_s >= MODEL_S:
        text = f"{who} has loaded its model for {waited_s:.0f} s; is model.path on a slow disk?"
    elif wait.on == "update" and waited_s >= _usual(snapshot, "step_s"):
        text = f"{who} has worked {waited_s:.0f} s on {wait.what}; dart status --stacks shows where"
    elif wait.on == "batch" and waited_s >= _usual(snapshot, "waiting_s"):
        kind = "waits"
        text = f"{who} has waited {waited_s:.0f} s for {wait.what}; are its tasks too easy or too hard?"
    else:
        worker = next((other for other in snapshot.processes if other.worker == wait.on), None)
        if worker is not None and worker.alive and worker.still_s >= snapshot.stall_s:
            kind = "engine"
            text = (
                f"{who} has waited {waited_s:.0f} s for {wait.count} completions of {worker.worker}, "
                f"which has brought no token for {worker.still_s:.0f} s; dart status --stacks shows "
                f"where it hangs, then start {worker.worker} again"
            )
    if text:
        yield StallView(kind=kind, who=who, since_s=waited_s, text=text)


def _usual(snapshot: Snapshot, metric: str) -> float:
    """Return the seconds beyond which a wait is long, by the metric of the newest such wait."""
    return max(LONG * snapshot.stall_s, 5 * snapshot.metrics.get(metric, 0.0))


def _effects(
    snapshot: Snapshot, living: list[ProcessView], causes: list[StallView]
) -> Iterator[StallView]:
    """Yield the long waits of a run in which nothing has happened for too long, each with its causes."""
    if snapshot.quiet_s < snapshot.stall_s or any(
        _is_at_work(snapshot, process) for process in living
    ):
        return
    reported = {cause.who for cause in causes}
    for process in living:
        wait = process.waits[0] if process.waits else None
        if wait is None or wait.longest_s < snapshot.stall_s or process.worker in reported:
            continue
        what = (
            f"a batch: {snapshot.next_batch}"
            if wait.on == "batch" and snapshot.next_batch
            else wait.what
        )
        fix = _session_fix(living) if wait.on == "batch" and not snapshot.queues.leases else ""
        why = "".join(f"; {cause.text.partition(';')[0]}" for cause in causes[:_MOST_CAUSES])
        yield StallView(
            kind="waits",
            who=process.worker,
            since_s=wait.longest_s,
            text=f"{process.worker} has waited {wait.longest_s:.0f} s for {what}{fix}{why}",
        )


def _session_fix(living: Sequence[ProcessView]) -> str:
    """Return the text that an agent must open a session, if only other programs' agents play; else empty."""
    if any(process.role == "env" for process in living):
        return ""
    places = [process.endpoint for process in living if process.role == "serve"]
    if not places:
        return ""
    return f"; an agent must open a session at {' or '.join(places)} (docs/serve.md)"


def _tasks(snapshot: Snapshot) -> Iterator[StallView]:
    """Yield a stall if nearly all groups since the last batch have no gradient for the same reason."""
    dropped = snapshot.groups.dropped_since_batch
    total = sum(dropped.values()) + snapshot.groups.ready
    for reason, fix in NO_GRADIENT.items():
        number = dropped.get(reason, 0)
        if number >= max(TELLING_DROPS, _TELLING_SHARE * total):
            yield StallView(
                kind="tasks",
                who="train",
                since_s=0.0,
                text=f"{number} of the {total} groups that ended since the last batch have no "
                f"gradient ({reason}): {fix}",
            )


def _hardly_any_gradient(snapshot: Snapshot) -> Iterator[StallView]:
    """Yield a stall if the running baselines expect nearly every outcome.

    Groups of one are not dropped for it: batches form, but have hardly a gradient.
    """
    rates = [(task, task.success) for task in snapshot.tasks if task.success is not None]
    number = sum(task.trajectories for task, _ in rates)
    if not snapshot.groups.by_baseline or number < TELLING_DROPS:
        return
    successes = [success for _, success in rates]
    reason = "all_fail" if max(successes) <= HARDLY else "all_success"
    if max(successes) <= HARDLY or min(successes) >= 1 - HARDLY:
        yield StallView(
            kind="tasks",
            who="train",
            since_s=0.0,
            text=f"of {number} trajectories hardly any of the last has a gradient ({reason}): "
            f"{NO_GRADIENT[reason]}",
        )


def _unsuccessful(snapshot: Snapshot) -> Iterator[StallView]:
    """Yield a stall if the policy itself has passed nothing over many updates."""
    own = snapshot.own
    if own.failed_since < FAILED_TRAJECTORIES or own.updates_since < FAILED_UPDATES:
        return
    if own.reward > own.reward_first + RISE:  # rewards as values: it learns without a pass
        return
    yield StallView(
        kind="success",
        who="train",
        since_s=0.0,
        text=f"none of the last {own.failed_since} trajectories of the policy passed, over "
        f"{own.updates_since} updates: the run learns nothing of its tasks. What helps: {SUCCESSES_FIRST}",
    )


def _malformed(snapshot: Snapshot) -> Iterator[StallView]:
    """Yield a stall if ever more completions are no action, or most are."""
    if text := malformed_text(snapshot.own):
        yield StallView(kind="actions", who="rollout", since_s=0.0, text=text)


def malformed_text(own: OwnView) -> str:
    """Return what is wrong with the policy's completions, and the fix; empty if enough are actions."""
    now, then = own.malformed, own.malformed_first
    shares = (
        f"{now:.0%} of the policy's last {own.window} completions are no action, {then:.0%} of its "
        f"first {own.window} were"
    )
    if own.completions >= 2 * own.window and now >= max(MALFORMED_SHARE, then + MALFORMED_RISE):
        return f"{shares}: it unlearns its action language. What helps: {SUCCESSES_FIRST}"
    enough = own.completions >= _MALFORMED_WINDOWS * own.window
    if enough and now >= max(MOSTLY_MALFORMED, _CLEARLY_FELL * then):
        return (
            f"{shares}: policy.action_parser is another language than the model's, rollout.max_tokens cuts "
            f"actions off, or it was never trained on them. `dart data show` of one trajectory shows "
            f"the texts; what helps: {SUCCESSES_FIRST}"
        )
    return ""


def _invalid(snapshot: Snapshot) -> Iterator[StallView]:
    """Yield a stall if many recent episodes of a task are invalid, since these are never trained on."""
    shares = {
        task.task_id: task.invalid_share
        for task in snapshot.tasks
        if task.invalid_share is not None
        and task.invalid_share > INVALID_SHARE
        and task.invalid >= TELLING_INVALID
    }
    if not shares:
        return
    worst = max(snapshot.tasks, key=lambda task: shares.get(task.task_id, 0.0))
    others = f", and many of {len(shares) - 1} other tasks" if len(shares) > 1 else ""
    acting = (
        f", {worst.invalid_after_action} of them after an action"
        if worst.invalid_after_action
        else ""
    )
    yield StallView(
        kind="invalid",
        who="env",
        since_s=0.0,
        text=f"{shares[worst.task_id]:.0%} of the recent episodes of {worst.task_id} are invalid "
        f"({worst.invalid} in all{acting}){others}: none is trained on. `dart data ls --outcome invalid "
        f"--task {worst.task_id}` names them; fix the environment, or raise ActionCausedError where the "
        "policy's action breaks it (docs/environments/index.md)",
    )


def _blind(snapshot: Snapshot) -> Iterator[StallView]:
    """Yield a stall if the screenshots make no difference to the model's log-probabilities."""
    if snapshot.metrics.get("sees") == 0:
        yield StallView(
            kind="sight",
            who="train",
            since_s=0.0,
            text="grey screens change no log-probability: the model does not see. Look at the size, mean and "
            "deviation in the preprocessor_config.json of its folder and at `dart data show`",
        )


def _is_at_work(snapshot: Snapshot, process: ProcessView) -> bool:
    """Return True if others may have to wait for a process that trains, loads its model or takes weights."""
    waits = {wait.on: wait.longest_s for wait in process.waits}
    loading_s = min(waits.get("model", MODEL_S), snapshot.permits.get(process.worker, MODEL_S))
    return "update" in waits or loading_s < MODEL_S


def _worker_names(workers: list[str]) -> str:
    return workers[0] if len(workers) == 1 else f"{workers[0]} and {len(workers) - 1} more"


class AlertLog:
    """A log of stalls, which has each of them once when it begins and once when it is over."""

    def __init__(self) -> None:
        self._present: dict[tuple[str, str], str] = {}

    def update(self, stalls: Sequence[dict[str, Any]]) -> None:
        """Log what has begun and ended; each present stall is a bus.snapshot.StallView as JSON values."""
        now = {(stall["kind"], stall["who"]): stall["text"] for stall in stalls}
        for key, text in now.items():
            if key not in self._present:
                log.warning("stall: %s", text)
        for key, text in self._present.items():
            if key not in now:
                log.info("over: %s", text)
        self._present = now
