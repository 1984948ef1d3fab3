"""The curation study: its arms, what a run costs, and the ratio to equal success."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.errors import ConfigError
from dart_cli.bench.curation import (
    ALL,
    ARMS,
    OTHERS,
    PARTS,
    UNIFORM,
    Study,
    curve,
    out_of_reach,
    pick_arms,
    spread,
    summarize,
)
from dart_cli.bench.study import Cell, Result
from dart_cli.config.load import load_config
from dart_cli.config.validate import find_mistakes

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "curation.toml"


def run(*points: tuple[int, float]) -> Result:
    """A run whose actions are three and whose milliminutes one to a trajectory."""
    return {
        "points": [
            {"version": i, "trajectories": x, "actions": 3 * x, "minutes": x / 1000, "success": y}
            for i, (x, y) in enumerate(points)
        ],
        "groups": {"trained": 30, "all_fail": 10, "all_success": 60, "open": 7, "ready": 5},
    }


def test_every_part_is_measured_alone_and_left_out() -> None:
    assert ARMS[UNIFORM] == ()
    assert set(ARMS[ALL]) == set(PARTS)
    for part in PARTS:
        assert ARMS[part] == (part,)
        assert set(ARMS[f"no-{part}"]) == set(PARTS) - {part}
    assert len(ARMS) == 2 + 2 * len(PARTS)


@pytest.mark.parametrize("arm", [*ARMS, *OTHERS])
def test_an_arm_is_a_valid_configuration_and_differs_from_the_others(
    arm: str, tmp_path: Path
) -> None:
    study = Study(ROOT, CONFIG, tmp_path)
    study.pool.mkdir()
    configs = {each: load_config(CONFIG, study.sets_of(each)) for each in (*ARMS, *OTHERS)}
    assert list(find_mistakes(configs[arm])) == []
    assert [each for each, config in configs.items() if config == configs[arm]] == [arm]


def test_a_third_of_the_tasks_is_recognised_as_hopeless() -> None:
    text = CONFIG.read_text()
    hopeless = text.partition("# out of reach")[2].partition("\n]")[0].count("composed/")
    assert 3 * hopeless >= len(load_config(CONFIG).env.tasks)


def test_an_unknown_arm_is_refused_with_those_there_are() -> None:
    assert pick_arms("uniform, all,uniform") == ["uniform", "all"]
    assert pick_arms("all-arms") == list(ARMS)
    with pytest.raises(ConfigError, match=r"no arm 'every'; there are uniform, all, frontier"):
        pick_arms("every")


def test_the_ratio_is_of_costs_to_the_level_that_uniform_ends_at() -> None:
    results = {
        Cell(UNIFORM, 0): run((0, 0.3), (1000, 0.5), (2000, 0.7)),
        Cell(ALL, 0): run((0, 0.3), (500, 0.6), (1000, 0.8)),
    }
    summary = summarize(results)
    assert summary["level"] == 0.7
    assert summary["trajectories_ratio"] == pytest.approx(750 / 2000)
    assert summary["actions_ratio"] == summary["minutes_ratio"] == pytest.approx(750 / 2000)
    assert summary["trajectories_ratio_at"] == {
        0.6: 0.3333,
        0.7: 0.375,
        0.8: None,
        0.85: None,
    }
    assert summary["arms"][ALL]["final_success"] == 0.8
    assert summary["arms"][ALL]["to_level"]["minutes"] == pytest.approx(0.75)


def test_a_baseline_that_stagnates_is_compared_at_where_it_began_to() -> None:
    results = {
        Cell(UNIFORM, 0): run((0, 0.3), (1000, 0.7), (2000, 0.7), (3000, 0.7)),
        Cell(ALL, 0): run((0, 0.3), (1000, 0.7)),
    }
    assert summarize(results)["trajectories_ratio"] == 1.0


def test_seeds_are_pooled_and_their_number_reported() -> None:
    results = {
        Cell(UNIFORM, 0): run((0, 0.3), (2000, 0.6)),
        Cell(UNIFORM, 1): run((0, 0.3), (2000, 0.8)),
        Cell(ALL, 0): run((0, 0.3), (1000, 0.7)),
        Cell(ALL, 1): run((0, 0.3), (1000, 0.7)),
    }
    summary = summarize(results)
    assert summary["seeds"] == 2
    assert summary["limit"] == 0.3
    assert summary["arms"][UNIFORM]["by_seed"] == [0.6, 0.8]
    assert summary["trajectories_ratio"] == pytest.approx(0.5)


def test_no_ratio_where_the_level_is_never_reached_or_an_arm_is_missing() -> None:
    uniform, ours = run((0, 0.3), (1000, 0.7)), run((0, 0.3), (1000, 0.6))
    assert summarize({Cell(UNIFORM, 0): uniform})["trajectories_ratio"] is None
    both = summarize({Cell(UNIFORM, 0): uniform, Cell(ALL, 0): ours})
    assert both["trajectories_ratio"] is None
    assert both["arms"][ALL]["to_level"]["trajectories"] is None
    alone = summarize({Cell(ALL, 0): ours})
    assert alone["level"] is None
    assert alone["arms"][ALL]["final_success"] == 0.6


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
    tasks = out_of_reach({Cell(UNIFORM, 0): result})
    assert tasks == ["hard", "never"]
    assert curve(result, "trajectories", tasks) == [(0, 0.05), (1000, 0.5)]
    assert curve(result, "actions") == [(0, 0.5), (3000, 0.8)]
