"""Trajectories of a run, read once: the terminal, the browser and JSON show the same.

Choice            which trajectories are listed
Subject           a trajectory of the run, a member of its pool, or both
listed            rows of the ledger -> Subjects
Shown             all of one: its steps, what judges said, the batches that took it
Step              a step with its certainty, the weights that sampled it, and its use in batches
read_trajectory   a Subject -> Shown
subject_json, shown_json   the same as plain values, by the names of the ledger
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
from dart_cli.evaluation.marks import action_words
from dart_cli.language.pointer_tokens import DrawnPatch, drawn, drawn_patches
from dart_cli.runtime.tables import or_dash

Json = dict[str, Any]

STATES: tuple[TrajectoryState, ...] = (
    *("leased", "playing", "finished"),
    *("batched", "trained", "dropped"),
)
CANCELLED = "cancelled"
"""The reason of a trajectory that the end of the run, or of its lease, cut off."""

_LEFT_OUT = {
    "low_entropy": "the policy was most certain here; data.high_entropy leaves such steps out"
}
_NOT_IN_JSON = {"prompt_token_ids", "image_hashes", "sampled", "pointed"}


@dataclass(frozen=True)
class Choice:
    """Which trajectories are listed: those that match every given field.

    Cancelled ones only where `state`, `outcome` or `reason` asks for them.
    """

    task_id: str | None = None
    outcome: Outcome | None = None
    state: TrajectoryState | None = None
    reason: str | None = None
    version: int | None = None

    @property
    def leaves_out(self) -> bool:
        """Whether cancelled ones are left out."""
        return not (self.state or self.outcome or self.reason)

    @property
    def conditions(self) -> Json:
        """Of the queries of a Reader."""
        return asdict(self) | ({"but_reason": CANCELLED} if self.leaves_out else {})

    def left_out(self, reader: Reader) -> int:
        """How many cancelled ones are left out."""
        if not self.leaves_out:
            return 0
        return reader.count_trajectories(**asdict(self) | {"reason": CANCELLED})


@dataclass(frozen=True)
class Subject:
    """A trajectory of the run, a member of its pool, or both."""

    id: str
    suite: str
    task_id: str
    task_seed: int
    trajectory: TrajectoryRow | None  # None where it came from outside
    group: GroupRow | None
    pool: PoolRow | None

    @classmethod
    def of_run(
        cls, trajectory: TrajectoryRow, group: GroupRow, pool: PoolRow | None = None
    ) -> Subject:
        """Return a trajectory that the run played."""
        task = group.suite, group.task_id, group.task_seed
        return cls(trajectory.id, *task, trajectory, group, pool)

    @classmethod
    def of_pool(cls, row: PoolRow) -> Subject:
        """Return a member of the pool, wherever it was played."""
        return cls(row.trajectory_id, row.suite, row.task_id, row.task_seed, None, None, row)


def listed(reader: Reader, rows: Sequence[TrajectoryRow]) -> list[Subject]:
    """Trajectories with their groups; a group is stored before its members."""
    groups = reader.groups_by_id(row.group_id for row in rows)
    return [Subject.of_run(row, groups[row.group_id]) for row in rows]


@dataclass(frozen=True)
class Span:
    """Completion tokens [start, end) that the weights of one version sampled; -1: not known."""

    version: int
    start: int
    end: int
    logprob: float | None  # mean over those that were drawn, nats
    least: float | None  # of the least likely token, nats
    entropy: float | None  # mean over those that were drawn, nats


@dataclass(frozen=True, kw_only=True)
class Step(StepRow):
    """A step as it was submitted, with what follows from its tokens and what became of it."""

    logprob: float | None  # mean over the tokens that were drawn, nats
    entropy: float | None  # likewise
    spans: list[Span]
    patches: list[DrawnPatch]  # of its pointers, in order
    uses: list[SampleRow]  # in fresh batches, the oldest first

    @property
    def versions(self) -> list[int]:
        """The weights that sampled it, if they are known."""
        return sorted({span.version for span in self.spans if span.version >= 0})

    @property
    def action_text(self) -> str:
        """The action as one short line, or why the text was none."""
        return action_words(self.action) if self.action else f"no action: {self.error}"


@dataclass(frozen=True)
class Shown:
    """All of one trajectory."""

    subject: Subject
    instruction: str
    judgements: list[JudgementRow]
    again_in: list[int]  # batches that trained on its samples again
    steps: list[Step]


def read_trajectory(reader: Reader, subject: Subject) -> Shown:
    """All of one trajectory."""
    uses: dict[int, list[SampleRow]] = {}
    for row in reader.sample_rows(subject.id):
        uses.setdefault(row.step, []).append(row)
    batches = sorted({row.batch_id for rows in uses.values() for row in rows})
    return Shown(
        subject,
        reader.instruction(subject.suite, subject.task_id, [subject.id]),
        reader.judgements(subject.id),
        [again.id for first in batches for again in reader.replays(first)],
        [_step(row, uses.get(row.step, [])) for row in reader.steps(subject.id)],
    )


def why_left_out(use: SampleRow) -> str:
    """Why a step of a batch is not trained on, in words; empty where the reason says it."""
    return _LEFT_OUT.get(use.reason, "")


def patch_words(each: DrawnPatch) -> str:
    """Return a patch with its place and its numbers."""
    where = "" if each.row is None else f" (row {each.row}, column {each.column})"
    logprob, entropy = or_dash(each.logprob, ".3f"), or_dash(each.entropy, ".3f")
    return f"token {each.token}: patch {each.patch}{where}, log-prob {logprob}, entropy {entropy}"


def subject_json(subject: Subject) -> Json:
    """Return the rows of a trajectory as one object."""
    row = {} if subject.trajectory is None else asdict(subject.trajectory)
    rest = asdict(subject)
    return {**row, **{key: rest[key] for key in ("id", "suite", "task_id", "task_seed", "pool")}}


def shown_json(shown: Shown) -> Json:
    """All of one trajectory but its tokens and images."""
    return subject_json(shown.subject) | {
        "instruction": shown.instruction,
        "judgements": to_jsonable_python(shown.judgements),
        "again_in": shown.again_in,
        "trajectory_steps": [
            to_jsonable_python(step, exclude=_NOT_IN_JSON)
            | {"prompt_tokens": len(step.prompt_token_ids), "tokens": len(step.sampled.token_ids)}
            for step in shown.steps
        ],
    }


def _step(row: StepRow, uses: list[SampleRow]) -> Step:
    sampled = row.sampled
    return Step(
        **vars(row),
        logprob=_mean(drawn(sampled.behaviour_logprobs, sampled.patches)),
        entropy=_mean(drawn(sampled.entropies, sampled.patches)),
        spans=_spans(row),
        patches=drawn_patches(sampled, row.pointed),
        uses=uses,
    )


def _spans(row: StepRow) -> list[Span]:
    sampled = row.sampled
    ranges = [(span.version, span.start, span.end) for span in sampled.version_spans]
    forced = {at - 1 for at, patch in enumerate(sampled.patches) if patch >= 0}

    def mean(values: Sequence[float], start: int, end: int) -> float | None:
        found = enumerate(values[start:end], start)
        return _mean(value for at, value in found if at not in forced)

    return [
        Span(
            version,
            start,
            end,
            mean(sampled.behaviour_logprobs, start, end),
            min(filter(isfinite, sampled.behaviour_logprobs[start:end]), default=None),
            mean(sampled.entropies, start, end),
        )
        for version, start, end in ranges or [(-1, 0, len(sampled.token_ids))]
    ]


def _mean(values: Iterable[float]) -> float | None:
    known = list(filter(isfinite, values))
    return fmean(known) if known else None
