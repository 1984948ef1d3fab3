"""The live groups of a run and their leases, in memory; they are read from the store at each start.

    Attempt           one trajectory of a group, from its lease to its verdict
    Group             the attempts at one task instance
    GroupTable        all groups that are open or wait for a batch
    restored_groups   reads the GroupTable from the store

A group needs `size` valid trajectories, of at most `max_steps` steps each. An attempt that ends without a
verdict (it was invalid, or its lease was lost) is replaced, until the group has had `max_attempts`. After
that the members that it has are compared. Every attempt is a row of the store, so the bound holds over
restarts.
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
    started_at: float | None = None
    """Unix seconds of the start of the process that plays it; None before it is reported."""
    outcome: Outcome | None = None  # pass or fail once finished
    verdict_reward: float = 0.0  # the environment's reward, once finished
    reward: float = 0.0  # the reward by data.reward, for advantages; once finished
    steps: int = 0
    versions: set[int] = field(default_factory=set)  # of the weights that sampled its tokens so far
    entropies: dict[int, float] = field(default_factory=dict)  # step -> mean over its tokens, nats
    is_counted: bool = False  # its outcome is part of its task's success

    @property
    def is_live(self) -> bool:
        """True while the attempt is leased to a slot."""
        return self.state in ("leased", "playing")

    def note_verdict(self, outcome: Outcome, reward: float | None, kind: RewardKind) -> None:
        """Set the outcome and the rewards; `kind` is data.reward."""
        self.outcome = outcome
        self.verdict_reward = reward_of(outcome, reward) or 0.0
        self.reward = training_reward(outcome, reward, kind) or 0.0


@dataclass
class Group:
    """A task instance and the attempts at it."""

    id: str
    number: int  # order of opening, from 1
    suite: str
    task_id: str
    task_seed: int
    size: int  # valid trajectories that it needs
    max_steps: int  # of each attempt
    max_attempts: int  # in all
    state: Literal["open", "ready"] = "open"
    attempts: dict[str, Attempt] = field(default_factory=dict)
    pool_member: PoolRow | None = None
    """A past success that joined a group whose own members all failed."""

    @property
    def live(self) -> list[Attempt]:
        """Attempts in play."""
        return [attempt for attempt in self.attempts.values() if attempt.is_live]

    @property
    def finished(self) -> list[Attempt]:
        """Attempts with a verdict of pass or fail."""
        return [attempt for attempt in self.attempts.values() if attempt.state == "finished"]

    @property
    def versions(self) -> set[int]:
        """Versions of the weights that sampled any of its tokens."""
        attempts = (attempt for attempt in self.attempts.values() if attempt.state != "dropped")
        return {version for attempt in attempts for version in attempt.versions}

    @property
    def half(self) -> int:
        """Number of members that are played first with data.early_stop; at least two, to compare them."""
        return max((self.size + 1) // 2, 2)

    def uncounted(self, early_stop: bool) -> list[Attempt]:
        """Return the finished members that become part of their task's success now.

        These are all members, or with data.early_stop the first half in order of lease, where an attempt
        without a verdict is replaced by the next. The second half must not count: it is played only if the
        first has a failure, so an instance on which the policy fails would count up to twice as often as
        one that it solves. The first half always counts, so the mean is the policy's success.
        """
        members = [attempt for attempt in self.attempts.values() if attempt.state != "dropped"]
        first = members[: self.half if early_stop else self.size]
        return [member for member in first if member.state == "finished" and not member.is_counted]

    def vacancies(self, early_stop: bool) -> int:
        """Return how many more attempts of the group may be leased now."""
        if self.state != "open":
            return 0
        members = 0  # finished or in play
        has_failure = False
        # Rewards of finished members; with data.reward = "value" the rewards of passes may differ.
        rewards = set()
        for attempt in self.attempts.values():
            if attempt.state != "dropped":
                members += 1
                has_failure = has_failure or attempt.outcome == "fail"
                if attempt.outcome is not None:
                    rewards.add(attempt.reward)
        has_no_gradient = not has_failure and len(rewards) <= 1
        target = self.half if early_stop and has_no_gradient else self.size
        attempts_left = self.max_attempts - len(self.attempts)
        return max(0, min(target - members, attempts_left))

    def is_over(self, early_stop: bool) -> bool:
        """Return True if no attempt is in play and none will be leased."""
        return not self.live and self.vacancies(early_stop) == 0


@dataclass
class GroupTable:
    """All live groups, in the order they were opened; they are added and removed through its methods only."""

    groups: dict[str, Group] = field(default_factory=dict)
    opened: int = 0  # groups ever opened: the newest one's number
    _by_slot: dict[SlotKey, list[tuple[Group, Attempt]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for group in self.groups.values():
            self._index(group)

    @property
    def open(self) -> list[Group]:
        """Groups whose attempts are played."""
        return [group for group in self.groups.values() if group.state == "open"]

    @property
    def ready(self) -> list[Group]:
        """Groups that wait for a batch."""
        return [group for group in self.groups.values() if group.state == "ready"]

    def add(self, group: Group) -> None:
        """Add a new group, or one from the store with the attempts that it has."""
        self.groups[group.id] = group
        self.opened = max(self.opened, group.number)
        self._index(group)

    def add_attempt(self, group: Group, attempt: Attempt) -> None:
        """Add a leased attempt to its group."""
        group.attempts[attempt.id] = attempt
        self._by_slot.setdefault((attempt.worker, attempt.slot), []).append((group, attempt))

    def remove(self, group: Group) -> None:
        """Remove a group that is in a batch or dropped."""
        del self.groups[group.id]
        for slot in {(attempt.worker, attempt.slot) for attempt in group.attempts.values()}:
            rest = [
                (other, attempt) for other, attempt in self._by_slot[slot] if other is not group
            ]
            if rest:
                self._by_slot[slot] = rest
            else:
                del self._by_slot[slot]

    def find(self, trajectory_id: str) -> tuple[Group, Attempt] | None:
        """Return a trajectory's group and attempt; None if its group is not live."""
        group = self.groups.get(group_of(trajectory_id))
        attempt = group.attempts.get(trajectory_id) if group else None
        return (group, attempt) if group and attempt else None

    def played_by(self, worker: str, slot: int) -> list[tuple[Group, Attempt]]:
        """Return the attempts of a slot in live groups, each with its group, in order of lease."""
        return self._by_slot.get((worker, slot), [])

    def live_attempts(self) -> Iterator[tuple[Group, Attempt]]:
        """Yield every attempt in play with its group."""
        for group in self.groups.values():
            for attempt in group.live:
                yield group, attempt

    def _index(self, group: Group) -> None:
        for attempt in group.attempts.values():
            self._by_slot.setdefault((attempt.worker, attempt.slot), []).append((group, attempt))


