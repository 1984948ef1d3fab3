"""What the episodes of a task show."""

from __future__ import annotations

from dart_cli.evaluation.suite_check.episodes import Probed
from dart_cli.evaluation.suite_check.findings import Bounds, difference, judge, percentile
from tests.evaluation.suite_check.lax_suite import LaxSuite, screen


def test_one_lucky_click_does_not_make_a_task_guessable() -> None:
    task = LaxSuite.tasks["lax/sound"]
    played = [Probed("random", seed, "pass" if seed == 0 else "fail", "") for seed in range(3)]
    assert not judge(task, played, Bounds()).guessable
    played = [Probed("random", seed, "pass", "") for seed in range(3)]
    assert judge(task, played, Bounds()).guessable
    assert not judge(task, played, Bounds()).wrong


def test_percentiles_and_differences_of_pictures() -> None:
    assert percentile([], 0.95) is None
    assert percentile([3.0], 0.95) == 3.0
    assert percentile(list(map(float, range(100))), 0.95) == 95.0
    assert difference(screen(1), screen(1)) == 0
    assert difference(screen(1), screen(2)) == 1
