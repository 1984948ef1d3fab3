"""The page in windows of any size: what is wanted most is there, and what is missing is named."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.screen import Screen

from bus.snapshot import Snapshot, StallView, StopView
from dart_cli.runtime.tables import count
from dart_cli.status.status_page import StatusPage
from tests.snapshots import process, snapshot

TITLES = {  # of a page's parts, the most important first
    "problems": "needs attention",
    "tasks": "over versions",
    "processes": "waits for",
    "training": "\ntraining ",
    "throughput": "throughput  ",
    "pipeline": "pipeline  ",
    "utilisation": "requests decoded",
    "weights taken": "rollout-1  ",
    "judges": "judge eyes",
}


def busy(tasks: int = 7, stalls: int = 1, **changes: object) -> Snapshot:
    """A run with everything that a page can show."""
    plain = snapshot()
    gauges = {"in_flight": 3.0, "waiting": 0.0, "tokens": 30_540.0}
    gauges |= {"prompt_tokens": 8.0, "cached_tokens": 4.0}
    fields = {
        "processes": [
            *plain.processes[:1],
            process("rollout-0", gauges=gauges),
            process("train", gauges={"updates": 7.0, "tokens": 66_604.4, "ranks": 8.0}),
        ],
        "tasks": [
            plain.tasks[0].model_copy(update={"task_id": f"mini/{number}"})
            for number in range(tasks)
        ],
        "stalls": [
            StallView(kind="waits", who="train", since_s=9, text=f"stall {number}: it waits")
            for number in range(stalls)
        ],
        "metrics": plain.metrics | {"tokens": 66_604.4, "lr": 5e-6},
        "judges": [{"judge": "eyes", "judged": 3, "calls": 3}],
    }
    return snapshot(**fields | changes)


def live(run: Snapshot, width: int, height: int) -> list[str]:
    """The lines of the page in a window of this size."""
    console = Console(file=io.StringIO(), width=width, height=height, markup=False, highlight=False)
    console.print(StatusPage(run, is_live=True))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def note_of(lines: list[str]) -> str:
    """What the page says that it left out; empty where it has everything."""
    return " ".join(" ".join(lines).partition("left out: ")[2].split())


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("height", [25, 45, 150])
def test_every_part_is_in_the_window_or_named_as_missing(width: int, height: int) -> None:
    lines = live(busy(), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    page, _, note = "\n".join(lines).partition("left out: ")
    missing = " ".join(note.split())
    shown = {name for name, title in TITLES.items() if title in page}
    assert {"problems", "tasks"} <= shown
    for name in TITLES:
        assert (name in shown) != bool(re.search(rf"(^|, ){name}[,;]", missing)), name
    places = [
        page.count("\n", 0, page.index(title) + 1)
        for name, title in TITLES.items()
        if name in shown
    ]
    assert places == sorted(places)
    if missing:
        assert missing.endswith("a larger window, dart status --once or dart view shows it")


def test_a_window_that_has_room_for_everything_leaves_nothing_out() -> None:
    assert note_of(live(busy(), 120, 150)) == ""
    assert "left out" not in "\n".join(live(busy(), 80, 150))


def test_of_more_tasks_than_fit_the_first_are_shown_and_the_others_counted() -> None:
    lines = live(busy(tasks=100), 80, 25)
    shown = sum(line.startswith("mini/") for line in lines)
    assert 3 <= shown < 25
    assert f"{100 - shown} of 100 tasks" in note_of(lines)
    assert len(lines) == 25


def test_of_more_problems_than_fit_the_first_are_shown_and_the_others_counted() -> None:
    lines = live(busy(stalls=40), 80, 25)
    shown = sum("it waits" in line for line in lines)
    assert 1 <= shown < 25
    assert f"{40 - shown} of 40 problems" in note_of(lines)


def test_a_windows_height_is_not_filled_by_the_panel_of_what_needs_attention() -> None:
    console = Console(file=io.StringIO(), width=80, height=45)
    console.print(Screen(StatusPage(busy(), is_live=True)))
    assert isinstance(console.file, io.StringIO)
    assert "mini/6" in console.file.getvalue()


def test_load_goes_before_anything_else_does() -> None:
    run = busy()
    whole = len(live(run, 80, 200))
    assert "in_flight" in "\n".join(live(run, 80, whole))
    one_less = live(run, 80, whole - 1)
    assert "in_flight" not in "\n".join(one_less)
    assert note_of(one_less).startswith("load; ")


def test_at_60_columns_no_word_is_cut() -> None:
    lines = live(busy(), 60, 150)
    assert "…" not in "\n".join(lines)
    assert note_of(lines).startswith("played next, load, in flight, waited; ")
    console = Console(file=io.StringIO(), width=60)
    console.print(StatusPage(busy()))
    assert isinstance(console.file, io.StringIO)
    assert "; a wider window shows it" in " ".join(console.file.getvalue().split())


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_counts_are_no_powers_of_ten(width: int) -> None:
    page = "\n".join(live(busy(), width, 150))
    assert "e+" not in page
    assert "66,604" in page
    assert ("30,540" in page) == (width >= 80)  # of load


def test_counts_are_short() -> None:
    values = (0.25, 9_999, 10_000, 999_499.0, 999_500.0, 1_234_567, 2.5e9, 5e-6)
    assert [count(each) for each in values] == (
        "0.25 9999 10,000 999,499 1M 1.23M 2.5B 5e-06".split()
    )


def test_all_rates_have_one_unit() -> None:
    rates = {"window_s": 60, "trajectories": 3.25, "steps": 4000, "actions": 0, "updates": 0.04}
    page = "\n".join(live(snapshot(rates=rates), 80, 150))
    found = dict(re.findall(r"(\w+)/(?:min|h|s) +(\S+)", page))
    assert found == {
        "trajectories": "3.2",
        "steps": "4,000",
        "actions": "0",
        "updates": "0.04",
    }
    assert not re.search(r"\w/(h|s)\b", page)


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, "about 2:10 left"),  # 13 updates, six of them a minute
        ({"max_minutes": 63.0}, "about 0:55 left"),
        ({"max_trajectories": 300, "ended_trajectories": 120}, "about 1:30 left"),
        ({"stop": StopView(at=0.9)}, "at most 2:10 left"),
        ({"rates": {**snapshot().rates.model_dump(), "updates": 0.0}}, ""),
        ({"stopping": True, "reason": "all done"}, ""),
    ],
)
def test_the_page_says_how_much_time_is_left(changes: dict[str, object], left: str) -> None:
    page = "\n".join(live(snapshot(**changes), 120, 100))
    assert ("left" in page) == bool(left)
    assert left in page
