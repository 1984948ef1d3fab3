"""The status page: what is wrong is shown, in 80 columns, whatever the texts hold."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bus.errors import DeadlineError, RunDirectoryError
from bus.snapshot import (
    Snapshot,
    StallView,
    StopView,
    UsageView,
)
from dart_cli.data import overview
from dart_cli.runtime.logs import log_dir
from dart_cli.runtime.tables import minutes
from dart_cli.status import watch
from dart_cli.status.run_sections import problems, progress_line, sparkline
from dart_cli.status.status_page import StatusPage
from dart_cli.status.watch import Watcher, run_status
from tests.data.client import serving
from tests.data.parts import small_config
from tests.snapshots import process, snapshot, sync
from tests.waiting import until

ROOT = Path(__file__).parents[2]


def shown(run: Snapshot, width: int = 80) -> str:
    """The page as text, printed as the verb prints it."""
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    console.print(StatusPage(run))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rewards_are_shown_where_they_are_not_those_of_the_outcomes() -> None:
    [task] = snapshot().tasks
    equal = snapshot(tasks=[task.model_copy(update={"reward": 0.5})], reward=0.5)
    assert "reward" not in shown(equal)
    partial = snapshot(
        tasks=[task.model_copy(update={"reward": 0.71, "invalid_share": 0.3})], reward=0.71
    )
    text = shown(partial)
    assert "mean reward 0.71" in text
    assert re.search(r"mini/popup +0.71 +0.50", text)
    assert "1 (30%)" in text


def test_the_page_shows_processes_pipeline_tasks_and_training() -> None:
    page = shown(snapshot())
    for text in (
        *("update 7/20", "1:02:05", "running", "env-0", "rollout-0", "train"),
        *("3 of 24", "dropped: stale", "mini/popup", "0.50", "▂ ▇", "25%"),
        *("mean 0.50, max 2", "loss", "0.25", "grad_norm"),
    ):
        assert text in page, text
    assert "needs attention" not in page


def test_the_page_shows_the_metrics_by_which_the_page_on_boxes_judges_the_first_update() -> None:
    text = (ROOT / "docs" / "box.md").read_text(encoding="utf-8")
    table = text.partition("**6. The first update**")[2].partition("**7.")[0]
    judged = {"parity_mean", "ratio_mean", "ess", "grad_norm", "entropy"}
    assert judged == set(
        re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
    )
    others = [f"a_{number}" for number in range(9)]
    sent = ["loss", "reward", "reference_kl", "mismatch_kl", "lr", "samples", "tokens", *others]
    page = shown(snapshot(metrics=dict.fromkeys([*sent, *judged], 0.25)), 120)
    for name in judged:
        assert re.search(rf"\b{name} +0.25", page), name


def test_updates_on_a_batch_again_are_counted_where_there_are_some() -> None:
    assert "again" not in shown(snapshot())
    page = shown(snapshot(replays={"updates": 3, "refused": {"stale": 2}, "oldest": 5}))
    assert re.search(r"updates on a batch again +3 of 7", page)
    assert re.search(r"not again: stale +2", page)


def test_a_judge_is_shown_beside_the_evaluators_and_where_it_decides_alone() -> None:
    assert "judge" not in shown(snapshot())
    judge = {"judge": "eyes#1a", "both_pass": 20, "both_fail": 17, "judge_alone": 2, "judged": 45}
    judge |= {"evaluator_alone": 1, "verdicts": {"pass": 4, "invalid": 1}, "calls": 46}
    page = " ".join(shown(snapshot(judges=[judge]), 120).split())
    assert "n = 40: agree 0.93 [0.80, 0.97], kappa 0.85 [0.69, 1.00]; both pass 20" in page
    assert (
        "gave the verdict of 5 trajectories of tasks without an evaluator: 4 pass, 0 fail" in page
    )


def test_environments_that_were_restarted_or_hang_are_counted_where_there_are_some() -> None:
    gauges = {"playing": 3.0, "slots": 4.0, "restarts": 0.0, "hung": 0.0}
    assert "restarts" not in shown(snapshot(processes=[process("env-0", gauges=gauges)]), 120)
    gauges |= {"restarts": 7.0, "hung": 2.0}
    page = shown(snapshot(processes=[process("env-0", gauges=gauges)]), 120)
    assert "playing 3, slots 4, restarts 7, hung 2" in page


def test_an_engine_says_how_much_of_its_prompts_it_had() -> None:
    gauges = {"in_flight": 3.0, "waiting": 0.0, "tokens": 50.0, "prompt_tokens": 0.0}
    worker = process("rollout-0", gauges=gauges | {"cached_tokens": 0.0})
    assert "cached" not in shown(snapshot(processes=[worker]), 120)
    gauges |= {"prompt_tokens": 400.0, "cached_tokens": 296.0}
    page = shown(snapshot(processes=[process("rollout-0", gauges=gauges)]), 120)
    assert "in_flight 3, waiting 0, tokens 50, prompts 74% cached" in page


def test_a_trainer_of_several_ranks_says_how_slow_and_how_full_they_are() -> None:
    gauges = {"updates": 7.0, "tokens": 900.0}
    assert "ranks" not in shown(snapshot(processes=[process("train", gauges=gauges)]), 120)
    gauges |= {"ranks": 4.0, "slowest_rank": 2.0, "rank_memory_mb": 512.0}
    page = shown(snapshot(processes=[process("train", gauges=gauges)]), 120)
    assert "updates 7, tokens 900, ranks 4, slowest_rank 2, rank_memory_mb 512" in page


@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    wide = process("env-1", waiting_for="a completion from rollout-17 " * 4, waiting_s=12.0)
    page = shown(snapshot(processes=[wide], warnings=["train waits " * 40]), width)
    assert max(map(len, page.splitlines())) <= width


def test_a_silent_process_and_a_stall_need_attention() -> None:
    stalls = [
        StallView(kind="waits", who="train", since_s=94, text="train has waited 94 s for a batch")
    ]
    run = snapshot(
        processes=[process("env-0", alive=False)], stalls=stalls, warnings=["no rollout process"]
    )
    assert problems(run) == ["train has waited 94 s for a batch", "no rollout process"]
    page = shown(run)
    assert "needs attention" in page
    assert "lost" in page


def test_settings_that_a_process_was_started_with_alone_are_shown() -> None:
    line = "train was started with train.lr = 0.0001, the data service with 0.0004"
    assert line in shown(snapshot(settings=[line]), 120)


def test_processes_that_ended_with_the_run_are_no_problem() -> None:
    run = snapshot(processes=[process("env-0", alive=False)], stopping=True, reason="all done")
    assert problems(run) == []
    assert "stopping: all done" in shown(run)
    waits = "waits for train: its update on batch 6, 930 s at most"
    ending = snapshot(stopping=True, reason="all done", ending=waits.removeprefix("waits for "))
    assert f"stopping: all done {waits}" in " ".join(shown(ending).split())
    assert progress_line(ending).endswith(waits)
    assert waits not in progress_line(run)


def test_texts_of_the_run_are_never_read_as_markup() -> None:
    hostile = "[/red] [bold]x[/nothing] [link=file:///]"
    page = shown(
        snapshot(warnings=[hostile], processes=[process("env-0", waiting_for=hostile)]), 200
    )
    assert page.count("[/red] [bold]x[/nothing]") == 2


def test_a_page_of_a_run_that_does_not_answer_does_not_say_that_it_runs() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(StatusPage(snapshot(), is_old=True))
    assert isinstance(console.file, io.StringIO)
    page = console.file.getvalue()
    assert "as last reported at " in page
    assert "  running" not in page


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


def test_one_line_sums_up_the_run() -> None:
    line = progress_line(snapshot())
    assert "update 7/20" in line
    assert "success 0.50" in line
    assert "\n" not in line


def test_the_line_says_how_far_the_run_is_from_its_stop() -> None:
    assert "ends early" not in progress_line(snapshot())
    stop = StopView(at=0.93, counted=1012, required=1400)
    line = progress_line(snapshot(stop=stop))
    assert "  ends early once success 0.93 is proved: needs 1,400 trajectories, has 1,012  " in line
    known = StopView(
        at=0.93, bound=0.88, counted=400, required=400, lowest="mini/tabs", lowest_success=0.7
    )
    for text in (progress_line(snapshot(stop=known)), shown(snapshot(stop=known))):
        assert (
            "ends early once success 0.93 is proved: 0.88 so far, lowest task mini/tabs 0.70"
            in text
        )


def test_a_run_is_as_far_as_what_ends_it_first() -> None:
    bounded = {"max_minutes": 100.0, "ended_trajectories": 300, "max_trajectories": 400}
    assert "1:02:05 of 1:40:00  update 7/20  trajectory 300/400" in progress_line(
        snapshot(**bounded)
    )
    for changes, wanted in (
        ({}, round(0.35 * 24)),
        ({"max_minutes": 100.0}, round(0.62 * 24)),
        (bounded, round(0.75 * 24)),
        ({**bounded, "ended_trajectories": 999}, 24),
    ):
        console = Console(
            file=io.StringIO(), width=200, color_system="standard", force_terminal=True
        )
        console.print(StatusPage(snapshot(**changes)))
        assert isinstance(console.file, io.StringIO)
        filled = re.search(r"\x1b\[32m(━*)", console.file.getvalue())
        assert filled is not None
        assert len(filled[1]) == wanted, changes


@pytest.mark.parametrize("width", [80, 120])
def test_a_roles_minute_is_a_bar_with_a_percentage_for_each_phase(width: int) -> None:
    page = shown(snapshot(), width)
    [bar] = re.findall(r"^env +(█+)(▓+)(░+)  ", page, re.MULTILINE)
    assert [len(part) for part in bar] == [18, 5, 1]
    for text in ("playing 75% (run 60%)", "waiting 20%", "idle 5%", "training 100% (run 100%)"):
        assert text in page


def test_the_page_shows_queues_and_what_taking_weights_cost() -> None:
    page = shown(snapshot())
    for text in ("53 requests decoded, 4 wait", "64 trajectories in play, 2 slots wait"):
        assert text in page
    [line] = [each for each in page.splitlines() if each.startswith("rollout-1  ") and "14" in each]
    assert line.split() == "rollout-1 7 12 s 0.8 s 2.1 s 0.4 s 14 31".split()


def test_a_refused_weight_set_needs_attention() -> None:
    bad = sync("rollout-1", error="manifest.json: digest differs", refused=1)
    run = snapshot(
        processes=[process("rollout-0"), process("rollout-1")], syncs=[sync("rollout-0"), bad]
    )
    [problem] = problems(run)
    assert problem.startswith("rollout-1 refused version 7")
    assert "digest differs" in problem


def test_a_worker_that_refused_its_first_set_serves_nothing() -> None:
    run = snapshot(
        processes=[process("rollout-0", policy_version=-1)],
        syncs=[sync("rollout-0", error="no such file")],
    )
    assert any("it serves nothing yet: no such file" in problem for problem in problems(run))


def test_what_a_worker_refused_that_has_left_needs_no_attention() -> None:
    bad = sync("rollout-9", error="manifest.json: digest differs", refused=1)
    assert problems(snapshot(syncs=[sync("rollout-0"), bad])) == []


def test_a_run_of_an_older_dart_has_a_page_without_utilisation() -> None:
    assert "utilisation" not in shown(snapshot(usage={}, syncs=[]))


def test_unknown_phases_are_shown_too() -> None:
    page = shown(snapshot(usage={"eval": UsageView(minute={"musing": 2.0}, total={"musing": 2.0})}))
    assert "musing 100%" in page


def data_told(run_dir: Path, line: str) -> None:
    """Let data's log end with this line."""
    log_dir(run_dir).mkdir(parents=True, exist_ok=True)
    told = f"x INFO p: data starts, pid 1, run r\n{line}\n"
    (log_dir(run_dir) / "data.log").write_text(told)


