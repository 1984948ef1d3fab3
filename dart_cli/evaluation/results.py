"""The result of an evaluation, as it is stored in RUN/eval.

Evaluation        the evaluation of one set of weights, as one JSON file
EpisodeRow        one episode: what was played, and how it ended
TaskScore         the score of one task; total sums up several
PassAtK           success within k attempts over all tasks
ModeScore         the scores of one mode (sampled, greedy, random)
EvalSettings      everything on which the outcome of an episode depends; differences compares two
ProtocolCheck     a published protocol, and how the evaluation deviates from it
read_evaluation   reads an evaluation of a run by its name; read_file, one by its path
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, Field, ValidationError

from bus.errors import RunDirectoryError, cure_of
from bus.messages import Outcome, StopReason
from dart_cli.algo.statistics import wilson
from dart_cli.config.schema import Config
from dart_cli.runtime.work_folder import StoredModel, WorkSettings

Mode = Literal["sampled", "greedy", "random"]
"""How actions are chosen: sampled from the policy, its most likely choice, or clicks anywhere."""

BEFORE, AFTER = "before", "after"
"""Names of the two evaluations that `dart up` makes around a run."""

SCHEMA = 3
"""The version of the files that are written. Older files have other names for held-out tasks."""

LEAST_SEEDS = 3
"""Fewest seeds from which a task that begins alike for all of them is said to have one instance."""

FRESH = "fresh instances of trained tasks"
FIXED = "trained tasks, the instances of training"
UNTRAINED = "tasks never trained on"
"""Names of the parts of an evaluation."""


class EpisodeRow(StoredModel):
    """One episode that is over."""

    mode: Mode
    # Whether the task is never trained on.
    heldout: bool = Field(validation_alias=AliasChoices("heldout", "composed"))
    task_id: str
    seed: int  # of the reset of the environment
    attempt: int  # 0-based; attempts of one instance (task and seed) differ in their sampling
    outcome: Outcome
    reason: str
    stop_reason: StopReason
    reward: float | None  # in [0, 1]; None for invalid
    steps: int
    wall_s: float
    screen: tuple[int, int] | None  # width and height in pixels; None if there was no screen
    versions: list[int]  # of the weights that sampled its tokens; -1: the model without training
    start: str = ""  # digest of the instruction and the first screen; empty if unknown
    tries: int = 1  # how often it was played; all tries but the last were invalid


class TaskScore(StoredModel):
    """The score of one task."""

    task_id: str
    episodes: int  # that passed or failed
    passed: int
    invalid: int  # by a broken environment or evaluator; not counted in rates
    steps: int  # sum over the episodes that passed or failed
    rewards: float | None = None  # sum over the same episodes; None: one for each pass
    # Stop reason (done, gave_up, malformed, step_limit, ...) -> episodes.
    ends: dict[str, int] = Field(default_factory=dict)
    pass_at: dict[int, float] = Field(default_factory=dict)  # k -> pass@k, mean over instances
    pass_hat: dict[int, float] = Field(default_factory=dict)  # k -> pass^k, mean over instances

    @property
    def mean_reward(self) -> float | None:
        """Mean reward of the episodes, in [0, 1]; it equals `success` if no score is partial."""
        if self.rewards is None or not self.episodes:
            return self.success
        return self.rewards / self.episodes

    @property
    def is_partial(self) -> bool:
        """Whether `mean_reward` differs from `success`, because some rewards lie between 0 and 1."""
        return self.mean_reward != self.success

    @property
    def success(self) -> float | None:
        """Fraction of the episodes that passed; None if there are no episodes."""
        return self.passed / self.episodes if self.episodes else None

    @property
    def mean_steps(self) -> float | None:
        """Mean number of steps of an episode."""
        return self.steps / self.episodes if self.episodes else None

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of `success`."""
        return wilson(self.passed, self.episodes)


