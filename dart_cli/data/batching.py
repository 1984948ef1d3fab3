"""The batches of a run: formed once, served until they are trained on, also after any restart.

    Batches          which batches exist, which of them are not in the weights, which come again
    Standing         where the run stands when a batch is formed
    BatchPlan        a batch as it is decided: which steps, not yet what they hold
    load             what they hold: the batch as it is served; takes seconds, on any connection
    finished_group   a live group as curate sees it
    step_credit      how its rewards become the advantages of steps
    drops_hint       why there is no batch yet: groups that were dropped since the last one

Which groups a batch takes is decided by curate; the ledger closes them.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import isfinite

from bus.codec import encode
from bus.errors import CheckpointError, ConfigError, OversizeError
from bus.messages import Batch, BatchReply, BatchTrained, Sample, VersionAge
from dart_cli.algo.advantage import RewardKind, training_reward
from dart_cli.config.schema import KEEP_CHECKPOINTS, Config, DataConfig
from dart_cli.data.chains import chained_of, reading_order
from dart_cli.data.curate import Curation, FinishedGroup, Member, StepCredit
from dart_cli.data.groups import Group
from dart_cli.data.replay import (
    Measured,
    ReplayRefusal,
    Replays,
    Uses,
    most_behind,
    refusal,
    replay_subject,
    skip_reason,
)
from dart_cli.data.stall_rules import NO_GRADIENT, TELLING_DROPS
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import BatchRow, Decision, PlannedSample
from dart_cli.data.store.writer import Store
from envs.base import content_hash

Behind = Callable[[int], int]
"""A version that sampled tokens -> versions that it is behind the trainer."""


@dataclass(frozen=True)
class Standing:
    """Where the run stands when a batch is formed; each as in Batch."""

    run_s: float = 0.0
    success: float | None = None
    success_error: float = 0.0  # as in BatchRow
    trajectories: int = 0


@dataclass(frozen=True)
class BatchPlan:
    """A batch as it is decided."""

    batch_id: int
    group_ids: tuple[str, ...]
    temperature: float
    standing: Standing  # when it was formed
    samples: tuple[PlannedSample, ...]  # the steps that are trained on
    is_filed: bool  # False for one that becomes a batch only if it can be sent
    replay_of: int | None = None  # as in BatchRow
    reuse: int = 0  # likewise


class Batches:
    """Batches of one run, numbered from 1, as the store holds them."""

    def __init__(
        self,
        config: Config,
        store: Store,
        tasks: Iterable[str],
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`tasks`: ids of those that the run plays now."""
        self.formed = 0  # batches; their ids are 1 .. formed
        self.untrained: set[int] = set()  # of these, batches that are not in the weights
        self.trained_version = 0  # of the newest trained one, as read at the start
        self._standing = Standing()  # of the newest one
        self._best: Measured | None = None  # the highest success at the same tasks that is sure
        self._tasks = content_hash(json.dumps(sorted(tasks)).encode())
        self._config = config
        self._store = store
        self._wall = wall
        self._served: Batch | None = None  # the batch read last
        self.refused_replays = 0  # since this process started
        self._replays = Replays(config.train.reuse, config.train.reuse_gap)
        for row in store.batches():
            self._note_filed(row)
            if row.state == "batched":
                self.untrained.add(row.id)
            self.trained_version = row.trained_version or self.trained_version
        for first in store.refused_replays((self._replays.oldest or 1) - 1):
            self._replays.end(first)

    @property
    def updates(self) -> int:
        """Batches in the weights."""
        return self.formed - len(self.untrained)

    @property
    def owed_replays(self) -> int:
        """Replays that come before the next fresh batch, if none is refused."""
        return self._replays.owed

    def oldest_untrained(self) -> BatchPlan | None:
        """The batch that the trainer needs next; None if it has all."""
        if not self.untrained:
            return None
        batch_id = min(self.untrained)
        row = self._store.batch(batch_id)
        return BatchPlan(
            batch_id,
            tuple(self._store.batch_groups(batch_id)),
            row.temperature,
            _standing(row),
            tuple(self._store.planned_samples(batch_id)),
            is_filed=True,
            replay_of=row.replay_of,
            reuse=row.reuse,
        )

    def planned(self, curation: Curation, standing: Standing) -> BatchPlan:
        """The next batch, of the chosen groups."""
        return BatchPlan(
            self.formed + 1,
            tuple(group.id for group in curation.chosen),
            self._config.rollout.temperature,
            self._not_before(standing),
            tuple(sample for sample in curation.samples if sample.weight),
            is_filed=False,
        )

    def planned_replay(self, standing: Standing, behind: Behind) -> BatchPlan | None:
        """The next batch, of the samples of an earlier one; None if a fresh one comes next.

        Writes down which batches are not trained on again although it is their turn, and why.
        """
        while use := self._replays.due():
            reason = self._refusal(use, standing, behind)
            if reason is None:
                return BatchPlan(
                    self.formed + 1,
                    tuple(self._store.batch_groups(use.first)),
                    self._store.batch(use.first).temperature,
                    self._not_before(standing),
                    tuple(self._store.planned_samples(use.first)),
                    is_filed=False,
                    replay_of=use.first,
                    reuse=use.reused + 1,
                )
            self._replays.end(use.first)
            self._refuse(use.first, reason)
        return None

    def served(self, plan: BatchPlan) -> Batch | None:
        """The batch that was served last, if it is this one."""
        served = self._served
        return served if served is not None and served.batch_id == plan.batch_id else None

    def file(
        self,
        plan: BatchPlan,
        batch: Batch,
        curation: Curation | None,
        *,
        trainer_version: int,
        behind: Behind,
        at: float,
    ) -> None:
        """File a loaded batch for a trainer at `trainer_version`.

        Of the chosen groups; a replay has no `curation`. `at` in unix seconds.
        """
        first = plan.replay_of
        assert (curation is None) == (first is not None)
        row = BatchRow(
            id=plan.batch_id,
            state="batched",
            formed_at=at,
            formed_version=trainer_version,
            temperature=plan.temperature,
            reward=self._store.batch(first or 0).reward if curation is None else curation.reward,
            trained_at=None,
            trained_version=None,
            replay_of=first,
            reuse=plan.reuse,
            tasks=self._tasks,
            **vars(plan.standing),
        )
        if curation is None:
            self._store.add_batch(row, (), (), ())
            used = Decision(replay_subject(first or 0), True, "replay", 1.0, row.id)
            self._store.add_decisions([used], at)
        else:
            self._store.add_batch(
                row,
                plan.group_ids,
                curation.samples,
                [member.trajectory_id for group in curation.chosen for member in group.valid],
                [group.pool.trajectory_id for group in curation.chosen if group.pool],
            )
        self._note_filed(row)
        self.untrained.add(row.id)
        self._store.add_staleness(row.id, _staleness(batch, behind))

    def serve(self, batch: Batch, behind: Behind) -> Batch:
        """The loaded batch as the trainer gets it: with the age of what sampled it, as of now."""
        if self._served is not None and self._served.batch_id == batch.batch_id:
            return self._served
        ages = [
            VersionAge(version=each, behind=behind(each)) for each in _sampled_by(batch.samples)
        ]
        self._served = batch.model_copy(update={"ages": ages})
        return self._served

    def trained(self, trained: BatchTrained) -> dict[str, float] | None:
        """The batch is in the weights: its finite metrics; None if that was reported before.

        Its mean reward joins the trainer's metrics: a sample carries its advantage only.
        """
        if trained.batch_id not in self.untrained:
            return None
        metrics = {name: value for name, value in trained.metrics.items() if isfinite(value)}
        row = self._store.batch(trained.batch_id)
        if row.replay_of is None:
            metrics["reward"] = row.reward
            metrics |= self._curation_metrics(trained.batch_id)
        self._store.batch_trained(trained, metrics, self._wall())
        self.untrained.remove(trained.batch_id)
        if (reason := skip_reason(metrics)) is not None:
            self._note_skipped(row, reason)
        return metrics

    def resume_after(self, last_batch_id: int) -> None:
        """The trainer's checkpoint ends at that batch: those after it are served again, in order.

        Raises CheckpointError if the checkpoint is not of this run, or too old.
        """
        if last_batch_id > self.formed:
            raise CheckpointError(
                f"the trainer's checkpoint holds batch {last_batch_id}, {self._store.path} "
                f"ends at {self.formed}: they are of different runs; choose another run.dir"
            )
        if (lost := self._store.unservable_batch(last_batch_id)) is not None:
            raise CheckpointError(
                f"the trainer's checkpoint ends at batch {last_batch_id}; batch {lost} cannot be "
                "served again, its screenshots were removed to keep data.max_gb; "
                "use a newer checkpoint, or another run.dir"
            )
        after = set(range(last_batch_id + 1, self.formed + 1))
        for batch_id in sorted(self.untrained - after):
            self._store.batch_in_checkpoint(batch_id, self._wall())
        for batch_id in sorted(after - self.untrained):
            self._store.batch_untrained(batch_id)
        self.untrained = after

    def oldest_group_needed(self) -> int | None:
        """Number of the first group of the batches that may be served again; None if none may.

        Those are all after the oldest checkpoint that a trainer may go back to, and one to spare. The
        newest may still be being written, and counts only when it is complete. And those that may be
        trained on again.
        """
        train = self._config.train
        newest = min(self.untrained, default=self.formed + 1) - 1
        return self._store.first_group(
            newest - train.checkpoint_every * (KEEP_CHECKPOINTS + 2), self._replays.oldest
        )

    def _not_before(self, standing: Standing) -> Standing:
        """No batch is formed earlier in the run than the one before.

        A data process that was killed forgets its last seconds and verdicts, the batches do not.
        """
        before = self._standing
        return replace(
            standing,
            run_s=max(standing.run_s, before.run_s),
            trajectories=max(standing.trajectories, before.trajectories),
        )

    def _note_filed(self, row: BatchRow) -> None:
        self.formed = row.id
        self._standing = _standing(row)
        if row.tasks == self._tasks:  # success at other tasks is no measure of that at these
            known = [each for each in (self._best, _measured(self._standing)) if each is not None]
            self._best = max(known, key=lambda each: each.least, default=None)
        self._replays.filed(row.id, row.replay_of, row.reuse)

    def _refusal(self, use: Uses, standing: Standing, behind: Behind) -> ReplayRefusal | None:
        train, data = self._config.train, self._config.data
        every = self._config.weights.publish_every
        return refusal(
            is_complete=self._store.has_screenshots(use.first),
            behind=max(map(behind, self._store.versions_of_batch(use.first)), default=0),
            most=most_behind(
                data.max_staleness, use.reused + 1, train.reuse, train.reuse_gap, every
            ),
            success=_measured(standing),
            best=self._best,
            until=train.reuse_until,
            fall=train.reuse_fall,
        )

    def _note_skipped(self, row: BatchRow, reason: ReplayRefusal) -> None:
        """The trainer skipped the batch: it is not trained on again; of a replay that is told once."""
        first = row.replay_of or row.id
        told = self._store.decisions(replay_subject(first))
        is_new = row.replay_of is not None and all(each.used for each in told)
        if self._replays.end(first) or is_new:
            self._refuse(first, reason, row.id)

    def _refuse(self, first: int, reason: ReplayRefusal, batch_id: int | None = None) -> None:
        """Write down that a batch is not trained on again; `batch_id` is the use that decided."""
        refused = Decision(replay_subject(first), False, reason, 0.0, batch_id)
        self._store.add_decisions([refused], self._wall())
        self.refused_replays += 1

    def _curation_metrics(self, batch_id: int) -> dict[str, float]:
        """What selection, pool and credit for steps made of the batch; only of those that are on."""
        data = self._config.data
        found = {}
        if data.high_entropy < 1:
            found["steps_left_out"] = self._store.share_left_out(batch_id)
        if data.pool_ratio:
            found["pool_tokens"] = self._store.share_of_pool(batch_id)
        if data.screen_credit != "off":
            found["steps_on_shared_screens"] = self._store.share_credited(batch_id)
        if data.fork_weight:
            found["forks"] = float(self._store.count_forks(batch_id))
        return found