async def test_a_run_that_ends_well_between_two_looks_ends_the_status_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path / "run")
    lines: list[str] = []
    looked = asyncio.Event()

    def keep(line: str) -> None:
        lines.append(line)
        looked.set()

    monkeypatch.setattr(watch, "_print_line", keep)
    async with serving(config):
        status = asyncio.create_task(run_status(config, once=False, as_json=True, every_s=0.1))
        await looked.wait()
        data_told(config.run.dir, "x INFO s: the run is over: 1 updates are done")
        monkeypatch.setattr(watch, "ANSWER_S", 0.3)
        seen = len(lines)
        # A question that was asked before has its answer; no later one waits longer.
        await until(lambda: status.done() or len(lines) > seen + 1)
    assert await status == 0
    last = json.loads(lines[-1])
    assert (last["stopping"], last["reason"]) == (True, "1 updates are done")


async def test_a_data_process_that_is_gone_without_the_runs_end_is_no_good_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path / "run")
    config.run.dir.mkdir(mode=0o700)
    async with Watcher(config) as watcher:
        async with serving(config):
            await watcher.snapshot()
            data_told(
                config.run.dir, "x INFO s: the run is over: all done\nStoreError: disk is full"
            )
        monkeypatch.setattr(watch, "ANSWER_S", 0.1)
        with pytest.raises(DeadlineError, match="no data service answers"):
            await watcher.snapshot()


