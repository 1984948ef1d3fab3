"""The arms of the curation study: the settings with which each of its runs trains.

    Arm         a base, the parts added to it, and rate, schedule and budget where they differ from the base's
    BASES       what a name begins with: plain GRPO, group size 1
    PARTS       what may be added
    ARMS        the arms of the first study of curation, under their short names
    pick_arms   a comma-separated list, or a group of arms -> arms

An arm's name contains all settings: `single+replay`, `grpo+frontier@6016`, `grpo~2.5e-4~linear`. `+` adds a
part, `~` sets the learning rate or the schedule, `@` the trajectories that are played. What a name
leaves out is as the base was tuned (TUNED): all arms on the same grid of RATES and SCHEDULES.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from bus.errors import ConfigError

FILE, GRPO, SINGLE = "file", "grpo", "single"

_COMMON = ("train.updates=1000000", "train.max_minutes=0", "data.max_open_groups=0")
"""The run ends with its trajectories and nothing else, and staleness alone bounds the groups in play."""

BASES: dict[str, tuple[str, ...]] = {
    FILE: (),  # the configuration as it is written
    GRPO: (  # plain GRPO, tuned as hard as the arms: the baseline
        *_COMMON,
        "data.groups_per_batch=2",
        "data.task_sampling=uniform",
        "data.early_stop=false",
    ),
    SINGLE: (  # single stream: groups of one, held against baselines of each task's steps
        *_COMMON,
        "data.group_size=1",
        "data.groups_per_batch=32",
        "data.advantage=step_baseline",
        "data.task_sampling=deviation",
        "data.early_stop=false",
    ),
}
"""What an arm's name begins with -> its `--set`."""

PARTS: dict[str, tuple[str, ...]] = {
    "frontier": ("data.task_sampling=frontier",),
    "number": ("data.dynamic_number=true",),
    "length": ("data.dynamic_length=true",),
    "entropy": ("data.high_entropy=0.8",),
    "pool": ("data.pool_ratio=0.125", "data.pool=[{pool}]"),
    "online": ("data.pool_ratio=0.125",),  # a pool of the run's own successes alone
    "early-stop": ("data.early_stop=true",),  # half a group first, more unless all passed
    "replay": ("train.reuse=1",),
    "batch-8": ("data.groups_per_batch=8",),
    "batch-16": ("data.groups_per_batch=16",),
    "fresh": ("data.max_staleness=1",),
    "uniform": ("data.task_sampling=uniform",),
    "margin": ("data.baseline_margin=0.1",),  # less is expected than the baselines say
    "critic": ("train.critic=gae",),
    "task-baseline": ("data.advantage=task_baseline",),
}
"""Part -> the `--set` that turn it on; `{pool}` is the folder of oracle trajectories."""

OLD_PARTS = ("frontier", "number", "length", "entropy", "pool")
"""Those that the first study of curation played alone, left out, and all together."""

NEW_PARTS = ("replay", "frontier")
"""Those that are added to plain GRPO one at a time."""

RATES = ("1e-4", "1.5e-4", "2e-4", "2.5e-4", "4e-4")
SCHEDULES: dict[str, tuple[str, ...]] = {
    "flat": ("train.lr_end=1.0",),
    "linear": ("train.lr_end=0.2",),
    "zero": ("train.lr_end=0.01",),
}
"""Schedule -> its `--set`; a rate falls to its end with the last trajectory of the budget."""

TUNED: dict[str, tuple[str, str]] = {
    GRPO: ("2.5e-4", "linear"),
    SINGLE: ("2.5e-4", "linear"),
    f"{SINGLE}+replay": ("2e-4", "zero"),
}
"""Base, with `+replay` if it has that part -> the rate and the schedule chosen with seeds 0 to 3."""

BUDGET = 6_016
"""Trajectories that the baseline, and the arms of the first study, play."""
HALF = BUDGET // 2
"""Trajectories that any other arm plays."""

_NAME = re.compile(
    r"(?P<parts>[a-z0-9-]+(\+[a-z0-9-]+)*)(~(?P<rate>[0-9][0-9.e-]*))?"
    r"(~(?P<schedule>[a-z]+))?(@(?P<budget>[0-9]+))?"
)


