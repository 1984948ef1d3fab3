"""The pages of the study of MiniWoB++: which are chosen, and their counts and means.

    TWELVE         pages of several kinds, chosen before any result was seen
    pix2act_pages  the pages of Pix2Act's evaluation that the suite has
    PageScore      one page before and after, over all seeds
    scores_of      those of runs
    summary_of     the figures that results and docs give

A page is its name without the suite's, as papers have it: `click-test`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.learning.study import Result
from dart_cli.algo.statistics import wilson
from envs.suites.miniwob.tasks import TASKS

SUITE = "miniwob"
PUBLISHED = Path(__file__).with_name("miniwob_published.toml")

TWELVE: Mapping[str, str] = {
    "click-link": "a word in running text",
    "identify-shape": "what a drawing shows",
    "click-checkboxes": "several boxes by their labels, then a button",
    "click-tab-2": "a search through tabs",
    "choose-list": "a drop-down list",
    "enter-text": "one field, text from the instruction",
    "login-user": "two fields",
    "simple-arithmetic": "a sum that is read and typed",
    "drag-box": "a drag",
    "scroll-text-2": "the wheel",
    "email-inbox-delete": "an application of several screens",
    "navigate-tree": "folders that unfold",
}
"""Page -> its kind. The plainest page of each of twelve kinds of interaction, so that no kind is there twice
and no page for being easy; chosen on 24 November 2026, before a model that reads had played any."""

HIGH, HALF = 0.9, 0.5
"""Success of a page that is learned, and of one that is half learned."""


def task_of(page: str) -> str:
    """Return the id of a page's task in the suite."""
    return f"{SUITE}/{page}"


def page_of(task_id: str) -> str:
    """Return the page of a task."""
    return task_id.removeprefix(f"{SUITE}/")


def published() -> dict[str, Any]:
    """Return what others have published; see the file's head."""
    return tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))


def pix2act_pages() -> list[str]:
    """Return the pages of Pix2Act's evaluation, except pages that the package no longer has."""
    return [page for page in published()["pix2act"]["pages"] if task_of(page) in TASKS]


@dataclass(frozen=True)
class PageScore:
    """One page, over all seeds."""

    page: str
    before: tuple[int, int]  # passed, judged
    after: tuple[int, int]
    reward: float  # mean after, in [0, 1]
    episodes: int  # trajectories of training
    trained: bool  # False: a page that is only evaluated

    @property
    def success_before(self) -> float:
        """The fraction passed before training."""
        return self.before[0] / self.before[1]

    @property
    def success_after(self) -> float:
        """The fraction passed after training."""
        return self.after[0] / self.after[1]


def scores_of(runs: Sequence[Result]) -> list[PageScore]:
    """Return the pages of runs of one arm, in order of success after and before, the best first.

    A page without a judged episode on either side is left out.
    """
    scores = []
    for page in dict.fromkeys(page for run in runs for page in run["pages"]):
        parts = [run["pages"][page] for run in runs if page in run["pages"]]
        before, after = (_total(part[side] for part in parts) for side in ("before", "after"))
        if before[1] and after[1]:
            reward = sum(part["reward_after"] * part["after"][1] for part in parts) / after[1]
            episodes = sum(part["played"] for part in parts)
            trained = all(part["trained"] for part in parts)
            scores.append(PageScore(page, before, after, reward, episodes, trained))
    return sorted(
        scores, key=lambda score: (-score.success_after, -score.success_before, score.page)
    )


def _total(counts: Any) -> tuple[int, int]:
    passed, judged = (sum(column) for column in zip(*counts, strict=True))
    return passed, judged


def summary_of(runs: Sequence[Result]) -> dict[str, Any]:
    """Return the figures of one arm's runs; counts and means are over the pages that it trained on.

    `mean_pix2act_pages` and `mean_reward_pix2act_pages` are over the pages of Pix2Act's table that were
    evaluated, also pages that are not trained on; the second counts partial rewards as papers do.
    """
    scores = scores_of(runs)
    trained = [score for score in scores if score.trained]
    shared = set(pix2act_pages())
    compared = [score for score in scores if score.page in shared]
    return {
        "pages": {
            score.page: _row(score) for score in sorted(scores, key=lambda score: score.page)
        },
        "pages_trained": len(trained),
        "pages_090_before": _count(trained, lambda score: score.success_before >= HIGH),
        "pages_090_after": _count(trained, lambda score: score.success_after >= HIGH),
        "pages_050_before": _count(trained, lambda score: score.success_before >= HALF),
        "pages_050_after": _count(trained, lambda score: score.success_after >= HALF),
        "learned_from_below_half": _count(
            trained, lambda score: score.success_before < HALF and score.success_after >= HIGH
        ),
        "mean_before": _mean([score.success_before for score in trained]),
        "mean_after": _mean([score.success_after for score in trained]),
        "mean_pix2act_pages": _mean([score.success_after for score in compared]),
        "mean_before_pix2act_pages": _mean([score.success_before for score in compared]),
        "mean_reward_pix2act_pages": _mean([score.reward for score in compared]),
        "pix2act_pages": len(compared),
        "cpu_seconds": round(sum(run["cpu_s"]["train"] for run in runs), 1),
        "cpu_seconds_evaluation": round(
            sum(run["cpu_s"]["before"] + run["cpu_s"]["after"] for run in runs), 1
        ),
        "minutes": round(sum(run["minutes"] for run in runs), 2),
        "trajectories": sum(run["trajectories"] for run in runs),
        "updates": sum(run["updates"] for run in runs),
        "seeds": [run["seed"] for run in runs],
        "model": runs[0]["model"],
    }


def _row(score: PageScore) -> dict[str, Any]:
    return {
        "before": round(score.success_before, 4),
        "after": round(score.success_after, 4),
        "episodes": score.episodes,
        "n": score.after[1],
        "before_interval": [round(limit, 4) for limit in wilson(*score.before)],
        "after_interval": [round(limit, 4) for limit in wilson(*score.after)],
        "reward_after": round(score.reward, 4),
        "trained": score.trained,
    }


def _count(scores: Sequence[PageScore], holds: Any) -> int:
    return sum(1 for score in scores if holds(score))


def _mean(values: Sequence[float]) -> float | None:
    return round(mean(values), 4) if values else None
