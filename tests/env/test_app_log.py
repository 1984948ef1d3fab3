"""What an application reports during an episode comes with the episode's end, in bounded lines."""

from __future__ import annotations

import pytest

from bus.messages import APP_LOG_LINES, APP_LOG_WIDTH, TrajectoryEnd
from dart_cli.env.app_log import LEFT_OUT, AppLog, reported_lines
from dart_cli.suite_check.probes import ProbeEpisode
from dart_cli.suite_check.task_report import Bounds, report_on_task
from tests.env.scored_suite import ScoredSuite
from tests.env.test_rewards import in_both, play, scored_env


@in_both
async def test_the_end_of_an_episode_has_what_its_application_reported(isolation: str) -> None:
    async with scored_env(isolation) as env:
        end = await play(env, "reports")
        assert end.app_log[:2] == [
            "reset: GET /icon.png: 404",
            "step 1: TypeError: x is ?[2Jundefined (3 times)",
        ]
        assert end.app_log[2].startswith("step 1: yyy")
        assert end.app_log[2].endswith("y...")
        assert len(end.app_log) == 3
        assert (await play(env, "0.4")).app_log == [], (
            "an episode has no lines of the one before it"
        )


@in_both
async def test_a_log_that_is_no_list_of_texts_is_a_mistake_of_the_environment(
    isolation: str,
) -> None:
    async with scored_env(isolation) as env:
        end = await play(env, "odd-log")
    assert end.outcome == "invalid"
    assert "step must return a list of texts as info['app_log'], got str 'one text'" in end.reason


def test_a_page_that_reports_without_end_fills_no_message() -> None:
    log = AppLog()
    for step in range(10**5, 10**5 + 30):
        log.add(
            f"step {step}",
            reported_lines("step", {"app_log": [f"{step} {nth} " * 99 for nth in range(200)]}),
        )
    assert len(log.lines) == APP_LOG_LINES + 1
    assert max(map(len, log.lines)) == APP_LOG_WIDTH - 40 + len("step 100000: ")
    assert log.lines[-1] == LEFT_OUT
    assert log.lines[0].startswith("step 100000: 100000 0 ")
    assert log.lines[-2].startswith("step 100000: 100000 39 ")
    TrajectoryEnd(
        trajectory_id="t",
        steps=1,
        outcome="fail",
        reason="",
        stop_reason="done",
        screenshot=None,
        reset_s=0.0,
        wall_s=0.0,
        app_log=log.lines,
    )


@pytest.mark.parametrize("info", [None, {}, {"app_log": None}, {"app_log": ()}, 7])
def test_an_environment_need_not_report(info: object) -> None:
    assert reported_lines("step", info) == []


def test_the_check_of_a_suite_names_the_first_line_of_an_oracle_that_failed() -> None:
    failed = ProbeEpisode(
        probe="oracle", seed=3, outcome="fail", reason="not saved", app_log=["step 2: E", "F"]
    )
    [task] = [ScoredSuite.tasks["scored/reports"]]
    report = report_on_task(task, [failed], Bounds())
    assert report.oracle_failures == ["seed 3: not saved; the application reported at step 2: E"]