def restored_groups(
    store: Store, tasks: Mapping[str, Task], data: DataConfig, now: float
) -> GroupTable:
    """Return the stored groups that are open or wait for a batch, with all their attempts.

    The leases count as renewed at `now` (monotonic seconds), since they may have been played on while no data
    service was running.
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
    """Return a stored group without its attempts; `task` is None if it was removed from the run."""
    group = Group(
        id=row.id,
        number=row.number,
        suite=row.suite,
        task_id=row.task_id,
        task_seed=row.task_seed,
        size=row.size,
        max_steps=task.max_steps if task else 0,  # a group whose task was removed is dropped
        max_attempts=most_attempts(row.size),
        state="open" if row.state == "open" else "ready",
    )
    if row.pool_member is not None:
        group.pool_member = store.pool_member(row.pool_member)
    return group


def _attempt(store: Store, row: TrajectoryRow, data: DataConfig, now: float) -> Attempt:
    """Return a stored trajectory as an attempt whose lease is renewed at `now`."""
    attempt = Attempt(
        id=row.id,
        number=row.attempt,
        worker=row.worker,
        slot=row.slot,
        sampling_seed=row.sampling_seed,
        renewed_at=now,
    )
    if row.outcome is not None:
        attempt.note_verdict(row.outcome, row.reward, data.reward)
    attempt.steps = row.steps or 0
    attempt.is_counted = bool(row.counted)
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
    """Return how many attempts a group may have in all: one for each member, and one to replace each."""
    return 2 * size


def group_id(number: int) -> str:
    """Return the id of the group that was opened as `number`."""
    return f"g{number:06d}"


def trajectory_id(group: str, attempt: int) -> str:
    """Return the id of a group's attempt."""
    return f"{group}-{attempt:02d}"


def group_of(trajectory: str) -> str:
    """Return the id of the group that a trajectory belongs to."""
    return trajectory.rpartition("-")[0]
