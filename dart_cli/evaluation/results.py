"""What an evaluation found: counts by task, intervals, and the films of some episodes.

TaskScore    episodes of one task and how many passed
wilson       95 % confidence interval of a proportion
ModeScore    one way of choosing actions (sampled, greedy, random) over all tasks
Evaluation   one set of weights, whole; kept as JSON in RUN/eval
Film         one episode as a person would watch it
score_table  a mode's scores for people; `summary` is the evaluation for `--json`
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.table import Table

from bus.errors import RunDirectoryError
from bus.messages import Outcome
from dart_cli.runtime.tables import page_table
from dart_cli.status.page import fraction

Mode = Literal["sampled", "greedy", "random"]
"""How actions are chosen: by the policy, sampled or its first choice, or clicks anywhere."""

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


class StoredModel(BaseModel):
    """Base of what is kept on disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TaskScore(StoredModel):
    """Episodes of one task."""

    task_id: str
    episodes: int  # judged pass or fail
    passed: int
    invalid: int  # broken environment or evaluator; counted in no rate
    steps: int  # of the judged episodes together
    rewards: float | None = None  # likewise; None in files of older versions: one for each pass

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


def wilson(passed: int, episodes: int) -> tuple[float, float]:
    """95 % score interval of a proportion (Wilson 1927); (0, 1) for no episode."""
    if episodes == 0:
        return 0.0, 1.0
    share, z2 = passed / episodes, Z_95**2
    centre = (share + z2 / (2 * episodes)) / (1 + z2 / episodes)
    half = (
        Z_95
        / (1 + z2 / episodes)
        * math.sqrt(share * (1 - share) / episodes + z2 / (4 * episodes**2))
    )
    # It always holds the share; rounding puts a bound of 0 or 1 a little beside it.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


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
    )


class ModeScore(StoredModel):
    """One way of choosing actions over all tasks."""

    tasks: list[TaskScore]  # on held-out seeds
    compositions: list[TaskScore]  # templates never trained on

    @property
    def overall(self) -> TaskScore:
        """All tasks together, without compositions."""
        return total("all tasks", self.tasks)

    @property
    def composed(self) -> TaskScore:
        """All compositions together."""
        return total("all compositions", self.compositions)


class Evaluation(StoredModel):
    """One set of weights on held-out episodes."""

    name: str  # file name in RUN/eval
    model: str
    weights: str  # directory of the weight set; empty for the model as it comes
    policy_version: (
        int  # -1 for the model as it comes; of averages, the newest one when they were saved
    )
    averaged: int | None = None  # updates that averaged weights are after; None of other weights
    seed: int  # first seed of the episodes
    wall_s: float
    modes: dict[Mode, ModeScore]

    @property
    def judged(self) -> int:
        """Episodes that passed or failed, of all modes, with compositions."""
        scores = (score for mode in self.modes.values() for score in (mode.overall, mode.composed))
        return sum(score.episodes for score in scores)


class HeatMap(StoredModel):
    """Where one pointer of a completion looked."""

    rows: int  # of the screenshot's cells
    columns: int
    heat: str  # base64 of a byte for each cell, row by row: its share of the largest, in 255ths
    candidates: list[tuple[float, float]] = []
    """Centres of its regions in fractions of the screen, the best first."""


class FilmFrame(StoredModel):
    """One step of a film."""

    screenshot: str  # file name
    text: str  # the completion
    point: tuple[int, int] | None  # where it clicked or let go, pixels of the screenshot
    path: list[tuple[int, int]] = []  # of a drag, likewise
    pointed: list[HeatMap] = []  # where the policy looked to point


class Film(StoredModel):
    """One episode as a person would watch it."""

    task_id: str
    seed: int
    instruction: str
    outcome: Outcome
    reason: str
    frames: list[FilmFrame]
    last: str  # file name of the screenshot after the last action


class Films(StoredModel):
    """The films of one evaluation; their screenshots are beside the file."""

    films: list[Film]


def eval_dir(run_dir: Path) -> Path:
    """Where a run's evaluations are kept."""
    return run_dir / "eval"


def read_evaluation(run_dir: Path, name: str) -> Evaluation | None:
    """The evaluation called `name`, or None if there is none.

    Raises RunDirectoryError where the file is not readable as one.
    """
    path = eval_dir(run_dir) / f"{name}.json"
    if not path.exists():
        return None
    try:
        return Evaluation.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        raise RunDirectoryError(f"{path} is no evaluation; remove it and run it again") from None


def read_films(run_dir: Path, name: str) -> list[Film]:
    """The films of the evaluation called `name`; none if it kept none."""
    path = films_dir(run_dir, name) / "films.json"
    return Films.model_validate_json(path.read_bytes()).films if path.exists() else []


def films_dir(run_dir: Path, name: str) -> Path:
    """Where the films and screenshots of one evaluation are kept."""
    return eval_dir(run_dir) / f"{name}-films"


# --- for people and scripts ------------------------------------------------------------------


def score_table(evaluation: Evaluation, mode: Mode, score: ModeScore) -> Table:
    """Success by task with its interval, and the mean reward where scores are partial; compositions below."""
    version = "as it comes" if evaluation.policy_version < 0 else f"v{evaluation.policy_version}"
    if evaluation.averaged is not None:
        version = f"averaged over updates to {evaluation.averaged}"
    title = "random clicks" if mode == "random" else f"{evaluation.model} {version}, {mode}"
    is_partial = any(row.is_partial for row in (*score.tasks, *score.compositions))
    reward = ("mean reward",) if is_partial else ()
    numbers = ("success", "95 % interval", *reward, "episodes", "invalid", "mean steps")
    table = page_table(title, "task", *numbers, right=numbers)
    for rows, whole in ((score.tasks, score.overall), (score.compositions, score.composed)):
        if not rows:
            continue
        for row in (*rows, whole):
            low, high = row.interval
            table.add_row(
                row.task_id,
                fraction(row.success),
                f"{low:.2f} - {high:.2f}",
                *((fraction(row.mean_reward),) if is_partial else ()),
                str(row.episodes),
                str(row.invalid),
                "-" if row.mean_steps is None else f"{row.mean_steps:.1f}",
                style="bold" if row is whole else "",
                end_section=row is whole,
            )
    return table


def summary(evaluation: Evaluation) -> dict[str, object]:
    """The evaluation as one flat JSON object, for `--json`."""
    result: dict[str, object] = {
        "model": evaluation.model,
        "weights": evaluation.weights,
        "policy_version": evaluation.policy_version,
        "averaged": evaluation.averaged,
    }
    for mode, score in evaluation.modes.items():
        for name, rows, whole in (
            ("tasks", score.tasks, score.overall),
            ("compositions", score.compositions, score.composed),
        ):
            result[f"{mode}_{name}"] = {
                "success": whole.success,
                "interval": list(whole.interval),
                "mean_reward": whole.mean_reward,
                "episodes": whole.episodes,
                "invalid": whole.invalid,
                "per_task": {row.task_id: row.success for row in rows},
                "mean_reward_per_task": {row.task_id: row.mean_reward for row in rows},
            }
    return result
