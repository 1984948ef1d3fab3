"""What the status page counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dart_cli.data.progress as progress_module
from bus.messages import Outcome
from dart_cli.data.progress import NEWEST, Meter, RunCounters, RunProgress


def test_a_curve_has_a_point_for_each_version_until_there_are_too_many() -> None:
    counters = RunCounters()
    for version, passed in [(0, False), (0, True), (2, True)]:
        counters.add(version, passed)
    assert counters.curve(3) == [0.5, None, 1.0, None]
    assert counters.curve(3, points=2) == [0.5, 1.0]
    assert len(counters.curve(999)) <= 32


def test_a_curve_of_nothing_is_empty() -> None:
    assert RunCounters().curve(-1) == []
    assert RunCounters().curve(10) == []


def test_an_invalid_trajectory_does_not_count_for_success() -> None:
    progress = RunProgress(["a"], 0.0)
    for _ in range(5):
        progress.outcome("a", "invalid")
    assert progress.tasks["a"].average.value is None
    progress.outcome("a", "pass")
    progress.count("a", True, 0)
    assert progress.tasks["a"].average.value == 1.0
    assert (progress.all.passed, progress.all.invalid) == (1, 5)


def test_a_task_says_how_many_of_its_recent_episodes_were_invalid_and_when_they_broke() -> None:
    progress = RunProgress(["a"], 0.0)
    for steps in (0, 3, 2, 0):
        progress.outcome("a", "invalid", steps)
        progress.outcome("a", "fail", 4)
    task = progress.tasks["a"]
    assert task.invalid_after_action == 2
    assert task.invalid_share.value == pytest.approx(0.5, abs=0.02)
    for _ in range(100):  # the environment was fixed
        progress.outcome("a", "pass", 4)
    assert task.invalid_share.value == pytest.approx(0.0, abs=0.01)


def test_the_variance_of_rewards_is_that_of_the_frontier_where_they_are_0_and_1() -> None:
    progress = RunProgress(["a", "b"], 0.0)
    for number in range(400):
        progress.count("a", number % 4 == 0, 0)
        progress.count("b", False, 0, 0.5)  # partial, and always the same
    by_value, by_outcome = progress.estimates("value"), progress.estimates("outcome")
    assert by_value["a"].variance == pytest.approx(by_outcome["a"].variance)
    assert by_value["b"].variance == pytest.approx(0.0, abs=1e-12)
    assert by_outcome["b"].variance == 0.0
    assert progress.tasks["b"].reward.value == pytest.approx(0.5)


def test_throughput_forgets_what_is_older_than_its_window() -> None:
    meter = Meter(started=0.0, window_s=60)
    for second in range(30):
        meter.add(float(second), 2)
    assert meter.per_minute(30.0) == pytest.approx(120.0)
    assert meter.per_minute(60.0) == pytest.approx(60.0)
    assert meter.per_minute(200.0) == 0.0


def test_metrics_of_batches_to_be_trained_again_are_forgotten() -> None:
    progress = RunProgress([], 0.0)
    for batch in (1, 2, 3):
        progress.train_metrics(batch, {"loss": float(batch)})
    progress.forget_metrics(1)
    assert progress.metrics() == {"loss": 1.0}
    assert progress.metric_curves() == {"loss": [1.0]}


def test_a_tally_takes_the_same_memory_however_long_the_run() -> None:
    counters = RunCounters()
    for version in range(5000):
        counters.add(version, passed=version >= 2500)
    assert len(counters.total) <= 64
    assert sum(counters.total) == 5000
    assert sum(counters.passed) == 2500
    curve = counters.curve(4999)
    assert len(curve) <= 32
    assert (curve[0], curve[-1]) == (0.0, 1.0)


def test_curves_of_tasks_that_began_at_different_versions_have_points_in_common() -> None:
    progress = RunProgress(["a", "b"], 0.0)
    for version in range(300):
        progress.count("a", True, version)
    progress.count("b", False, 299)
    assert progress.mean_curve(310)[:18] == [1.0] * 18
    assert progress.mean_curve(310)[18:] == [0.5, None]


def test_a_task_goes_on_bit_for_bit_where_it_was_written_down() -> None:
    progress, again = RunProgress(["a"], 0.0), RunProgress(["a"], 0.0)
    outcomes: list[Outcome] = ["pass", "fail", "invalid", "pass", "fail", "fail", "pass"] * 30
    for version, outcome in enumerate(outcomes):
        progress.outcome("a", outcome, version % 3)
        if outcome != "invalid":
            progress.count("a", outcome == "pass", version, version % 7 / 7)
    again.restore_tasks({"a": progress.tasks["a"].to_json()})
    for each in (progress, again):
        each.outcome("a", "pass")
        each.count("a", True, 300)
    assert again.tasks == progress.tasks
    assert again.all == progress.all
    assert again.mean_curve(300) == progress.mean_curve(300)


def test_a_task_the_run_no_longer_has_does_not_count_in_its_success() -> None:
    before = RunProgress(["kept", "removed"], 0.0)
    for task, outcome in (("kept", "pass"), ("removed", "fail")):
        before.outcome(task, outcome)  # type: ignore[arg-type]
        before.count(task, outcome == "pass", 7)
    now = RunProgress(["kept"], 0.0)
    now.restore_tasks({task_id: task.to_json() for task_id, task in before.tasks.items()})
    assert now.mean_success() == 1.0
    assert now.mean_curve(7)[-1] == 1.0
    assert (now.all.passed, now.all.failed) == (1, 1)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60),
    st.integers(0, 60),
)
def test_the_newest_success_is_that_of_a_list_of_all_whatever_was_restarted(
    played: list[tuple[str, bool]], restart: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress_module, "NEWEST", 20)
        _compared(played, restart)


def _compared(played: list[tuple[str, bool]], restart: int) -> None:
    progress = RunProgress("abc", 0.0)
    for number, (task, passed) in enumerate(played):
        if number == restart:
            rows = {name: each.to_json() for name, each in progress.tasks.items()}
            progress = RunProgress("abc", 0.0)
            progress.restore_tasks(rows)
        progress.count(task, passed, 0)
    each = 7  # of 20 for three tasks
    newest = {name: [passed for task, passed in played if task == name][-each:] for name in "abc"}
    seen = progress.newest_success()
    assert seen.passed == sum(map(sum, newest.values()))
    assert (seen.counted, seen.required) == (sum(map(len, newest.values())), 3 * each)
    if seen.counted < seen.required:
        assert seen.bound == 0
    else:
        mean = sum(sum(passed) / each for passed in newest.values()) / 3
        assert 0 < seen.bound < mean or mean == 0


def test_the_bound_on_success_holds_for_the_tasks_together_not_for_the_one_played_most() -> None:
    progress = RunProgress("ab", 0.0)
    for _ in range(NEWEST):
        progress.count("a", True, 0)
    assert progress.newest_success().bound == 0  # nothing is known of b
    for number in range(NEWEST):
        progress.count("b", number % 2 == 0, 0)
    seen = progress.newest_success()
    assert (seen.lowest, seen.lowest_success) == ("b", 0.5)
    assert 0.70 < seen.bound < 0.75


def test_all_that_can_be_asked_for_can_be_reached() -> None:
    progress = RunProgress("a", 0.0)
    for _ in range(NEWEST):
        progress.count("a", True, 0)
    assert progress.newest_success().bound >= 0.99  # the greatest train.stop_at
