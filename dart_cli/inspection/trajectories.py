"""Trajectories of a run as they are shown on the terminal, in the browser and as JSON.

TrajectoryFilter    the conditions of a list of trajectories
Subject             a trajectory of the run, a member of its pool, or both
subjects_of         rows of the ledger -> subjects
TrajectoryDetails   all of one trajectory: its steps, the judges' verdicts, the batches that it was part of
Step                a step with its certainty, the weights that sampled it, and its use in batches
read_trajectory     a subject -> its details
subject_json        a subject as plain values, by the names of the ledger
details_json        the details as plain values
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from statistics import fmean
from typing import Any

from pydantic_core import to_jsonable_python

from bus.messages import Outcome
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import (
    GroupRow,
    JudgementRow,
    PoolRow,
    SampleRow,
    TrajectoryRow,
    TrajectoryState,
)
from dart_cli.data.store.steps import StepRow
from dart_cli.evaluation.marks import step_words
from dart_cli.language.pointer_tokens import DrawnPatch, drawn_patches, drop_forced
from dart_cli.runtime.tables import or_dash

Json = dict[str, Any]

STATES: tuple[TrajectoryState, ...] = (
    "leased",
    "playing",
    "finished",
    "batched",
    "trained",
    "dropped",
)
CANCELLED = "cancelled"
"""The reason of a trajectory that the end of the run, or of its lease, cut off."""

_LEFT_OUT = {
    "low_entropy": "the policy was most certain here; data.high_entropy leaves such steps out"
}
_NOT_IN_JSON = {"prompt_token_ids", "image_hashes", "sampled", "pointed", "hint"}


@dataclass(frozen=True)
class TrajectoryFilter:
    """The conditions of a list of trajectories: a trajectory must match every field that is set.

    Cancelled trajectories are listed only if `state`, `outcome` or `reason` is set.
    """

    task_id: str | None = None
    outcome: Outcome | None = None
    state: TrajectoryState | None = None
    reason: str | None = None
    version: int | None = None

    @property
    def hides_cancelled(self) -> bool:
        """Whether cancelled trajectories are left out."""
        return not (self.state or self.outcome or self.reason)

    @property
    def conditions(self) -> Json:
        """The filter as arguments of a Reader's queries."""
        return asdict(self) | ({"but_reason": CANCELLED} if self.hides_cancelled else {})

    def count_hidden(self, reader: Reader) -> int:
        """Return the number of cancelled trajectories that are left out."""
        if not self.hides_cancelled:
            return 0
        return reader.count_trajectories(**asdict(self) | {"reason": CANCELLED})


@dataclass(frozen=True)
class Subject:
    """A trajectory of the run, a member of its pool, or both."""

    id: str
    suite: str
    task_id: str
    task_seed: int
    trajectory: TrajectoryRow | None  # None if it was imported into the pool
    group: GroupRow | None
    pool: PoolRow | None

    @classmethod
    def of_run(
        cls, trajectory: TrajectoryRow, group: GroupRow, pool: PoolRow | None = None
    ) -> Subject:
        """Return the subject of a trajectory that the run played."""
        return cls(
            id=trajectory.id,
            suite=group.suite,
            task_id=group.task_id,
            task_seed=group.task_seed,
            trajectory=trajectory,
            group=group,
            pool=pool,
        )

    @classmethod
    def of_pool(cls, row: PoolRow) -> Subject:
        """Return the subject of a member of the pool."""
        return cls(
            id=row.trajectory_id,
            suite=row.suite,
            task_id=row.task_id,
            task_seed=row.task_seed,
            trajectory=None,
            group=None,
            pool=row,
        )


def subjects_of(reader: Reader, rows: Sequence[TrajectoryRow]) -> list[Subject]:
    """Return the subjects of rows of the ledger. A group is stored before its members, so none is missing."""
    groups = reader.groups_by_id(row.group_id for row in rows)
    return [Subject.of_run(row, groups[row.group_id]) for row in rows]


@dataclass(frozen=True)
class Span:
    """Completion tokens [start, end) that the weights of one version sampled."""

    version: int  # -1: unknown
    start: int
    end: int
    logprob: float | None  # mean over the tokens that were drawn, nats
    least: float | None  # log-probability of the least likely token, nats
    entropy: float | None  # mean over the tokens that were drawn, nats


