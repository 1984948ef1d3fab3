"""What a run could reach at most, and what the comparison makes of its arms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulation.bound import bound_of
from benchmarks.simulation.efficiency import (
    ARMS,
    BASELINE,
    CONFIG,
    OURS,
    Options,
    run_efficiency,
    summary,
)
from benchmarks.simulation.measure import Measured
from benchmarks.simulation.recording import Plan, record
from bus.errors import ConfigError, DartError
from dart_cli.config.load import load_config


def measured(actions_per_minute: float) -> Measured:
    """A run with this throughput; every other figure is 1."""
    figures = dict.fromkeys(Measured.__dataclass_fields__, 1)
    return replace(Measured(**figures), actions_per_minute=actions_per_minute)  # type: ignore[arg-type]


def options() -> Options:
    arms = (ARMS[BASELINE], ARMS[OURS])
    return Options(CONFIG, (), arms, 1.0, 64, 4, "osworld", "none", 1, None, None)


def test_the_bound_of_simulated_minutes_does_not_depend_on_the_speedup() -> None:
    bounds = [
        bound_of(
            load_config(CONFIG, [f"env.options.speedup={speed}"]),
            slots=64,
            workers=4,
        )
        for speed in (1.0, 12.0)
    ]
    assert bounds[0].by == bounds[1].by == "environments"
    for part in ("environments", "rollout", "trainer"):
        assert getattr(bounds[0], part) == pytest.approx(getattr(bounds[1], part))


def test_a_baseline_that_did_nothing_gives_no_ratio_and_costs_no_result() -> None:
    runs = {(OURS, False): [measured(300.0)], (BASELINE, False): [measured(0.0)]}
    medians = {key: each[0] for key, each in runs.items()}
    result = summary(medians, runs, options())
    assert result["actions_per_minute_ratio"] is None
    assert result["env_utilisation_ratio"] == 1.0


def test_environments_that_cannot_be_spread_evenly_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"65 cannot be spread evenly over up\.envs = 2"):
        run_efficiency(replace(options(), envs=65))


def test_a_suite_that_takes_no_time_cannot_be_compared() -> None:
    quickstart = CONFIG.parents[2] / "configs" / "quickstart.toml"
    with pytest.raises(
        ConfigError, match=r"env.suite = 'mini' cannot be compared.*efficiency.toml"
    ):
        run_efficiency(replace(options(), config_path=quickstart))


async def test_a_run_that_is_over_before_its_window_is_no_measurement(tmp_path: Path) -> None:
    config = load_config(CONFIG, [f"run.dir={tmp_path / 'run'}"])
    commands = {name: ["--version"] for name in ("data", "train")}
    with pytest.raises(DartError, match=r"over before 5 s of it were watched"):
        await record(config, commands, Plan(warm_s=0.0, seconds=5.0))
