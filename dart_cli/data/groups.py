"""The live groups of a run and their leases, in memory, rebuilt from the store at each start.

    Attempt  one lease of one member      Group  the attempts at one task instance
    GroupTable    all groups that are open or wait for a batch
    restored_groups   the same, read from the store at a start

A group wants `size` valid trajectories, of at most `max_steps` steps each. An attempt that ends
without a verdict (invalid, its lease lost) is replaced, until there were `max_attempts` in all; after
that the group is compared with the members that it has. Every attempt is a row of the store, so the
bound holds over restarts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from bus.messages import Outcome
from dart_cli.algo.advantage import RewardKind, mean_entropy, training_reward
from dart_cli.config.schema import DataConfig
from dart_cli.data.store.rows import GroupRow, PoolRow, TrajectoryRow
from dart_cli.data.store.writer import Store
from envs.contract.base import Task, reward_of

AttemptState = Literal["leased", "playing", "finished", "dropped"]

SlotKey = tuple[str, int]
"""Name of an environment process, and the slot's index there."""


@dataclass
class Attempt:
    """One trajectory of a live group."""

    id: str
    number: int  # from 0, within the group
    worker: str
    slot: int
    sampling_seed: int
    renewed_at: float  # monotonic seconds of the last sign of life
    state: AttemptState = "leased"
    started_at: float | None = None  # of the process that plays it; None until it is known
    outcome: Outcome | None = None  # pass or fail once finished
    verdict_reward: float = 0.0  # once finished
    reward: float = 0.0  # that advantages are computed from, by data.reward; once finished
    steps: int = 0
    versions: set[int] = field(default_factory=set)  # of the weights that sampled its tokens so far
    entropies: dict[int, float] = field(default_factory=dict)  # step -> mean over its tokens, nats
    counted: bool = False  # its outcome is part of its task's success

    @property
    def live(self) -> bool:
        """Its lease is out."""
        return self.state in ("leased", "playing")

    def judged(self, outcome: Outcome, reward: float | None, kind: RewardKind) -> None:
        """Its verdict; `kind` is data.reward."""
        self.outcome = outcome
        self.verdict_reward = reward_of(outcome, reward) or 0.0
        self.reward = training_reward(outcome, reward, kind) or 0.0


