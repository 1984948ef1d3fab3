"""Which process waits for which, since when, and the likely cure: a snapshot in, findings out.

    diagnose   all stalls: causes first, then what else waits because of them
    AlertLog   logs each finding once when it begins and once when it is over

A wait is no stall as long as the other side makes progress: an environment may wait long for a
lease while the trainer computes, a trainer for a batch while steps come in. So each rule looks at
the other side. Where no rule applies and the whole run has been quiet for `stall_s`, every long
wait is reported: no hang stays unreported.

A run that plays and does not learn is reported, too, by what the policy itself played: members of the
experience pool and replays keep batches coming where it never passes a task.

`stall_s` is the longest time without progress; a silent process is reported as soon as it
counts as dead. Data makes the findings for its log and for each snapshot, status shows them.
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
"""A model may load for so long without being a stall."""
PATIENCE = 1 / 3
"""Share of its deadline that a call of an environment may take: where env.reset_deadline_s is five
minutes, resets are slow."""
LONG = 30
"""An update or a batch that takes so many times `stall_s`, and several times what the last one
took, is reported although others make progress."""
_MOST_CAUSES = 2  # named behind an effect
TELLING_DROPS = 32
"""Groups dropped for one reason, with no batch between them, after which it is no accident."""
_TELLING_SHARE = 0.9  # of the groups that ended since the last batch
INVALID_SHARE = 0.2
"""Share of a task's recent episodes that may be invalid."""
TELLING_INVALID = 5
"""Invalid episodes of a task, in all, below which none is reported."""
NO_GRADIENT = {
    "all_fail": "the policy never solves these tasks: add easier ones, or record successes with "
    "`dart data collect`, then learn them with `dart tune`, or set data.pool and data.pool_ratio "
    "(docs/operations.md)",
    "all_success": "the policy always solves these tasks: add harder ones, or end the run",
}
"""Why a group was dropped -> the likely cause and its cure."""
HARDLY = 0.01
"""Success, or lack of it, of every task at which trajectories without groups have hardly a gradient."""


FAILED_UPDATES = 20
"""Updates without a success of the policy's own after which a run is reported to learn nothing."""
FAILED_TRAJECTORIES = 512
"""Trajectories that failed meanwhile, at least: of a policy that passes 1 in 100, all fail with 0.6 %."""
RISE = 0.02
"""Of the mean reward, between the run's first trajectories and its newest, that counts as learning."""
MALFORMED_SHARE = 0.2
"""Share of the newest completions that are no action, below which none is reported."""
MALFORMED_RISE = 0.1
"""Above the share of the run's first completions: then it has grown."""
MOSTLY_MALFORMED = 0.5
"""Share that is reported although it has not grown, unless it has clearly fallen."""
_CLEARLY_FELL = 0.8  # of the first share
_MALFORMED_WINDOWS = 4  # of completions, before the level alone is reported
SUCCESSES_FIRST = (
    "successes to begin with, from `dart data collect`, then `dart tune` on them and a new run from that "
    "folder; easier tasks; or a lower train.lr (docs/operations.md)"
)


def diagnose(seen: Snapshot) -> list[StallView]:
    """Return every stall; empty where the run makes progress, is over, or its data service ends."""
    if seen.stopping or seen.ending:
        return []
    living = [process for process in seen.processes if process.alive]
    causes = [_silence(process) for process in seen.processes if _is_missed(process)]
    causes += _held_permits(seen)
    for process in living:
        for wait in process.waits:
            causes += _cause(seen, process, wait)
    effects = _effects(seen, living, causes)
    tasks = [*_tasks(seen), *_hardly_any_gradient(seen)]
    learning = [*(tasks or _unsuccessful(seen)), *_malformed(seen)]
    return [*causes, *effects, *learning, *_invalid(seen), *_blind(seen)]


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
"""Liveness -> the text on a silent process."""


def _is_missed(process: ProcessView) -> bool:
    """Return True for a process that is silent, and has not said before that it ends."""
    return not process.alive and process.state != "stopping"