def load(reader: Reader, plan: BatchPlan) -> Batch:
    """What the planned steps hold, with their screens; reads nothing but trajectories' steps.

    Seconds for a large batch, so data does it in a thread, on a connection of that thread's own.
    Raises ConfigError if it cannot be sent.
    """
    order = reading_order(plan.samples)
    steps = reader.planned_steps([plan.samples[index] for index in order])
    chains, samples = chained_of(steps, order)
    hashes = (name for chain in chains for name in chain.image_hashes)
    batch = Batch.model_construct(
        batch_id=plan.batch_id,
        group_ids=list(plan.group_ids),
        temperature=plan.temperature,
        run_s=plan.standing.run_s,
        success=plan.standing.success,
        trajectories=plan.standing.trajectories,
        reuse=plan.reuse,
        chains=chains,
        samples=samples,
        images=reader.screenshots(hashes),
        ages=[],
    )
    _check_size(batch, is_filed=plan.is_filed)
    return batch


def _standing(row: BatchRow) -> Standing:
    return Standing(row.run_s, row.success, row.success_error, row.trajectories)


def _measured(standing: Standing) -> Measured | None:
    success = standing.success
    return None if success is None else Measured(success, standing.success_error)


def finished_group(group: Group, kind: RewardKind, behind: Behind = lambda _: 0) -> FinishedGroup:
    """The group as curate sees it; `kind` is data.reward."""
    members = tuple(
        Member(
            attempt.id,
            attempt.outcome,
            attempt.steps,
            max(map(behind, attempt.versions), default=0),
            tuple(attempt.entropies[step] for step in range(attempt.steps)),
            attempt.reward,
        )
        for attempt in group.finished
        if attempt.outcome is not None
    )
    row = group.pool_member
    pool = None
    if row is not None:
        reward = training_reward("pass", row.reward, kind)
        pool = Member(row.trajectory_id, "pass", row.steps, 0, (), reward)
    return FinishedGroup(group.id, members, pool, group.task_id)


