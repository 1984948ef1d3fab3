"""The curation study: its arms, what a run costs, and the ratio to equal success."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learning.curation_arms import (
    ARMS,
    BASELINE,
    BUDGET,
    GROUPS,
    OLD_PARTS,
    OURS,
    RATES,
    SCHEDULES,
    Arm,
    arm_of,
    pick_arms,
)
from benchmarks.learning.curation_study import Study, curve, out_of_reach, spread, summarize
from benchmarks.learning.study import Cell, Result
from bus.errors import ConfigError
from dart_cli.config.load import load_config
from tests.config.mistakes import mistakes_anywhere

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "curation.toml"


def run(*points: tuple[int, float]) -> Result:
    """A run whose actions are three and whose milliminutes one to a trajectory."""
    return {
        "points": [
            {"version": i, "trajectories": x, "actions": 3 * x, "minutes": x / 1000, "success": y}
            for i, (x, y) in enumerate(points)
        ],
        "per_task": {str(i): {"a": y} for i, (_, y) in enumerate(points)},
        "cpu_s": None,
        "groups": {"trained": 30, "all_fail": 10, "all_success": 60, "open": 7, "ready": 5},
    }


def test_every_part_of_the_first_study_is_measured_alone_and_left_out() -> None:
    assert set(ARMS["all"].parts) == set(OLD_PARTS)
    for part in OLD_PARTS:
        assert ARMS[part].parts == (part,)
        assert set(ARMS[f"no-{part}"].parts) == set(OLD_PARTS) - {part}


@pytest.mark.parametrize("group", GROUPS)
def test_arms_are_valid_configurations_and_differ_from_each_other(
    group: str, tmp_path: Path
) -> None:
    study = Study(ROOT, CONFIG, tmp_path)
    study.pool.mkdir()
    arms = dict.fromkeys((BASELINE, *GROUPS[group]))
    configs = [load_config(CONFIG, study.sets_of(arm)) for arm in arms]
    for config in configs:
        assert mistakes_anywhere(config) == []
    assert all(configs.count(config) == 1 for config in configs)


@pytest.mark.parametrize("name", ["quickstart", "miniwob"])
def test_the_arms_fit_other_configurations(name: str, tmp_path: Path) -> None:
    path = ROOT / "configs" / f"{name}.toml"
    study = Study(ROOT, path, tmp_path)
    for arm in (Arm("file"), BASELINE, OURS, Arm("single"), *GROUPS["left-out"]):
        assert mistakes_anywhere(load_config(path, study.sets_of(arm))) == []


def test_a_name_says_what_is_played() -> None:
    assert arm_of("grpo+frontier~4e-4~flat@512") == Arm("grpo", ("frontier",), "4e-4", "flat", 512)
    assert arm_of("pool") == Arm("file", ("pool",))
    assert arm_of("pool+length@9") == Arm("file", ("pool", "length"), budget=9)
    for group in GROUPS.values():
        for arm in group:
            assert arm_of(arm.name) == arm
    assert arm_of("grpo").trajectories == BUDGET == 2 * arm_of("grpo+frontier").trajectories


def test_the_settings_on_the_command_line_come_last(tmp_path: Path) -> None:
    study = Study(ROOT, CONFIG, tmp_path, ("train.lr=1e-5",))
    train = load_config(CONFIG, study.sets_of(arm_of("grpo~4e-4@512"))).train
    assert (train.lr, train.max_trajectories) == (1e-5, 512)


def test_baseline_and_ours_are_tuned_on_one_grid() -> None:
    for arm in (BASELINE, OURS):
        grid = pick_arms(arm.name, tune=True)
        assert {(each.rate, each.schedule) for each in grid} == {
            (rate, schedule) for rate in RATES for schedule in SCHEDULES
        }
        assert arm.tuned in {(each.rate, each.schedule) for each in grid}


def test_a_third_of_the_tasks_is_recognised_as_hopeless() -> None:
    text = CONFIG.read_text()
    hopeless = text.partition("# out of reach")[2].partition("\n]")[0].count("composed/")
    assert 3 * hopeless >= len(load_config(CONFIG).env.tasks)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("every", r"no base 'every' \(every\); there are file, grpo, single"),
        ("grpo+every", r"no part 'every' \(grpo\+every\); there are frontier"),
        ("grpo~1e-4~steep", r"no schedule 'steep' .*; there are flat"),
        ("grpo@many", r"'grpo@many' is not BASE"),
    ],
)
def test_an_unknown_arm_is_refused_with_those_there_are(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pick_arms(f"grpo,{name}")


def test_arms_are_played_once_each() -> None:
    assert pick_arms("uniform, all,uniform") == [arm_of("uniform"), arm_of("all")]
    assert pick_arms("main,grpo") == list(GROUPS["main"])


def summary_of(results: dict[Cell, Result]) -> dict[str, object]:
    return summarize(results, {cell.arm: arm_of(cell.arm) for cell in results})


def test_the_ratio_is_of_costs_to_the_level_that_the_baseline_ends_at() -> None:
    results = {
        Cell(BASELINE.name, 4): run((0, 0.3), (1000, 0.5), (2000, 0.7)),
        Cell(OURS.name, 4): run((0, 0.3), (500, 0.6), (1000, 0.8)),
    }
    summary = summary_of(results)
    assert (summary["baseline"], summary["ours"]) == (BASELINE.name, OURS.name)
    assert summary["level"] == summary["end_success_baseline"] == 0.7
    assert summary["end_success"] == 0.8
    assert summary["trajectories_ratio"] == pytest.approx(750 / 2000)
    assert summary["actions_ratio"] == summary["minutes_ratio"] == pytest.approx(750 / 2000)
    found = [summary[f"ratio_{level}"] for level in (60, 70, 80, 85)]
    assert found == [0.3333, 0.375, None, None]
    ours = summary["arms"][OURS.name]
    assert (ours["per_task"], ours["tasks_learned"]) == ({"a": [0.3, 0.8]}, ["a"])
    assert summary["arms"][BASELINE.name]["tasks_learned"] == []
    assert ours["to_level"]["minutes"] == pytest.approx(0.75)
    assert ours["ratios"] == {"end": 0.375, "0.6": 0.3333, "0.7": 0.375, "0.8": None, "0.85": None}
    assert (ours["seeds"], ours["to_level_by_seed"]) == ([4], [750])


def test_the_first_study_is_compared_with_its_own_baseline() -> None:
    results = {
        Cell(arm_of("uniform").name, 0): run((0, 0.3), (2000, 0.7)),
        Cell(arm_of("all").name, 0): run((0, 0.3), (1000, 0.7)),
    }
    summary = summary_of(results)
    assert summary["baseline"] == arm_of("uniform").name
    assert summary["trajectories_ratio"] == 0.5


def test_arms_of_another_budget_or_rate_are_compared_too() -> None:
    results = {
        Cell("grpo~4e-4@1504", 0): run((0, 0.3), (1000, 0.7)),
        Cell(f"{OURS.name}@1504", 0): run((0, 0.3), (500, 0.7)),
    }
    assert summary_of(results)["trajectories_ratio"] == 0.5


def test_of_other_arms_the_first_is_the_baseline_and_the_last_is_held_against_it() -> None:
    names = ("grpo+fresh@2048", "single+fresh@1024", "single+critic+fresh@1024")
    results = {
        Cell(name, 0): run((0, 0.3), (1000 - 200 * at, 0.7)) for at, name in enumerate(names)
    }
    summary = summary_of(results)
    assert (summary["baseline"], summary["ours"]) == (names[0], names[-1])
    assert summary["trajectories_ratio"] == pytest.approx(0.6)


def test_a_baseline_that_stagnates_is_compared_at_where_it_began_to() -> None:
    results = {
        Cell(BASELINE.name, 0): run((0, 0.3), (1000, 0.7), (2000, 0.7), (3000, 0.7)),
        Cell(OURS.name, 0): run((0, 0.3), (1000, 0.7)),
    }
    summary = summary_of(results)
    assert summary["trajectories_ratio"] == 1.0
    assert summary["trajectories_ratio_of_budget"] == 0.3333


def test_seeds_are_pooled_and_their_number_reported() -> None:
    results = {
        Cell(BASELINE.name, 0): run((0, 0.3), (2000, 0.6)),
        Cell(BASELINE.name, 1): run((0, 0.3), (2000, 0.8)),
        Cell(OURS.name, 0): run((0, 0.3), (1000, 0.7)),
        Cell(OURS.name, 1): run((0, 0.3), (1000, 0.7)),
    }
    summary = summary_of(results)
    assert summary["seeds"] == 2
    assert summary["limit"] == 0.3
    assert summary["arms"][BASELINE.name]["by_seed"] == [0.6, 0.8]
    assert summary["trajectories_ratio"] == pytest.approx(0.5)


def test_no_ratio_where_the_level_is_never_reached_or_an_arm_is_missing() -> None:
    uniform, ours = run((0, 0.3), (1000, 0.7)), run((0, 0.3), (1000, 0.6))
    assert summary_of({Cell(BASELINE.name, 0): uniform})["trajectories_ratio"] is None
    both = summary_of({Cell(BASELINE.name, 0): uniform, Cell(OURS.name, 0): ours})
    assert both["trajectories_ratio"] is None
    assert both["arms"][OURS.name]["to_level"]["trajectories"] is None
    alone = summary_of({Cell(OURS.name, 0): ours})
    assert alone["level"] is None
    assert alone["arms"][OURS.name]["final_success"] == 0.6


def test_points_are_the_first_version_the_last_and_evenly_between() -> None:
    assert spread(range(101), 10) == list(range(0, 101, 10))
    assert spread([0, 1, 2], 10) == [0, 1, 2]
    assert spread([0, 1, 3, 4, 8], 2) == [0, 3, 8]
    assert spread([0], 10) == [0]


def test_tasks_out_of_reach_have_a_curve_of_their_own() -> None:
    result = run((0, 0.5), (1000, 0.8))
    result["per_task"] = {
        "0": {"easy": 0.9, "hard": 0.1, "never": 0.0},
        "1": {"easy": 1.0, "hard": 0.8, "never": 0.2},
    }
    tasks = out_of_reach({Cell(BASELINE.name, 0): result})
    assert tasks == ["hard", "never"]
    assert curve(result, "trajectories", tasks) == [(0, 0.05), (1000, 0.5)]
    assert curve(result, "actions") == [(0, 0.5), (3000, 0.8)]