async def test_a_run_that_was_over_before_the_first_look_has_no_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path / "run")
    config.run.dir.mkdir(mode=0o700)
    data_told(config.run.dir, "x INFO s: the run is over: all done")
    monkeypatch.setattr(watch, "ANSWER_S", 0.1)
    async with Watcher(config) as watcher:
        with pytest.raises(DeadlineError, match="no data service answers"):
            await watcher.snapshot()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What `dart status` writes to a terminal."""
    written = io.StringIO()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")  # a dumb one is drawn nothing on
    monkeypatch.setattr(
        watch,
        "Console",
        lambda **_: Console(file=written, force_terminal=True, width=200, height=99),
    )
    monkeypatch.setattr(watch, "ANSWER_S", 0.1)
    return written


async def test_the_live_page_waits_for_a_run_that_has_not_begun(
    tmp_path: Path, terminal: io.StringIO
) -> None:
    config = small_config(tmp_path / "run")
    status = asyncio.create_task(run_status(config, once=False, as_json=False, every_s=0.05))
    await until(lambda: "no such run" in terminal.getvalue())
    config.run.dir.mkdir(mode=0o700)
    await until(lambda: "waits for dart data" in terminal.getvalue())  # at once
    await until(lambda: "no data service answers" in terminal.getvalue())
    async with serving(config):
        await until(lambda: "groups open" in terminal.getvalue())
        data_told(config.run.dir, "x INFO s: the run is over: all done")
    assert await status == 0
    assert "stopping: all done" in terminal.getvalue()


@pytest.mark.parametrize("as_json", [False, True])
async def test_without_a_terminal_a_run_that_has_not_begun_is_an_error(
    tmp_path: Path, *, as_json: bool
) -> None:
    config = small_config(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="no such run"):
        await run_status(config, once=False, as_json=as_json, every_s=0.05)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `dart status --json` prints."""
    printed: list[str] = []
    monkeypatch.setattr(watch, "_print_line", printed.append)
    return printed