@dataclass(frozen=True, kw_only=True)
class Step(StepRow):
    """A step as it was submitted, with statistics of its tokens and its use in batches."""

    logprob: float | None  # mean over the tokens that were drawn, nats
    entropy: float | None  # mean over the tokens that were drawn, nats
    spans: list[Span]
    patches: list[DrawnPatch]  # the patches that its pointers drew, in order
    uses: list[SampleRow]  # its samples in new batches (without replays), the oldest first

    @property
    def versions(self) -> list[int]:
        """The versions of the weights that sampled it; empty if they are unknown."""
        return sorted({span.version for span in self.spans if span.version >= 0})

    @property
    def action_text(self) -> str:
        """The actions as one short line, or the reason why the text was not an action."""
        return step_words(self.actions) if self.actions else f"no action: {self.error}"


@dataclass(frozen=True)
class TrajectoryDetails:
    """All of one trajectory but its images."""

    subject: Subject
    instruction: str
    judgements: list[JudgementRow]
    again_in: list[int]  # the batches that replayed its samples
    steps: list[Step]


def read_trajectory(reader: Reader, subject: Subject) -> TrajectoryDetails:
    """Read everything about one trajectory except its images."""
    uses: dict[int, list[SampleRow]] = {}
    for row in reader.sample_rows(subject.id):
        uses.setdefault(row.step, []).append(row)
    batches = sorted({row.batch_id for rows in uses.values() for row in rows})
    return TrajectoryDetails(
        subject=subject,
        instruction=reader.instruction(subject.suite, subject.task_id, [subject.id]),
        judgements=reader.judgements(subject.id),
        again_in=[replay.id for batch_id in batches for replay in reader.replays(batch_id)],
        steps=[_step(row, uses.get(row.step, [])) for row in reader.steps(subject.id)],
    )


def why_left_out(use: SampleRow) -> str:
    """Return why a step of a batch is not trained on; empty if the reason itself explains it."""
    return _LEFT_OUT.get(use.reason, "")


def patch_words(patch: DrawnPatch) -> str:
    """Return a patch in words: its place, log-probability and entropy."""
    place = "" if patch.row is None else f" (row {patch.row}, column {patch.column})"
    logprob, entropy = or_dash(patch.logprob, ".3f"), or_dash(patch.entropy, ".3f")
    return f"token {patch.token}: patch {patch.patch}{place}, log-prob {logprob}, entropy {entropy}"


def subject_json(subject: Subject) -> Json:
    """Return the rows of a trajectory as one JSON object."""
    row = {} if subject.trajectory is None else asdict(subject.trajectory)
    rest = asdict(subject)
    return {**row, **{key: rest[key] for key in ("id", "suite", "task_id", "task_seed", "pool")}}


def details_json(details: TrajectoryDetails) -> Json:
    """Return all of one trajectory but its tokens and images as one JSON object."""
    return subject_json(details.subject) | {
        "instruction": details.instruction,
        "judgements": to_jsonable_python(details.judgements),
        "again_in": details.again_in,
        "trajectory_steps": [
            to_jsonable_python(step, exclude=_NOT_IN_JSON)
            | {"prompt_tokens": len(step.prompt_token_ids), "tokens": len(step.sampled.token_ids)}
            for step in details.steps
        ],
    }


def _step(row: StepRow, uses: list[SampleRow]) -> Step:
    """Return a step with the statistics of its tokens."""
    sampled = row.sampled
    return Step(
        **vars(row),
        logprob=_mean(drop_forced(sampled.behaviour_logprobs, sampled.patches)),
        entropy=_mean(drop_forced(sampled.entropies, sampled.patches)),
        spans=_spans(row),
        patches=drawn_patches(sampled, row.pointed),
        uses=uses,
    )


def _spans(row: StepRow) -> list[Span]:
    """Return the spans of a step's versions; one of unknown version if it has none."""
    sampled = row.sampled
    ranges = [(span.version, span.start, span.end) for span in sampled.version_spans]
    forced = {index - 1 for index, patch in enumerate(sampled.patches) if patch >= 0}

    def mean(values: Sequence[float], start: int, end: int) -> float | None:
        numbered = enumerate(values[start:end], start)
        return _mean(value for index, value in numbered if index not in forced)

    return [
        Span(
            version=version,
            start=start,
            end=end,
            logprob=mean(sampled.behaviour_logprobs, start, end),
            least=min(filter(isfinite, sampled.behaviour_logprobs[start:end]), default=None),
            entropy=mean(sampled.entropies, start, end),
        )
        for version, start, end in ranges or [(-1, 0, len(sampled.token_ids))]
    ]


def _mean(values: Iterable[float]) -> float | None:
    """Return the mean of the finite values; None if there are none."""
    numbers = list(filter(isfinite, values))
    return fmean(numbers) if numbers else None
