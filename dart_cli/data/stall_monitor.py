"""What data knows of a stalled run beyond the heartbeats.

ProgressMonitor   how long the requests of each rollout worker have yielded no token
next_batch        what the next batch still lacks, as text
AlertLog          logs each finding once when it begins and once when it is over
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bus.messages import Heartbeat
from dart_cli.data.groups import Group, GroupTable

log = logging.getLogger(__name__)

_TOKENS = "tokens"


@dataclass
class _WorkerTokens:
    tokens: float
    in_hand: bool
    since: float  # monotonic seconds


class ProgressMonitor:
    """Rollout workers by the tokens they produce."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._work: dict[str, _WorkerTokens] = {}

    def observe(self, heartbeat: Heartbeat) -> None:
        """Note a rollout worker's heartbeat."""
        gauges = heartbeat.gauges
        if _TOKENS not in gauges:
            self._work.pop(heartbeat.worker, None)
            return
        in_hand = gauges.get("in_flight", 0.0) + gauges.get("waiting", 0.0) > 0
        before = self._work.get(heartbeat.worker)
        tokens = gauges[_TOKENS]
        if before is None or before.tokens != tokens or not (before.in_hand and in_hand):
            self._work[heartbeat.worker] = _WorkerTokens(tokens, in_hand, self._clock())

    def seconds(self, worker: str) -> float:
        """How long its requests have yielded no token; 0 where it has none."""
        work = self._work.get(worker)
        return self._clock() - work.since if work and work.in_hand else 0.0

    def forget(self, worker: str) -> None:
        """The worker is gone."""
        self._work.pop(worker, None)


def next_batch(group_table: GroupTable, groups_per_batch: int) -> str:
    """E.g. `1 of 2 groups are ready; 3 of 8 trajectories of mini/popup have ended, 1 plays`."""
    ready = f"{len(group_table.ready)} of {groups_per_batch} groups are ready"
    if not group_table.open:
        return f"{ready}, none is in play"
    nearest = min(group_table.open, key=_wanting)
    return (
        f"{ready}; {len(nearest.finished)} of {nearest.size} trajectories of {nearest.task_id} "
        f"have ended, {len(nearest.live)} play"
    )


def _wanting(group: Group) -> tuple[int, int]:
    return group.size - len(group.finished), group.number


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
