"""What an evaluation found, as it is kept in RUN/eval.

EpisodeRow   one episode: what was played, how it ended
TaskScore    episodes of one task and how many passed
PassAtK      success within k attempts over all tasks
ModeScore    one way of choosing actions (sampled, greedy, random) over all tasks
EvalSettings what the episodes depend on; differences of two
ProtocolCheck   a published protocol, and how the evaluation deviates from it
Evaluation   one set of weights, whole; one JSON file
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError

from bus.errors import RunDirectoryError, cure_of
from bus.messages import Outcome, StopReason
from dart_cli.algo.statistics import wilson
from dart_cli.config.schema import Config
from dart_cli.runtime.work_folder import KeptSettings, StoredModel

Mode = Literal["sampled", "greedy", "random"]
"""How actions are chosen: by the policy, sampled or its first choice, or clicks anywhere."""

BEFORE, AFTER = "before", "after"
"""Names of the two evaluations that `dart up` makes around a run."""

SCHEMA = 2
"""Of the files that are written."""


class EpisodeRow(StoredModel):
    """One episode that is over."""

    mode: Mode
    composed: bool  # a composition, never trained on
    task_id: str
    seed: int  # of the environment's reset
    attempt: int  # 0-based; those of one instance (task and seed) differ in what is sampled
    outcome: Outcome
    reason: str
    stop_reason: StopReason
    reward: float | None  # in [0, 1]; None for invalid
    steps: int
    wall_s: float
    screen: tuple[int, int] | None  # width and height in pixels; None where none was seen
    versions: list[int]  # of the weights that sampled its tokens; -1 is the model as it comes
    tries: int = 1  # starts that played it; all but the last were invalid


class TaskScore(StoredModel):
    """Episodes of one task."""

    task_id: str
    episodes: int  # judged pass or fail
    passed: int
    invalid: int  # broken environment or evaluator; counted in no rate
    steps: int  # of the judged episodes together
    rewards: float | None = None  # likewise; None: one for each pass
    ends: dict[str, int] = Field(
        default_factory=dict
    )  # episodes by stop reason: done, gave_up, malformed, step_limit, ...
    pass_at: dict[int, float] = Field(default_factory=dict)  # k -> mean over its instances
    pass_hat: dict[int, float] = Field(default_factory=dict)  # k -> likewise, for all of k attempts

    @property
    def mean_reward(self) -> float | None:
        """Reward of a judged episode on average, in [0, 1]; it is `success` where no score is partial."""
        if self.rewards is None or not self.episodes:
            return self.success
        return self.rewards / self.episodes

    @property
    def is_partial(self) -> bool:
        """Whether `mean_reward` says more than `success`."""
        return self.mean_reward != self.success

    @property
    def success(self) -> float | None:
        """Fraction passed; None where no episode was judged."""
        return self.passed / self.episodes if self.episodes else None

    @property
    def mean_steps(self) -> float | None:
        """Steps of an episode on average."""
        return self.steps / self.episodes if self.episodes else None

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of `success`."""
        return wilson(self.passed, self.episodes)


def total(name: str, scores: Iterable[TaskScore]) -> TaskScore:
    """All episodes of several tasks as one score called `name`."""
    every = list(scores)
    return TaskScore(
        task_id=name,
        episodes=sum(score.episodes for score in every),
        passed=sum(score.passed for score in every),
        invalid=sum(score.invalid for score in every),
        steps=sum(score.steps for score in every),
        rewards=math.fsum(
            score.passed if score.rewards is None else score.rewards for score in every
        ),
        ends=dict(sorted(sum((Counter(score.ends) for score in every), Counter()).items())),
    )


class PassAtK(StoredModel):
    """Success within k attempts: the mean over tasks of the mean over their instances."""

    k: int
    any: float  # at least one of k attempts passes: pass@k
    any_interval: tuple[float, float] | None  # 95 %, by bootstrap; None for a single instance
    every: float  # all of k attempts pass: pass^k
    every_interval: tuple[float, float] | None
    tasks: int
    instances: int  # with at least k judged attempts; the others are left out


class ModeScore(StoredModel):
    """One way of choosing actions over all tasks."""

    tasks: list[TaskScore]  # on held-out seeds
    compositions: list[TaskScore]  # templates never trained on
    pass_at: list[PassAtK] = Field(default_factory=list)  # over the tasks
    composed_pass_at: list[PassAtK] = Field(default_factory=list)  # over the compositions

    @property
    def overall(self) -> TaskScore:
        """All tasks together, without compositions."""
        return total("all tasks", self.tasks)

    @property
    def composed(self) -> TaskScore:
        """All compositions together."""
        return total("all compositions", self.compositions)