async def test_lines_go_on_when_data_is_started_again(
    tmp_path: Path,
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, told = small_config(tmp_path / "run"), []

    def hear() -> list[str]:
        told.extend(capsys.readouterr().err.splitlines())
        return told

    async with serving(config):
        status = asyncio.create_task(run_status(config, once=False, as_json=True, every_s=0.01))
        await until(lambda: lines)
        monkeypatch.setattr(watch, "ANSWER_S", 0.3)
    await until(hear)
    before = len(lines)
    async with serving(config):
        await until(lambda: len(lines) > before)
        data_told(config.run.dir, "x INFO s: the run is over: all done")
    assert await status == 0
    assert all("no data service answers" in line for line in hear())
    assert all(line.endswith("; keeps trying") for line in told)
    assert json.loads(lines[-1])["reason"] == "all done"


async def test_lines_end_where_an_error_ended_the_run(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path / "run")
    async with serving(config):
        status = asyncio.create_task(run_status(config, once=False, as_json=True, every_s=0.01))
        await until(lambda: lines)
        data_told(config.run.dir, "StoreError: run.db: disk is full")
        monkeypatch.setattr(watch, "ANSWER_S", 0.3)
        seen = len(lines)
        # A question that was asked before has its answer; no later one waits longer.
        await until(lambda: status.done() or len(lines) > seen + 1)
    with pytest.raises(DeadlineError, match="no data service answers"):
        await status


FORMS = [(True, False), (True, True), (False, True), (False, False)]


@pytest.mark.parametrize(("once", "as_json"), FORMS)
async def test_a_run_that_is_over_is_no_fault(
    tmp_path: Path,
    terminal: io.StringIO,
    capsys: pytest.CaptureFixture[str],
    *,
    once: bool,
    as_json: bool,
) -> None:
    config = small_config(tmp_path / "run")
    config.run.dir.mkdir(mode=0o700)
    data_told(config.run.dir, "x INFO s: the run is over: all done")
    assert await run_status(config, once=once, as_json=as_json, every_s=0.01) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert (
        line
        == f"{config.run.dir}: the run is over: all done; `dart view {config.run.dir}` shows it"
    )


@pytest.mark.parametrize(("once", "as_json"), FORMS)
async def test_a_run_that_is_over_is_shown_as_its_data_service_left_it(
    tmp_path: Path, terminal: io.StringIO, lines: list[str], *, once: bool, as_json: bool
) -> None:
    config = small_config(tmp_path / "run")
    async with serving(config):
        pass
    data_told(config.run.dir, "x INFO s: the run is over: all done")
    assert await run_status(config, once=once, as_json=as_json, every_s=0.01) == 0
    if as_json:
        [line] = lines
        seen = Snapshot.model_validate_json(line)
        assert (seen.stopping, seen.reason, seen.updates_total) == (
            True,
            "all done",
            config.train.updates,
        )
    else:
        assert "over: all done" in terminal.getvalue()
        assert "groups open" in terminal.getvalue()


@pytest.mark.parametrize("as_json", [False, True])
async def test_a_run_that_was_stopped_is_shown_as_it_was_and_is_a_fault(
    tmp_path: Path,
    terminal: io.StringIO,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    as_json: bool,
) -> None:
    monkeypatch.setattr(overview, "HEARD_AFTER_S", 0.0)
    config = small_config(tmp_path / "run")
    async with serving(config):
        pass
    with pytest.raises(DeadlineError, match="no data service answers"):
        await run_status(config, once=True, as_json=as_json, every_s=0.01)
    page = terminal.getvalue()
    assert "needs attention" not in page  # its other processes end before the data service does
    assert ("as last reported at " in page) is not as_json
    assert ("groups open" in page) is not as_json
    assert not lines  # a script would take it for the run as it is


async def test_the_live_page_of_a_stopped_run_begins_with_what_was_last_reported(
    tmp_path: Path, terminal: io.StringIO
) -> None:
    config = small_config(tmp_path / "run")
    async with serving(config):
        pass
    status = asyncio.create_task(run_status(config, once=False, as_json=False, every_s=0.01))
    await until(lambda: "as last reported at " in terminal.getvalue())
    assert "no data service answers" in terminal.getvalue()
    data_told(config.run.dir, "x INFO s: the run is over: all done")
    assert await status == 0
    assert "over: all done" in terminal.getvalue()


async def test_what_another_version_of_dart_left_is_not_shown(
    tmp_path: Path, terminal: io.StringIO
) -> None:
    config = small_config(tmp_path / "run")
    config.run.dir.mkdir(mode=0o700)
    (config.run.dir / "snapshot.json").write_text('{"run_id": 1}')
    with pytest.raises(DeadlineError, match="no data service answers"):
        await run_status(config, once=True, as_json=False, every_s=0.01)
    assert terminal.getvalue() == ""


async def test_over_tcp_no_answer_may_mean_other_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "ANSWER_S", 0.1)
    config = small_config(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        bus = config.bus.model_copy(update={"host": "127.0.0.1", "port": mute.getsockname()[1]})
        async with Watcher(config.model_copy(update={"bus": bus})) as watcher:
            with pytest.raises(DeadlineError, match=r"bus\.port or bus\.keys differ"):
                await watcher.snapshot()