@dataclass
class Group:
    """One task instance and the attempts at it."""

    id: str
    number: int  # order of opening, from 1
    suite: str
    task_id: str
    task_seed: int
    size: int  # valid trajectories wanted
    max_steps: int  # of each of its leases
    max_attempts: int  # leases that it may ever give out
    state: Literal["open", "ready"] = "open"
    attempts: dict[str, Attempt] = field(default_factory=dict)
    pool_member: PoolRow | None = None  # a past success that joined it, since all of its own failed

    @property
    def live(self) -> list[Attempt]:
        """Attempts in play."""
        return [attempt for attempt in self.attempts.values() if attempt.live]

    @property
    def finished(self) -> list[Attempt]:
        """Attempts with a verdict of pass or fail."""
        return [attempt for attempt in self.attempts.values() if attempt.state == "finished"]

    @property
    def versions(self) -> set[int]:
        """Of the weights that sampled any token of it."""
        counted = (each for each in self.attempts.values() if each.state != "dropped")
        return {version for attempt in counted for version in attempt.versions}

    @property
    def half(self) -> int:
        """Members that are played first with data.early_stop; one alone is compared with nothing."""
        return max((self.size + 1) // 2, 2)

    def uncounted(self, early_stop: bool) -> list[Attempt]:
        """Members with a verdict that become part of their task's success now.

        All; with data.early_stop those of the first half, in order of lease, one without a verdict
        replaced by the next. Whether the second half is played depends on the first: to count it
        would count an instance on which the policy fails up to twice as often as one that it
        solves. The first half counts alike whatever it shows, so the mean is the policy's success.
        """
        taken = [attempt for attempt in self.attempts.values() if attempt.state != "dropped"]
        first = taken[: self.half if early_stop else self.size]
        return [each for each in first if each.state == "finished" and not each.counted]

    def wanted(self, early_stop: bool) -> int:
        """How many leases it may give out now."""
        if self.state != "open":
            return 0
        taken = 0  # finished or in play
        are_passed = True
        rewards = set()  # of passes; with data.reward = "value" they may differ
        for attempt in self.attempts.values():
            if attempt.state != "dropped":
                taken += 1
                are_passed = are_passed and attempt.outcome != "fail"
                if attempt.outcome is not None:
                    rewards.add(attempt.reward)
        has_no_gradient = are_passed and len(rewards) <= 1
        target = self.half if early_stop and has_no_gradient else self.size
        attempts_left = self.max_attempts - len(self.attempts)
        return max(0, min(target - taken, attempts_left))

    def over(self, early_stop: bool) -> bool:
        """Nothing is in play and nothing more will be."""
        return not self.live and self.wanted(early_stop) == 0


@dataclass
class GroupTable:
    """All live groups, in the order they were opened; changed through its methods only."""

    groups: dict[str, Group] = field(default_factory=dict)
    opened: int = 0  # groups ever opened: the newest one's number
    _played: dict[SlotKey, list[tuple[Group, Attempt]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for group in self.groups.values():
            self._index(group)

    @property
    def open(self) -> list[Group]:
        """Groups that play."""
        return [group for group in self.groups.values() if group.state == "open"]

    @property
    def ready(self) -> list[Group]:
        """Groups that wait for a batch."""
        return [group for group in self.groups.values() if group.state == "ready"]

    def add(self, group: Group) -> None:
        """Add a group that begins, or goes on after a restart with the attempts it has."""
        self.groups[group.id] = group
        self.opened = max(self.opened, group.number)
        self._index(group)

    def add_attempt(self, group: Group, attempt: Attempt) -> None:
        """One more member of a group is leased."""
        group.attempts[attempt.id] = attempt
        self._played.setdefault((attempt.worker, attempt.slot), []).append((group, attempt))

    def remove(self, group: Group) -> None:
        """Remove a group that is in a batch or dropped."""
        del self.groups[group.id]
        for slot in {(attempt.worker, attempt.slot) for attempt in group.attempts.values()}:
            rest = [found for found in self._played[slot] if found[0] is not group]
            if rest:
                self._played[slot] = rest
            else:
                del self._played[slot]

    def find(self, trajectory_id: str) -> tuple[Group, Attempt] | None:
        """Return the attempt of that id and its group, if the group lives."""
        group = self.groups.get(group_of(trajectory_id))
        attempt = group.attempts.get(trajectory_id) if group else None
        return (group, attempt) if group and attempt else None

    def played_by(self, worker: str, slot: int) -> list[tuple[Group, Attempt]]:
        """Return what a slot plays or has played in live groups, in the order of leasing."""
        return self._played.get((worker, slot), [])

    def live(self) -> Iterator[tuple[Group, Attempt]]:
        """Every attempt in play."""
        for group in self.groups.values():
            for attempt in group.live:
                yield group, attempt

    def _index(self, group: Group) -> None:
        for attempt in group.attempts.values():
            self._played.setdefault((attempt.worker, attempt.slot), []).append((group, attempt))


def restored_groups(
    store: Store, tasks: Mapping[str, Task], data: DataConfig, now: float
) -> GroupTable:
    """Return the groups that are open or wait for a batch, with every attempt at them.

    `now` in monotonic seconds: a lease may have been played on while no data process was running.
    It gets its whole time again, and its worker's heartbeats or their absence decide.
    """
    table = GroupTable(opened=store.newest_group())
    for row in store.groups("open", "ready"):
        table.add(_group(store, row, tasks.get(row.task_id)))
    for member in store.trajectories(group_ids=list(table.groups)):
        group = table.groups[member.group_id]
        group.max_steps = member.max_steps  # of all its leases alike
        table.add_attempt(group, _attempt(store, member, data, now))
    return table


def _group(store: Store, row: GroupRow, task: Task | None) -> Group:
    group = Group(
        row.id,
        row.number,
        row.suite,
        row.task_id,
        row.task_seed,
        row.size,
        task.max_steps if task else 0,  # without its task it is dropped
        most_attempts(row.size),
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


def most_attempts(size: int) -> int:
    """Leases that a group may ever give out: one a member, and one more in place of each."""
    return 2 * size


def group_id(number: int) -> str:
    """Id of the group that was opened as `number`."""
    return f"g{number:06d}"


def trajectory_id(group: str, attempt: int) -> str:
    """Id of a group's attempt."""
    return f"{group}-{attempt:02d}"


def group_of(trajectory: str) -> str:
    """Id of the group a trajectory belongs to."""
    return trajectory.rpartition("-")[0]