class EvalSettings(KeptSettings):
    """What an episode's outcome depends on, beside its mode, task, seed and attempt."""

    what: ClassVar = "evaluation"
    verb: ClassVar = "dart eval"
    option: ClassVar = "--keep-as"

    suite: str = ""
    suite_digest: str = ""  # of the suite's tasks: ids, instructions, limits, how they are judged
    model_digest: str = ""  # of the model folder's files; empty without a model
    weights_digest: str = ""  # of the published set; empty for the model as it comes
    values: dict[str, Any] = Field(
        default_factory=dict
    )  # keys of the configuration, e.g. rollout.temperature

    @property
    def digest(self) -> str:
        """The same for episodes that may be told as one evaluation."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def difference(self, before: EvalSettings) -> str:
        """See KeptSettings."""
        for name, was, is_now in differences(before, self):
            if name in ("suite", "model", "weights"):
                return f"another {name}"
            return f"{name} was {was!r} and is {is_now!r}"
        return ""


class ProtocolCheck(StoredModel):
    """A benchmark's published protocol beside what was played."""

    name: str
    title: str
    sources: list[str]
    deviations: list[str]  # a line each; empty where all is as published
    left_to_model: list[str]  # what the benchmark leaves open, with the value that was used
    uncertain: list[str]  # what of the table is not certain


class Evaluation(StoredModel):
    """One set of weights on held-out episodes."""

    schema_version: int = SCHEMA  # of this file

    name: str  # file name in RUN/eval
    model: str
    weights: str  # directory of the weight set; empty for the model as it comes
    policy_version: int  # -1 for the model as it comes
    seed: int  # first seed of the episodes
    wall_s: float  # in which at least one process played, over all starts
    modes: dict[Mode, ModeScore]
    attempts: int = 1  # planned for each instance
    settings: EvalSettings = Field(default_factory=EvalSettings)
    protocol: ProtocolCheck | None = None
    dart: str = ""  # version and commit
    finished_at: float | None = None  # unix seconds
    interval_method: str = ""  # of the intervals of pass@k
    left_out: dict[str, str] = Field(
        default_factory=dict
    )  # tasks that the suite cannot play here -> why
    notes: list[str] = Field(
        default_factory=list
    )  # e.g. that several versions of the weights have answered
    episodes: list[EpisodeRow] = Field(default_factory=list)

    @property
    def weights_name(self) -> str:
        """Return which weights were played: `builtin:small`, or `v5 of builtin:small`."""
        return self.model if self.policy_version < 0 else f"v{self.policy_version} of {self.model}"

    @property
    def judged(self) -> int:
        """Episodes that passed or failed, of all modes, with compositions."""
        scores = (score for mode in self.modes.values() for score in (mode.overall, mode.composed))
        return sum(score.episodes for score in scores)


def differences(one: EvalSettings, other: EvalSettings) -> Iterator[tuple[str, object, object]]:
    """Yield what differs: a name, and its two values. A key that one of them lacks has its default there.

    So a key that a newer dart adds makes no difference as long as it is left alone.
    """
    for name in ("suite", "suite_digest", "model_digest", "weights_digest"):
        if getattr(one, name) != getattr(other, name):
            yield name.replace("_digest", ""), getattr(one, name), getattr(other, name)
    usual = Config().model_dump(mode="json")
    for key in sorted({*one.values, *other.values}):
        section, _, name = key.partition(".")
        default = usual.get(section, {}).get(name)
        before, after = (each.values.get(key, default) for each in (one, other))
        if before != after:
            yield key, before, after


def eval_dir(run_dir: Path) -> Path:
    """Where a run's evaluations are kept."""
    return run_dir / "eval"


def read_evaluation(run_dir: Path, name: str) -> Evaluation | None:
    """Return the evaluation called `name`, or None if there is none.

    Raises RunDirectoryError where the file is not readable as one.
    """
    path = eval_dir(run_dir) / f"{name}.json"
    if not path.exists():
        return None
    return read_file(path)


def score_of(evaluation: Evaluation | None, mode: Mode) -> ModeScore:
    """Return the score of one mode; a score without episodes where the mode was not played."""
    score = evaluation.modes.get(mode) if evaluation else None
    return score or ModeScore(tasks=[], compositions=[])


def read_file(path: Path) -> Evaluation:
    """Return the evaluation in a file. Raises RunDirectoryError where it is not readable as one."""
    try:
        return Evaluation.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        if isinstance(error, OSError):
            cure = cure_of(error, "run it again")
            raise RunDirectoryError(f"{path} cannot be read: {error.strerror}; {cure}") from None
        is_json = all(each["type"] != "json_invalid" for each in error.errors())
        why = "another version of dart made it?" if is_json else "it is damaged"
        raise RunDirectoryError(
            f"{path} is no evaluation ({why}); remove it and run it again"
        ) from None


def evaluations_in(run_dir: Path) -> list[str]:
    """Return the names of a run's evaluations, the oldest first."""
    files = eval_dir(run_dir).glob("*.json")
    return [path.stem for path in sorted(files, key=lambda path: path.stat().st_mtime)]
