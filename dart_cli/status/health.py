"""The problems of a run, in words that a person can act on."""

from __future__ import annotations

from bus.snapshot import Snapshot


def problems(snapshot: Snapshot) -> list[str]:
    """One line for each stall, refused weight set and warning; empty where the run is healthy.

    Dead processes are stalls. A process that ended because the run is over is not a problem.
    """
    if snapshot.stopping:
        return []
    alive = {process.worker for process in snapshot.processes if process.alive}
    refused = [
        f"{sync.worker} refused version {sync.policy_version}, its old weights serve: {sync.error}"
        for sync in snapshot.syncs
        if sync.error and sync.worker in alive
    ]
    return [*(stall.text for stall in snapshot.stalls), *refused, *snapshot.warnings]