def _silence(process: ProcessView) -> StallView:
    """Return a process whose heartbeats have stopped."""
    worker, pid, silent_s = process.worker, process.pid, process.heartbeat_age_s
    known = "failed" if process.liveness == "gone" and process.error else process.liveness
    text = _SILENCES.get(known, _SILENCES[""])
    finding = text.format(worker=worker, pid=pid, silent_s=silent_s, error=process.error)
    return StallView(
        kind=process.liveness if process.liveness in ("gone", "stopped") else "silent",
        who=worker,
        since_s=silent_s,
        text=f"{worker} (pid {pid} on {process.host}) {finding}",
    )


def _held_permits(seen: Snapshot) -> Iterator[StallView]:
    """Workers that take new weights for too long, while others wait for their turn."""
    waiting = [
        process.worker
        for process in seen.processes
        if any(wait.on == "permit" for wait in process.waits)
    ]
    for holder, held_s in seen.permits.items():
        others = [worker for worker in waiting if worker != holder]
        if held_s >= seen.stall_s and others:
            yield StallView(
                kind="permit",
                who=holder,
                since_s=held_s,
                text=f"{_named(others)} waits for {holder}, which has held the permit to take new "
                f"weights for {held_s:.0f} s; after {PERMIT_S:.0f} s the next one may, "
                f"logs/{holder}.log shows what it does",
            )


def _cause(seen: Snapshot, process: ProcessView, wait: Waiting) -> Iterator[StallView]:
    """Yield the stall that one wait shows by itself, whatever the others do."""
    who, waited_s = process.worker, wait.longest_s
    text = ""
    kind = wait.on
    if waited_s < seen.stall_s:
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
    elif wait.on == "update" and waited_s >= _usual(seen, "step_s"):
        text = f"{who} has worked {waited_s:.0f} s on {wait.what}; dart status --stacks shows where"
    elif wait.on == "batch" and waited_s >= _usual(seen, "waiting_s"):
        kind = "waits"
        text = f"{who} has waited {waited_s:.0f} s for {wait.what}; are its tasks too easy or too hard?"
    else:
        worker = next((each for each in seen.processes if each.worker == wait.on), None)
        if worker is not None and worker.alive and worker.still_s >= seen.stall_s:
            kind = "engine"
            text = (
                f"{who} has waited {waited_s:.0f} s for {wait.count} completions of {worker.worker}, "
                f"which has brought no token for {worker.still_s:.0f} s; dart status --stacks shows "
                f"where it hangs, then start {worker.worker} again"
            )
    if text:
        yield StallView(kind=kind, who=who, since_s=waited_s, text=text)


def _usual(seen: Snapshot, metric: str) -> float:
    """Seconds beyond which a wait is long, by what the newest one of its kind took."""
    return max(LONG * seen.stall_s, 5 * seen.metrics.get(metric, 0.0))


def _effects(
    seen: Snapshot, living: list[ProcessView], causes: list[StallView]
) -> Iterator[StallView]:
    """Long waits of a run in which nothing has happened for too long, with what explains them."""
    if seen.quiet_s < seen.stall_s or any(_is_at_work(seen, process) for process in living):
        return
    known = {cause.who for cause in causes}
    for process in living:
        wait = process.waits[0] if process.waits else None
        if wait is None or wait.longest_s < seen.stall_s or process.worker in known:
            continue
        what = (
            f"a batch: {seen.next_batch}" if wait.on == "batch" and seen.next_batch else wait.what
        )
        cure = _session_cure(living) if wait.on == "batch" and not seen.queues.leases else ""
        why = "".join(f"; {cause.text.partition(';')[0]}" for cause in causes[:_MOST_CAUSES])
        yield StallView(
            kind="waits",
            who=process.worker,
            since_s=wait.longest_s,
            text=f"{process.worker} has waited {wait.longest_s:.0f} s for {what}{cure}{why}",
        )


def _session_cure(living: Sequence[ProcessView]) -> str:
    """Return what must happen where agents of other programs play, and none does; empty where dart plays itself."""
    if any(process.role == "env" for process in living):
        return ""
    places = [process.endpoint for process in living if process.role == "serve"]
    if not places:
        return ""
    return f"; an agent must open a session at {' or '.join(places)} (docs/serve.md)"


