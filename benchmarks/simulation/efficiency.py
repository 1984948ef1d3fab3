"""Which schedule uses environments and GPUs best? The same run is scheduled and synchronised in different ways.

    python benchmarks/simulation/efficiency.py [--seconds 60] [--repeats 3] [--faults both] [--arms NAMES]

    ARMS             runs that differ only in how they are scheduled and synchronised
    run_efficiency   every arm, with and without faults, repeated; pictures, tables, one JSON line
    play_arm         one run of one arm

Real processes over the real bus and database; environments, engines and the optimizer take simulated
time. The baseline is the synchronous batch-wise loop in the same code, measured in the same invocation,
interleaved, on the same machine; figures are medians over the repeats. The physical limit is the least of
what environments, rollout workers and trainer can do (bound.py). docs/data.md has the definitions and
the committed result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console
from rich.table import Table

from benchmarks.simulation.bound import bound_of
from benchmarks.simulation.measure import Measured, measure
from benchmarks.simulation.profiles import PROFILES
from benchmarks.simulation.recording import Plan, record
from benchmarks.simulation.timeline import draw
from benchmarks.simulation.times import Times
from bus.errors import ConfigError, DartError, TaskError
from dart_cli.config.load import Source, load_config
from dart_cli.config.rules.check import check_config
from dart_cli.data.store.open import DATABASE, open_reader
from dart_cli.runtime.commands import commands_of
from dart_cli.runtime.tables import page_table
from envs.contract.registry import check_options

FAULT_RATE = 0.05
"""Share of episodes whose environment breaks or is slow, where faults are injected."""
KILLS = 3
"""Rollout workers killed in a run with faults."""
WARM_MINUTES = 4.0
"""Simulated minutes before the window: longer than an episode, so that all slots are out of step."""


CONFIG = Path(__file__).with_name("efficiency.toml")


@dataclass(frozen=True)
class Arm:
    """One way to run; `overrides` are `--set` arguments."""

    name: str
    title: str
    overrides: tuple[str, ...]


def _arm(name: str, title: str, scheduling: str, *more: str) -> Arm:
    return Arm(name, title, (f"data.scheduling={scheduling}", *more))


ARMS = {
    arm.name: arm
    for arm in (
        _arm("coupled-batch", "synchronous, batch-wise", "batch"),
        _arm("oversample", "over-sample, discard", "oversample"),
        _arm("april", "APRIL", "april"),
        _arm("all-at-once", "asynchronous, all sync at once", "rollout", "weights.concurrent=0"),
        _arm("rolling", "asynchronous, rolling sync", "rollout", "weights.concurrent=1"),
    )
}
"""By name, in their order of presentation."""

BASELINE, OURS = "coupled-batch", "rolling"


@dataclass(frozen=True)
class Options:
    """The options of the command line: what to play."""

    config_path: Path
    overrides: tuple[str, ...]
    arms: tuple[Arm, ...]
    seconds: float
    envs: int
    workers: int
    profile: str
    faults: str  # none, injected or both
    repeats: int
    out: Path | None
    pictures: Path | None


def run_efficiency(options: Options) -> dict[str, Any]:
    """Play all arms, print tables, write pictures; return the JSON object of the last line of stdout.

    Raises ConfigError for invalid options, ChildError if a run could not be kept alive.
    """
    _check_suite(options)
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 150)
    conditions = {"none": (False,), "injected": (True,), "both": (False, True)}[options.faults]
    runs_by_arm: dict[tuple[str, bool], list[Measured]] = {}
    for repeat in range(options.repeats):
        for arm in options.arms:
            console.print(f"[{repeat + 1}/{options.repeats}] {arm.title} ...", markup=False)
            is_last = repeat == options.repeats - 1
            for with_faults, measured in asyncio.run(
                _play_side_by_side(arm, options, conditions, pictured=is_last)
            ):
                runs_by_arm.setdefault((arm.name, with_faults), []).append(measured)
                console.print(
                    f"    {'5 % faults' if with_faults else 'no faults'}: "
                    f"{measured.actions_per_minute:.0f} actions/min, environments "
                    f"{measured.env_utilisation:.0%}, rollout {measured.rollout_utilisation:.0%}",
                    markup=False,
                )
    medians = {key: middle(runs) for key, runs in runs_by_arm.items()}
    for with_faults in conditions:
        console.print(_table(medians, with_faults), soft_wrap=True)
    result = summary(medians, runs_by_arm, options)
    line = json.dumps(result)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(line + "\n")
    return result


async def _play_side_by_side(
    arm: Arm, options: Options, conditions: Sequence[bool], *, pictured: bool
) -> list[tuple[bool, Measured]]:
    """Play one run of an arm under each condition at the same time: a run needs a third of a core."""
    plays = [
        play_arm(arm, options, with_faults=condition, pictured=pictured) for condition in conditions
    ]
    return list(zip(conditions, await asyncio.gather(*plays), strict=True))


async def play_arm(arm: Arm, options: Options, *, with_faults: bool, pictured: bool) -> Measured:
    """Play one run of one arm, in a fresh run directory below the configuration's."""
    overrides = [*_overrides(options, with_faults), *arm.overrides, *options.overrides]
    config = load_config(options.config_path, overrides)
    run_dir = config.run.dir / f"{arm.name}{'-faults' if with_faults else ''}"
    overrides.append(f"run.dir={run_dir}")
    config = load_config(options.config_path, overrides)
    check_config(config, Source(options.config_path, options.overrides))
    if (run_dir / DATABASE).exists():  # the run of an earlier benchmark; nothing else is removed
        shutil.rmtree(run_dir)
    speedup = Times.of(config).speedup
    plan = Plan(
        warm_s=60 * WARM_MINUTES / speedup,
        seconds=options.seconds,
        kills=KILLS if with_faults else 0,
    )
    slots = config.env.slots * config.up.envs
    arguments = [str(options.config_path), *(p for o in overrides for p in ("--set", o))]
    bound = bound_of(config, slots=slots, workers=config.up.rollouts)
    recording = await record(config, commands_of(config, arguments), plan)
    with open_reader(run_dir) as reader:
        measured = measure(recording, reader, bound, slots=slots, speedup=speedup)
        if pictured and options.pictures is not None:
            name = f"{arm.name}{'-faults' if with_faults else ''}.png"
            title = (
                f"{arm.title}{', with faults' if with_faults else ''}: "
                f"{measured.actions_per_minute:.0f} actions/min, "
                f"environments {measured.env_utilisation:.0%} at work, "
                f"rollout workers {measured.rollout_utilisation:.0%} busy"
            )
            draw(
                recording,
                reader,
                options.pictures / name,
                title=title,
                speedup=speedup,
                takes_turns=config.data.takes_turns,
            )
    return measured