@dataclass(frozen=True)
class Arm:
    """One way to train, as settings of a run."""

    base: str
    parts: tuple[str, ...] = ()
    rate: str = ""  # empty: as tuned
    schedule: str = ""  # likewise
    budget: int = 0  # trajectories to play; 0: its own

    @property
    def kind(self) -> str:
        """The base and parts of the arm."""
        return "+".join((self.base, *self.parts))

    @property
    def name(self) -> str:
        """The name of the arm, in file names and on the command line."""
        rate, schedule = (f"~{each}" if each else "" for each in (self.rate, self.schedule))
        return f"{self.kind}{rate}{schedule}{f'@{self.budget}' if self.budget else ''}"

    @property
    def trajectories(self) -> int:
        """The number of trajectories that the arm plays."""
        is_long = self.base == FILE or (self.base == GRPO and not self.parts)
        return self.budget or (BUDGET if is_long else HALF)

    @property
    def tuned(self) -> tuple[str, str]:
        """The rate and the schedule of this kind of arm; empty where they are as in the file."""
        kind = f"{self.base}+replay" if "replay" in self.parts else self.base
        return TUNED.get(kind, TUNED.get(self.base, ("", "")))

    def sets(self, pool: Path) -> list[str]:
        """Return the arm's `--set` values, with the oracle's trajectories in `pool`; they end the run at its budget."""
        rate, schedule = self.rate or self.tuned[0], self.schedule or self.tuned[1]
        overrides = [f"train.max_trajectories={self.trajectories}", *BASES[self.base]]
        overrides += [setting for part in self.parts for setting in PARTS[part]]
        overrides += [f"train.lr={rate}"] if rate else []
        overrides += SCHEDULES[schedule] if schedule else ()
        return [override.replace("{pool}", json.dumps(str(pool))) for override in overrides]

    @property
    def needs_pool(self) -> bool:
        """Whether the arm draws from the oracle's trajectories."""
        return "pool" in self.parts


def _older() -> dict[str, Arm]:
    every = OLD_PARTS
    left_out = {
        f"no-{part}": Arm(FILE, tuple(each for each in every if each != part)) for part in every
    }
    alone = {part: Arm(FILE, (part,)) for part in every}
    return {"uniform": Arm(FILE), "all": Arm(FILE, every), **alone, **left_out}


ARMS: dict[str, Arm] = {
    **_older(),
    "uniform-fast": Arm(FILE, rate="2.5e-4"),
    "online": Arm(FILE, ("online",)),
    "early-stop": Arm(FILE, ("early-stop",)),
}
"""Short name -> arm of the first study of curation (configs/curation.toml)."""

RUNNING_BASELINE = Arm(SINGLE, ("replay", "margin"))
"""Ours without its critic."""
BASELINE, OURS = Arm(GRPO), replace(RUNNING_BASELINE, parts=(*RUNNING_BASELINE.parts, "critic"))

GROUPS: dict[str, tuple[Arm, ...]] = {
    "main": (BASELINE, OURS),
    "alone": (
        replace(BASELINE, budget=HALF),
        Arm(SINGLE),
        *(Arm(GRPO, (part,)) for part in NEW_PARTS),
    ),
    "left-out": (
        RUNNING_BASELINE,
        Arm(SINGLE, ("margin",)),
        Arm(SINGLE, ("replay",)),
        Arm(GRPO, ("replay",), "1.5e-4"),
        *(replace(OURS, parts=(*OURS.parts, part)) for part in ("task-baseline", "uniform")),
        replace(OURS, schedule="flat"),
    ),
    "added": tuple(replace(OURS, parts=(*OURS.parts, part)) for part in ("batch-16", "fresh")),
    "older": tuple(_older().values()),
}
"""Several arms under one name."""


def arm_of(name: str) -> Arm:
    """Return the arm of a name. Raises ConfigError."""
    if name in ARMS:
        return ARMS[name]
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"--arms: {name!r} is not BASE[+PART...][~RATE][~SCHEDULE][@BUDGET]")
    base, *parts = match["parts"].split("+")
    _check_name(name, base, {**BASES, **ARMS}, "base")
    for part in parts:
        _check_name(name, part, PARTS, "part")
    if match["schedule"]:
        _check_name(name, match["schedule"], SCHEDULES, "schedule")
    arm = ARMS.get(base, Arm(base))
    return replace(
        arm,
        parts=(*arm.parts, *parts),
        rate=match["rate"] or arm.rate,
        schedule=match["schedule"] or arm.schedule,
        budget=int(match["budget"] or arm.budget),
    )


def _check_name(name: str, word: str, there_are: Iterable[str], kind: str) -> None:
    if word not in there_are:
        raise ConfigError(f"--arms: no {kind} {word!r} ({name}); there are {', '.join(there_are)}")


def pick_arms(names: str, *, tune: bool = False) -> list[Arm]:
    """Return the arms of a comma-separated list of arms and GROUPS, each once. Raises ConfigError.

    With `tune` each stands for one arm at every rate and schedule of the grid.
    """
    arms: list[Arm] = []
    for name in (text.strip() for text in names.split(",")):
        arms += GROUPS.get(name) or (arm_of(name),)
    if tune:
        arms = [
            replace(arm, rate=rate, schedule=schedule)
            for arm in arms
            for rate in RATES
            for schedule in SCHEDULES
        ]
    return list(dict.fromkeys(arms))
