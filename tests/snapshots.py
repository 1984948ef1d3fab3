"""Invented snapshots of runs, for tests of the status page and of the problems that it reports."""

from __future__ import annotations

from bus.messages import Waiting
from bus.snapshot import (
    GroupsView,
    ProcessView,
    QueuesView,
    Rates,
    Snapshot,
    StalenessView,
    SyncView,
    TaskView,
    UsageView,
)


def wait(what: str, on: str, seconds: float, *, count: int = 4, deadline_s: float = 0.0) -> Waiting:
    """Return the waits of one process for the same thing."""
    return Waiting(what=what, on=on, count=count, longest_s=seconds, deadline_s=deadline_s)


def process(
    worker: str, *waits: tuple[str, str, float], alive: bool = True, **changes: object
) -> ProcessView:
    """Return a process of a run with its waits: (what, on, seconds)."""
    fields = {
        "role": worker.partition("-")[0],
        "worker": worker,
        "host": "box",
        "pid": 42,
        "alive": alive,
        "heartbeat_age_s": 0.5 if alive else 31.0,
        "started_at": 0.0,
        "sent_at": 0.0,
        "endpoint": "",
        "gauges": {},
        "trajectories": [],
        "policy_version": 3,
        "state": "ready",
        "waiting_for": "",
        "waiting_s": 0.0,
        "waits": [wait(what, on, seconds) for what, on, seconds in waits],
    }
    return ProcessView.model_validate(fields | changes)


def sync(worker: str, **changes: object) -> SyncView:
    """Return how a rollout worker received version 7."""
    fields = {
        "worker": worker,
        "policy_version": 7,
        "error": "",
        "done_at": -12.0,
        "waited_s": 0.8,
        "transfer_s": 2.1,
        "pause_s": 0.4,
        "in_flight": 14,
        "syncs": 31,
        "refused": 0,
    }
    return SyncView.model_validate(fields | changes)


def snapshot(**changes: object) -> Snapshot:
    """Return the snapshot of a run without problems."""
    fields = {
        "run_id": "r",
        "run_dir": "runs/a",
        "now": 0.0,
        "uptime_s": 60.0,
        "run_s": 3725.0,
        "stopping": False,
        "reason": "",
        "policy_version": 7,
        "updates": 7,
        "updates_total": 20,
        "processes": [process("env-0"), process("rollout-0"), process("train")],
        "groups": GroupsView(open=3, ready=2, batched=1, trained=9, limit=24, dropped={"stale": 4}),
        "tasks": [
            TaskView(
                suite="mini",
                task_id="mini/popup",
                trajectories=64,
                passed=32,
                invalid=1,
                success=0.5,
                weight=0.25,
                curve=[0.1, None, 0.9],
            )
        ],
        "success": 0.5,
        "success_curve": [0.2, 0.5],
        "rates": Rates(window_s=60, trajectories=120, steps=400, actions=390, updates=6),
        "staleness": StalenessView(mean=0.5, max=2, histogram={0: 5, 2: 5}),
        "metrics": {"loss": 0.25, "grad_norm": 1.5},
        "metric_curves": {"loss": [0.5, 0.25]},
        "usage": {
            "env": UsageView(
                minute={"idle": 5.0, "playing": 75.0, "waiting": 20.0},
                total={"playing": 60.0, "idle": 40.0},
            ),
            "train": UsageView(minute={"training": 60.0}, total={"training": 600.0}),
        },
        "queues": QueuesView(in_flight=53, waiting=4, leases=64, free_slots=2),
        "syncs": [sync("rollout-0"), sync("rollout-1")],
    }
    return Snapshot.model_validate(fields | changes)
