"""The status page: what is wrong is said, in 80 columns, whatever the texts hold."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bus.snapshot import (
    GroupsView,
    ProcessView,
    Rates,
    Snapshot,
    StalenessView,
    TaskView,
)
from dart_cli.status.health import problems
from dart_cli.status.page import minutes, progress_line, sparkline, status_page


def process(worker: str, *, alive: bool = True, **changes: object) -> ProcessView:
    """One process of a run."""
    fields = {
        "role": worker.partition("-")[0],
        "worker": worker,
        "host": "box",
        "pid": 42,
        "alive": alive,
        "heartbeat_age_s": 0.5 if alive else 31.0,
        "started_at": 0.0,
        "policy_version": 3,
        "state": "ready",
        "waiting_for": "",
        "waiting_s": 0.0,
    }
    return ProcessView.model_validate(fields | changes)


def snapshot(**changes: object) -> Snapshot:
    """A run in good health."""
    fields = {
        "run_id": "r",
        "run_dir": "runs/a",
        "now": 0.0,
        "uptime_s": 60.0,
        "run_s": 3725.0,
        "stopping": False,
        "reason": "",
        "policy_version": 7,
        "updates": 7,
        "updates_total": 20,
        "processes": [process("env-0"), process("rollout-0"), process("train")],
        "groups": GroupsView(open=3, ready=2, batched=1, trained=9, limit=24, dropped={"stale": 4}),
        "tasks": [
            TaskView(
                suite="mini",
                task_id="mini/popup",
                trajectories=64,
                passed=32,
                invalid=1,
                success=0.5,
                weight=0.25,
                curve=[0.1, None, 0.9],
            )
        ],
        "success": 0.5,
        "success_curve": [0.2, 0.5],
        "rates": Rates(window_s=60, trajectories=120, steps=400, actions=390, train_steps=6),
        "staleness": StalenessView(mean=0.5, max=2, histogram={0: 5, 2: 5}),
        "metrics": {"loss": 0.25, "grad_norm": 1.5},
        "metric_curves": {"loss": [0.5, 0.25]},
    }
    return Snapshot.model_validate(fields | changes)


def shown(run: Snapshot, width: int = 80) -> str:
    """The page as text, printed as the verb prints it."""
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    console.print(status_page(run))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_page_tells_processes_pipeline_tasks_and_training() -> None:
    page = shown(snapshot())
    for text in (
        *("update 7/20", "1:02:05", "running", "env-0", "rollout-0", "train"),
        *("3 of 24", "dropped: stale", "mini/popup", "0.50", "▂ ▇", "25%"),
        *("mean 0.50, max 2", "loss", "0.25", "grad_norm"),
    ):
        assert text in page, text
    assert "needs attention" not in page


@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    wide = process("env-1", waiting_for="a completion from rollout-17 " * 4, waiting_s=12.0)
    page = shown(snapshot(processes=[wide], warnings=["train waits " * 40]), width)
    assert max(map(len, page.splitlines())) <= width


def test_a_silent_process_and_a_stall_need_attention() -> None:
    run = snapshot(
        processes=[process("env-0", alive=False)], warnings=["train waits 94 s for a batch"]
    )
    first, second = problems(run)
    assert "env-0 on box has been silent for 31 s (pid 42)" in first
    assert second == "train waits 94 s for a batch"
    page = shown(run)
    assert "needs attention" in page
    assert "dead" in page


def test_processes_that_ended_with_the_run_are_no_problem() -> None:
    run = snapshot(processes=[process("env-0", alive=False)], stopping=True, reason="all done")
    assert problems(run) == []
    assert "stopping: all done" in shown(run)


def test_texts_of_the_run_are_never_read_as_markup() -> None:
    hostile = "[/red] [bold]x[/nothing] [link=file:///]"
    page = shown(
        snapshot(warnings=[hostile], processes=[process("env-0", waiting_for=hostile)]), 200
    )
    assert page.count("[/red] [bold]x[/nothing]") == 2


def test_an_empty_run_has_a_page() -> None:
    run = snapshot(processes=[], tasks=[], success=None, success_curve=[], metrics={}, updates=0)
    page = shown(run)
    assert "no update yet" in page
    assert "success -" in page


def test_sparklines_scale_and_leave_gaps() -> None:
    assert sparkline([0.0, 0.5, 1.0], 0, 1) == "▁▅█"
    assert sparkline([3.0, None, 5.0]) == "▁ █"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([None]) == ""


def test_times_read_as_clocks() -> None:
    assert [minutes(seconds) for seconds in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]


def test_one_line_says_the_run() -> None:
    line = progress_line(snapshot())
    assert "update 7/20" in line
    assert "success 0.50" in line
    assert "\n" not in line
