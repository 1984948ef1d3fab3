"""The last line of a report: whether the run learned, with its figures."""

from __future__ import annotations

import pytest

from bus.snapshot import OwnView
from dart_cli.config.schema import Config
from dart_cli.data.store.rows import CurvePoint
from dart_cli.inspection.curves import ends
from dart_cli.inspection.learning import LEAST_TRAJECTORIES, Learning, assess_learning
from tests.inspection.parts import evaluation

PLAYED = OwnView(passed=300, failed_since=3)


def curve(*success: float, task: str = "a", each: int = 200) -> list[CurvePoint]:
    """A task's success in equal parts of a run."""
    return [
        CurvePoint(task, version, each, round(each * share), float(version))
        for version, share in enumerate(success)
    ]


def judged(
    points: list[CurvePoint], own: OwnView = PLAYED, held_out: tuple[int, int] | None = None
) -> Learning:
    """Of a run with this curve; `held_out` passed of ten episodes before and after."""
    both = [None if held_out is None else evaluation("e", passed) for passed in held_out or (0, 0)]
    return assess_learning(Config(), own, both[0], both[1], points)


def test_a_run_without_a_success_learned_nothing() -> None:
    own = OwnView(failed_since=9728)
    learned, why = judged(curve(0, 0, 0, 0, 0), own, (0, 0))
    assert learned is False
    assert why.startswith("nothing was learned: none of its 9728 trajectories passed")
    assert "held out 0.00 (0.00 to 0.28) -> 0.00 (0.00 to 0.28)" in why
    assert "dart data collect" in why
    assert "dart tune" in why


@pytest.mark.parametrize("held_out", [None, (3, 4), (4, 3)])
def test_level_success_is_no_improvement_shown(held_out: tuple[int, int] | None) -> None:
    learned, why = judged(curve(0.3, 0.31, 0.3, 0.29, 0.31), held_out=held_out)
    assert learned is False
    assert why.startswith("no improvement is shown: ")
    assert "0.30 (0.24 to 0.36) in the first fifth" in why
    assert "0.31 (0.25 to 0.37) in the last" in why
    assert ("held out" in why) == (held_out is not None)


@pytest.mark.parametrize(
    ("points", "held_out"),
    [
        (curve(0.3, 0.3, 0.3, 0.3, 0.3), (1, 9)),  # held out it rose
        (curve(0.1, 0.3, 0.5, 0.6, 0.7), (3, 4)),  # while training it rose
        (curve(0.1, 0.3, 0.5, 0.6, 0.7), None),
    ],
)
def test_success_that_rises_anywhere_beyond_chance_was_learned(
    points: list[CurvePoint], held_out: tuple[int, int] | None
) -> None:
    assert judged(points, held_out=held_out) == (True, "")


@pytest.mark.parametrize(
    ("points", "own", "held_out"),
    [
        (curve(0.3, 0.3, each=LEAST_TRAJECTORIES // 2 - 1), PLAYED, (3, 3)),  # too few
        (curve(0, 0, each=8), OwnView(failed_since=16), (0, 0)),
        (curve(0.95, 0.95), PLAYED, (9, 9)),  # there was nothing to learn
        ([], OwnView(), None),
    ],
)
def test_of_too_little_evidence_nothing_is_said(
    points: list[CurvePoint], own: OwnView, held_out: tuple[int, int] | None
) -> None:
    assert judged(points, own, held_out) == (None, "")


def test_a_run_that_unlearned_its_action_language_says_its_shares() -> None:
    own = PLAYED.model_copy(
        update={"completions": 9000, "window": 1000, "malformed_first": 0.03, "malformed": 0.61}
    )
    learned, why = judged(curve(0.3, 0.3, 0.2, 0.1, 0.05), own)
    assert learned is False
    assert "61% of the policy's last 1000 completions are no action, 3% of its first 1000" in why
    assert why.count("dart tune") == 1
    assert judged(curve(0.3, 0.7, 0.8), own) == (True, "")


def test_rewards_that_rose_without_a_pass_were_learned() -> None:
    own = OwnView(failed_since=600, reward_first=0.1, reward=0.4)
    assert judged(curve(0, 0, 0), own) == (True, "")


def test_a_run_that_cannot_learn_is_not_judged() -> None:
    config = Config.model_validate({"train": {"learner": "my:learner"}})
    assert assess_learning(config, OwnView(failed_since=999), None, None, []) == (None, "")


def test_the_two_ends_of_a_curve_are_of_the_same_tasks() -> None:
    points = [
        *curve(0.2, 0.2, 0.4, 0.4),
        *curve(0.9, 0.9, task="first alone")[:2],
        *curve(0, 0, 0, 0.99, task="last alone")[3:],
    ]
    found = ends(points)
    assert found is not None
    assert [round(point.success, 2) for point in found] == [0.2, 0.4]
    assert ends(curve(0.5)) is None