def total(name: str, scores: Iterable[TaskScore]) -> TaskScore:
    """Return the score of several tasks together, under the name `name`."""
    scores = list(scores)
    return TaskScore(
        task_id=name,
        episodes=sum(score.episodes for score in scores),
        passed=sum(score.passed for score in scores),
        invalid=sum(score.invalid for score in scores),
        steps=sum(score.steps for score in scores),
        rewards=math.fsum(
            score.passed if score.rewards is None else score.rewards for score in scores
        ),
        ends=dict(sorted(sum((Counter(score.ends) for score in scores), Counter()).items())),
    )


class PassAtK(StoredModel):
    """Success within k attempts: the mean over tasks of the mean over their instances."""

    k: int
    any: float  # pass@k: at least one of k attempts passes
    any_interval: tuple[float, float] | None  # 95 %, by bootstrap; None for a single instance
    every: float  # pass^k: all of k attempts pass
    every_interval: tuple[float, float] | None
    tasks: int
    instances: int  # with a verdict on at least k attempts; other instances are left out


class ModeScore(StoredModel):
    """The scores of one mode."""

    tasks: list[TaskScore]  # that are trained on, on held-out seeds
    # Tasks that are never trained on.
    heldout: list[TaskScore] = Field(validation_alias=AliasChoices("heldout", "compositions"))
    pass_at: list[PassAtK] = Field(default_factory=list)  # over `tasks`
    heldout_pass_at: list[PassAtK] = Field(
        default_factory=list, validation_alias=AliasChoices("heldout_pass_at", "composed_pass_at")
    )

    @property
    def overall(self) -> TaskScore:
        """The score of all trained tasks together."""
        return total("all", self.tasks)

    @property
    def heldout_overall(self) -> TaskScore:
        """The score of all tasks together that are never trained on."""
        return total("all", self.heldout)


class EvalSettings(WorkSettings):
    """Everything on which the outcome of an episode depends, besides its mode, task, seed and attempt."""

    what: ClassVar = "evaluation"
    verb: ClassVar = "dart eval"
    option: ClassVar = "--keep-as"

    suite: str = ""
    suite_digest: str = ""  # of the suite's tasks: ids, instructions, limits, evaluators
    model_digest: str = ""  # of the files of the model folder; empty without a model
    weights_digest: str = ""  # of the published set; empty for the model without training
    # Keys of the configuration with their values, e.g. rollout.temperature.
    values: dict[str, Any] = Field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The digest of the settings. Episodes with the same digest may be reported as one evaluation."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def difference(self, before: EvalSettings) -> str:
        """Return the first setting that differs from `before`, in words; empty if none does."""
        for name, old, new in differences(before, self):
            if name in ("suite", "model", "weights"):
                return f"another {name}"
            return f"{name} was {old!r} and is {new!r}"
        return ""


class ProtocolCheck(StoredModel):
    """The published protocol of a benchmark, compared with the episodes that were played."""

    name: str
    title: str
    sources: list[str]
    deviations: list[str]  # a line each; empty if everything is as published
    left_to_model: list[str]  # settings that the benchmark leaves open, with their values here
    uncertain: list[str]  # entries of the table that are not certain