def step_credit(data: DataConfig) -> StepCredit:
    """How this run's rewards become the advantages of steps."""
    return StepCredit(
        discount=data.discount,
        screen_credit=data.screen_credit,
        screen_weight=data.screen_weight,
        screen_discount=data.screen_discount,
        fork_weight=data.fork_weight,
    )


def drops_hint(dropped: Counter[str]) -> str:
    """The groups dropped since the last batch, by reason; empty if there are none."""
    if not dropped:
        return ""
    counts = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
    [(most, number)] = dropped.most_common(1)
    hint = f"; {NO_GRADIENT[most]}" if most in NO_GRADIENT and number >= TELLING_DROPS else ""
    return f"; dropped since the last batch: {counts}{hint}"


def _sampled_by(samples: Iterable[Sample]) -> list[int]:
    """The versions that sampled a token, in order."""
    return sorted({span.version for each in samples for span in each.version_spans})


def _staleness(batch: Batch, behind: Behind) -> dict[int, int]:
    """Tokens of the batch by how many versions behind the trainer they were sampled.

    Those of the pool have no spans and do not count.
    """
    tokens: dict[int, int] = {}
    for sample in batch.samples:
        for span in sample.version_spans:
            age = behind(span.version)
            tokens[age] = tokens.get(age, 0) + span.end - span.start
    return tokens


def _check_size(batch: Batch, *, is_filed: bool) -> None:
    """Raise ConfigError if the batch is larger than a message may be."""
    try:
        encode(BatchReply.model_construct(batch=batch, retry_after_s=0.0, reason=""))
    except OversizeError as error:
        groups = len(batch.group_ids)
        if is_filed:
            cure = "it is filed already: choose another run.dir, with a lower data.groups_per_batch"
        elif groups > 1:
            cure = f"lower data.groups_per_batch, now {groups}, and start dart data and train again"
        else:
            cure = "choose another run.dir, with a lower data.group_size or smaller screenshots"
        raise ConfigError(
            f"batch {batch.batch_id} of {groups} groups, {len(batch.samples)} steps and "
            f"{len(batch.images)} screenshots cannot be sent to the trainer: {error}; {cure}"
        ) from None