def middle(runs: Sequence[Measured]) -> Measured:
    """Return the run with the median throughput; of an even number the lower one."""
    ordered = sorted(runs, key=lambda run: run.actions_per_minute)
    return ordered[(len(ordered) - 1) // 2]


def summary(
    medians: dict[tuple[str, bool], Measured],
    runs: dict[tuple[str, bool], list[Measured]],
    options: Options,
) -> dict[str, Any]:
    """Return the JSON object: ratios of ours to the baseline, and every arm's figures."""
    result: dict[str, Any] = {"benchmark": "efficiency", "profile": options.profile}
    result |= {"environments": options.envs, "workers": options.workers}
    result |= {"seconds": options.seconds, "repeats": options.repeats}
    ours, baseline = medians.get((OURS, False)), medians.get((BASELINE, False))
    if ours and baseline:
        mine, theirs = runs[OURS, False], runs[BASELINE, False]

        def ratio(field: str) -> float | None:
            """Return the median over the repeats; None where a window was too short for the baseline."""
            pairs = [
                (getattr(a, field), getattr(b, field)) for a, b in zip(mine, theirs, strict=True)
            ]
            if not all(b for _, b in pairs):
                return None
            ratios: list[float] = [a / b for a, b in pairs]
            return round(median(ratios), 3)

        result |= {
            "env_utilisation_ratio": ratio("env_utilisation"),
            "actions_per_minute_ratio": ratio("actions_per_minute"),
            "trained_actions_per_minute_ratio": ratio("trained_actions_per_minute"),
            "rollout_utilisation_ratio": ratio("rollout_utilisation"),
            "rollout_load_ratio": ratio("rollout_load"),
        }
    if ours:
        result |= {
            "env_utilisation": round(ours.env_utilisation, 4),
            "achieved_over_bound": round(ours.achieved_over_bound, 4),
            "finished_lost": sum(run.finished_lost for each in runs.values() for run in each),
        }
    if ours and ours.actions_per_minute and (faulty := medians.get((OURS, True))):
        result["with_faults_over_without"] = round(
            faulty.actions_per_minute / ours.actions_per_minute, 4
        )
    result["arms"] = {
        f"{name}{'+faults' if with_faults else ''}": measured.as_dict()
        for (name, with_faults), measured in medians.items()
    }
    return result


def _check_suite(options: Options) -> None:
    """Raise ConfigError if the speed of the suite cannot be set, before any arm is played."""
    config = load_config(options.config_path, list(options.overrides))
    try:
        check_options(config.env.suite, {"profile": options.profile, "fault_rate": FAULT_RATE})
    except TaskError as error:
        raise ConfigError(
            f"env.suite = {config.env.suite!r} cannot be compared: {error}; name a configuration "
            f"of a simulated suite, e.g. {CONFIG.name} ({options.config_path})"
        ) from None


def _overrides(options: Options, with_faults: bool) -> list[str]:
    """Return the options as `--set` arguments; slots are spread evenly over the environment processes."""
    config = load_config(options.config_path, list(options.overrides))
    processes = max(1, config.up.envs)
    if options.envs % processes:
        raise ConfigError(
            f"--envs {options.envs} cannot be spread evenly over up.envs = {processes} processes"
        )
    rate = FAULT_RATE if with_faults else 0.0
    return [
        f"env.slots={options.envs // processes}",
        f"up.rollouts={options.workers}",
        f"env.options.profile={options.profile}",
        f"env.options.fault_rate={rate}",
    ]


def _table(medians: dict[tuple[str, bool], Measured], with_faults: bool) -> Table:
    columns: dict[str, Callable[[Measured], str]] = {
        "actions/min": lambda m: f"{m.actions_per_minute:.0f}",
        "trained": lambda m: f"{m.trained_actions_per_minute:.0f}",
        "/env": lambda m: f"{m.actions_per_env_minute:.2f}",
        "env": lambda m: f"{m.env_utilisation:.1%}",
        "acting": lambda m: f"{m.env_acting:.1%}",
        "rollout": lambda m: f"{m.rollout_utilisation:.1%}",
        "load": lambda m: f"{m.rollout_load:.1%}",
        "trainer": lambda m: f"{m.trainer_utilisation:.1%}",
        "stale": lambda m: f"{m.staleness_mean:.2f}",
        "wasted": lambda m: f"{m.wasted_steps:.1%}",
        "lost": lambda m: str(m.finished_lost),
        "pause": lambda m: f"{m.pause_s:.2f} s",
        "of bound": lambda m: f"{m.achieved_over_bound:.2f}",
    }
    title = "5 % faults" if with_faults else "no faults"
    table = page_table(title, "arm", *columns, right=tuple(columns))
    for arm in ARMS.values():
        if measured := medians.get((arm.name, with_faults)):
            table.add_row(arm.title, *(show(measured) for show in columns.values()))
    return table


def pick(names: str) -> list[Arm]:
    """Return the arms named in a comma-separated list, `all` for all. Raises ConfigError."""
    if names == "all":
        return list(ARMS.values())
    chosen_names = [name.strip() for name in names.split(",")]
    for name in chosen_names:
        if name not in ARMS:
            raise ConfigError(f"--arms: no arm {name!r}; there are {', '.join(ARMS)}")
    return [ARMS[name] for name in chosen_names]


def _count(text: str) -> int:
    """Return a number that is at least 1."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def main() -> None:
    """Read the options, play the arms, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", nargs="?", type=Path, default=CONFIG)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--arms", default="all", help=f"some of {', '.join(ARMS)}, by commas")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run, once it is warm")
    parser.add_argument("--envs", type=_count, default=64, help="environment slots in all")
    parser.add_argument("--workers", type=_count, default=4, help="rollout workers")
    parser.add_argument("--profile", default="osworld", help=f"one of {', '.join(PROFILES)}")
    parser.add_argument("--faults", choices=("none", "injected", "both"), default="none")
    parser.add_argument("--repeats", type=_count, default=1, help="of each arm, for medians")
    parser.add_argument("--out", type=Path, help="keep the JSON in this file")
    parser.add_argument("--pictures", type=Path, help="draw a timeline of each arm in this folder")
    options = parser.parse_args()
    try:
        run_efficiency(
            Options(
                config_path=options.config,
                overrides=tuple(options.sets),
                arms=tuple(pick(options.arms)),
                seconds=options.seconds,
                envs=options.envs,
                workers=options.workers,
                profile=options.profile,
                faults=options.faults,
                repeats=options.repeats,
                out=options.out,
                pictures=options.pictures,
            )
        )
    except DartError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