def _tasks(seen: Snapshot) -> Iterator[StallView]:
    """Episodes end, but their groups have no gradient: the run plays and does not learn."""
    dropped = seen.groups.dropped_since_batch
    ended = sum(dropped.values()) + seen.groups.ready
    for reason, cure in NO_GRADIENT.items():
        number = dropped.get(reason, 0)
        if number >= max(TELLING_DROPS, _TELLING_SHARE * ended):
            yield StallView(
                kind="tasks",
                who="train",
                since_s=0.0,
                text=f"{number} of the {ended} groups that ended since the last batch have no "
                f"gradient ({reason}): {cure}",
            )


def _hardly_any_gradient(seen: Snapshot) -> Iterator[StallView]:
    """Without groups none is dropped: batches form, and every outcome is what the baselines expect."""
    played = [(task, task.success) for task in seen.tasks if task.success is not None]
    number = sum(task.trajectories for task, _ in played)
    if not seen.groups.by_baseline or number < TELLING_DROPS:
        return
    successes = [success for _, success in played]
    reason = "all_fail" if max(successes) <= HARDLY else "all_success"
    if max(successes) <= HARDLY or min(successes) >= 1 - HARDLY:
        yield StallView(
            kind="tasks",
            who="train",
            since_s=0.0,
            text=f"of {number} trajectories hardly any of the last has a gradient ({reason}): "
            f"{NO_GRADIENT[reason]}",
        )


def _unsuccessful(seen: Snapshot) -> Iterator[StallView]:
    """Update after update the policy itself passes nothing, whatever else is in its groups."""
    own = seen.own
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


def _malformed(seen: Snapshot) -> Iterator[StallView]:
    """Completions are ever more often no action, or nearly all are."""
    if text := malformed_text(seen.own):
        yield StallView(kind="actions", who="rollout", since_s=0.0, text=text)


def malformed_text(own: OwnView) -> str:
    """Return what is wrong with the policy's completions, and the cure; empty where most are actions."""
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


def _invalid(seen: Snapshot) -> Iterator[StallView]:
    """Tasks many of whose episodes are invalid: what the policy breaks in them is never trained on."""
    shares = {
        task.task_id: task.invalid_share
        for task in seen.tasks
        if task.invalid_share is not None
        and task.invalid_share > INVALID_SHARE
        and task.invalid >= TELLING_INVALID
    }
    if not shares:
        return
    worst = max(seen.tasks, key=lambda task: shares.get(task.task_id, 0.0))
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


def _blind(seen: Snapshot) -> Iterator[StallView]:
    """Yield a stall if pictures make no difference to what the model says."""
    if seen.metrics.get("sees") == 0:
        yield StallView(
            kind="sight",
            who="train",
            since_s=0.0,
            text="grey screens change no log-probability: the model does not see. Look at the size, mean and "
            "deviation in the preprocessor_config.json of its folder and at `dart data show`",
        )


def _is_at_work(seen: Snapshot, process: ProcessView) -> bool:
    """Whether others may well wait for it: it trains, loads its model, or takes weights."""
    waits = {wait.on: wait.longest_s for wait in process.waits}
    loading_s = min(waits.get("model", MODEL_S), seen.permits.get(process.worker, MODEL_S))
    return "update" in waits or loading_s < MODEL_S


def _named(workers: list[str]) -> str:
    return workers[0] if len(workers) == 1 else f"{workers[0]} and {len(workers) - 1} more"


class AlertLog:
    """Logs findings, each once."""

    def __init__(self) -> None:
        self._present: dict[tuple[str, str], str] = {}

    def update(self, stalls: Sequence[dict[str, Any]]) -> None:
        """`stalls` are the bus.snapshot.StallViews of this moment, dumped."""
        now = {(each["kind"], each["who"]): each["text"] for each in stalls}
        for key, text in now.items():
            if key not in self._present:
                log.warning("stall: %s", text)
        for key, text in self._present.items():
            if key not in now:
                log.info("over: %s", text)
        self._present = now
