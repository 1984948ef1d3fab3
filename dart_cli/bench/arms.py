"""The arms: runs that differ only in how they are scheduled and synchronised."""

from __future__ import annotations

from dataclasses import dataclass

from bus.errors import ConfigError


@dataclass(frozen=True)
class Arm:
    """One way to run; `overrides` are `--set` arguments."""

    name: str
    title: str
    overrides: tuple[str, ...]


def _arm(name: str, title: str, scheduling: str, *more: str) -> Arm:
    return Arm(name, title, (f"data.scheduling={scheduling}", *more))


_COUPLED = "data.coupled=true"

ARMS = {
    arm.name: arm
    for arm in (
        _arm("coupled-batch", "coupled, batch-wise", "batch", _COUPLED),
        _arm("coupled-task", "coupled, task-wise", "task", _COUPLED),
        _arm("oversample", "over-sample, discard", "april", _COUPLED, "data.recycle=false"),
        _arm("april", "APRIL", "april", _COUPLED),
        _arm("all-at-once", "decoupled, all sync at once", "rollout", "sync.concurrent=0"),
        _arm("rolling", "decoupled, rolling sync", "rollout", "sync.concurrent=1"),
    )
}
"""By name, in their order of presentation."""

BASELINE, OURS = "coupled-batch", "rolling"


def pick(names: str) -> list[Arm]:
    """The arms named in a comma-separated list, `all` for all. Raises ConfigError."""
    if names == "all":
        return list(ARMS.values())
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in ARMS:
            raise ConfigError(f"--arms: no arm {name!r}; there are {', '.join(ARMS)}")
    return [ARMS[name] for name in wanted]
