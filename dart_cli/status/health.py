"""What is wrong with a run, in words a person can act on."""

from __future__ import annotations

from bus.snapshot import Snapshot


def problems(snapshot: Snapshot) -> list[str]:
    """One line for each dead process, refused weight set and known stall; empty where the run is healthy.

    A process that ended because the run is over is no problem.
    """
    if snapshot.stopping:
        return []
    dead = [
        f"{process.worker} on {process.host} has been silent for {process.heartbeat_age_s:.0f} s "
        f"(pid {process.pid}); start it again"
        for process in snapshot.processes
        if not process.alive
    ]
    alive = {process.worker for process in snapshot.processes if process.alive}
    refused = [
        f"{sync.worker} refused version {sync.policy_version}, its old weights serve: {sync.error}"
        for sync in snapshot.syncs
        if sync.error and sync.worker in alive
    ]
    return [*dead, *refused, *snapshot.warnings]