class Evaluation(StoredModel):
    """The evaluation of one set of weights on held-out episodes."""

    schema_version: int = SCHEMA  # of this file

    name: str  # file name in RUN/eval
    model: str
    weights: str  # directory of the weight set; empty for the model without training
    policy_version: int  # -1 for the model without training
    seed: int  # first seed of the episodes
    wall_s: float  # seconds in which at least one process played, over all starts
    modes: dict[Mode, ModeScore]
    attempts: int = 1  # planned for each instance
    settings: EvalSettings = Field(default_factory=EvalSettings)
    protocol: ProtocolCheck | None = None
    dart: str = ""  # version and commit
    finished_at: float | None = None  # unix seconds
    interval_method: str = ""  # of the intervals of pass@k
    # Task that the suite cannot play on this host -> the reason.
    left_out: dict[str, str] = Field(default_factory=dict)
    # E.g. that several versions of the weights have answered.
    notes: list[str] = Field(default_factory=list)
    episodes: list[EpisodeRow] = Field(default_factory=list)

    @property
    def fixed(self) -> list[str]:
        """The tasks that begin alike for all seeds, LEAST_SEEDS or more: they have one fixed instance."""
        rows: dict[str, list[EpisodeRow]] = defaultdict(list)
        for row in self.episodes:
            if row.start:
                rows[row.task_id].append(row)
        return [
            task
            for task, episodes in rows.items()
            if len({row.seed for row in episodes}) >= LEAST_SEEDS
            and len({row.start for row in episodes}) == 1
        ]

    def part_name(self, *, heldout: bool) -> str:
        """Return the name of the tasks that are never trained on, or of the others."""
        if heldout:
            return UNTRAINED
        trained = {row.task_id for row in self.episodes if not row.heldout}
        return FIXED if trained and trained.issubset(self.fixed) else FRESH

    @property
    def weights_name(self) -> str:
        """The weights that were played: `builtin:small`, or `v5 of builtin:small`."""
        return self.model if self.policy_version < 0 else f"v{self.policy_version} of {self.model}"

    @property
    def judged(self) -> int:
        """Number of episodes that passed or failed, in all modes, of all tasks."""
        scores = (
            score for mode in self.modes.values() for score in (mode.overall, mode.heldout_overall)
        )
        return sum(score.episodes for score in scores)


def differences(one: EvalSettings, other: EvalSettings) -> Iterator[tuple[str, object, object]]:
    """Yield each setting that differs: its name, and both values.

    A key that one of them lacks counts with its default, so that a key that a newer dart adds makes no
    difference while the user does not set it.
    """
    for name in ("suite", "suite_digest", "model_digest", "weights_digest"):
        if getattr(one, name) != getattr(other, name):
            yield name.replace("_digest", ""), getattr(one, name), getattr(other, name)
    usual = Config().model_dump(mode="json")
    for key in sorted({*one.values, *other.values}):
        section, _, name = key.partition(".")
        default = usual.get(section, {}).get(name)
        before, after = (settings.values.get(key, default) for settings in (one, other))
        if before != after:
            yield key, before, after


def eval_dir(run_dir: Path) -> Path:
    """Return the folder of a run's evaluations."""
    return run_dir / "eval"


def read_evaluation(run_dir: Path, name: str) -> Evaluation | None:
    """Return the evaluation `name`, or None if there is none.

    Raises RunDirectoryError if its file cannot be read.
    """
    path = eval_dir(run_dir) / f"{name}.json"
    if not path.exists():
        return None
    return read_file(path)


def score_of(evaluation: Evaluation | None, mode: Mode) -> ModeScore:
    """Return the score of one mode; a score without episodes where the mode was not played."""
    score = evaluation.modes.get(mode) if evaluation else None
    return score or ModeScore(tasks=[], heldout=[])


def read_file(path: Path) -> Evaluation:
    """Return the evaluation in a file. Raises RunDirectoryError if it cannot be read."""
    try:
        return Evaluation.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        if isinstance(error, OSError):
            fix = cure_of(error, "run it again")
            raise RunDirectoryError(f"{path} cannot be read: {error.strerror}; {fix}") from None
        is_json = all(detail["type"] != "json_invalid" for detail in error.errors())
        why = "perhaps of another version of dart" if is_json else "it is damaged"
        raise RunDirectoryError(
            f"{path} is not an evaluation ({why}); remove it and run it again"
        ) from None


def evaluations_in(run_dir: Path) -> list[str]:
    """Return the names of a run's evaluations, the oldest first."""
    files = eval_dir(run_dir).glob("*.json")
    return [path.stem for path in sorted(files, key=lambda path: path.stat().st_mtime)]
