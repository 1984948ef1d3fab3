"""A profile: what an environment's observations, actions and rewards are, in TOML.

read_profile  a shipped profile by its name, or a file; everything in it is checked
Profile       what it says
at            the value at a path such as `info.screen`
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bus.errors import TaskError
from envs.base import Task
from envs.openenv.templates import Templates, read_templates
from envs.own_code import did_you_mean

_Path = Annotated[str, Field(pattern=r"^[^.]+(\.[^.]+)*$")]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
_Steps = Annotated[int, Field(ge=1, le=10_000)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ObservationTable(_Table):
    """Where things are in the observation."""

    screenshot: _Path
    encoding: Literal["list", "base64", "data_url"]
    """A nested list of numbers [height, width, 3], or an encoded image as text."""
    shape: _Path | None = None
    """Of a flat list: where its [height, width, 3] is."""
    instruction: _Path | None = None
    """None, or nothing there: the task's own."""
    failed: _Path | None = None
    """What is true, or a text, where the last action failed."""
    error: _Path | None = None
    """A text that says why an observation has no screenshot."""
    no_screenshot: str = ""
    """What to do where there is none."""


class RewardTable(_Table):
    """How the rewards of an episode become a verdict."""

    of: Literal["last", "sum", "max"] = "last"
    low: float = 0.0
    high: float = 1.0
    """These become 0 and 1, what is outside them too."""
    clip: bool = False
    """False: a reward outside [low, high] makes the episode invalid."""
    pass_from: float | None = None
    """The reward, as the server gives it, from which an episode passes; None: where the reward within [0, 1] is 1."""


class ResetTable(_Table):
    """What a reset is asked for."""

    seed: str = "seed"
    """The argument that gets the seed; empty: none."""
    arguments: dict[str, Any] = {}
    """Those of every task."""


class RefusedTable(_Table):
    """Actions that the environment takes unless its server does not know them at all."""

    actions: list[str]
    cure: str


class TaskTable(_Table):
    """One task."""

    id: _Name
    instruction: str = ""
    reset: dict[str, Any] = {}
    max_steps: _Steps | None = None
    heldout: bool = False


class _Profile(_Table):
    name: _Name
    max_steps: _Steps = 15
    observation: ObservationTable
    reset: ResetTable = ResetTable()
    reward: RewardTable = RewardTable()
    refused: RefusedTable | None = None
    actions: dict[str, Any]
    keys: dict[str, str] = {}
    join: str = "+"
    notch_px: int = 100
    tasks: list[TaskTable] = Field(min_length=1)


class Profile:
    """What a profile says."""

    def __init__(self, file: _Profile, suite: str) -> None:
        self.name = file.name
        self.observation = file.observation
        self.reset = file.reset
        self.reward = file.reward
        self.refused = file.refused
        self.templates: Templates = read_templates(
            file.actions, file.keys, file.join, file.notch_px
        )
        if not file.reward.low < file.reward.high:
            raise TaskError("reward.low must be below reward.high")
        self.tasks: dict[str, tuple[Task, Mapping[str, Any]]] = {}
        for each in file.tasks:
            task = Task(
                f"{file.name}/{each.id}",
                suite,
                each.instruction,
                max_steps=each.max_steps or file.max_steps,
                split="heldout" if each.heldout else "train",
                params=each.reset,
            )
            if task.id in self.tasks:
                raise TaskError(f"tasks: {each.id} is there twice")
            self.tasks[task.id] = (task, {**file.reset.arguments, **each.reset})


def shipped_profiles() -> list[str]:
    """The names of the profiles that ship."""
    folder = files("envs.openenv").joinpath("profiles")
    return sorted(each.name.removesuffix(".toml") for each in folder.iterdir())


def read_profile(named: str, suite: str) -> Profile:
    """A shipped profile, or that of a file. Raises TaskError that names the place."""
    try:
        text = _text_of(named)
        return Profile(_Profile.model_validate(tomllib.loads(text)), suite)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise TaskError(f"profile {named}: {where}: {first['msg']}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"profile {named}: no TOML: {error}") from None
    except TaskError as error:
        raise TaskError(f"profile {named}: {error}") from None


def at(value: object, path: str | None) -> object:
    """What stands at a path; None where there is nothing, or no path."""
    for part in path.split(".") if path else ():
        value = value.get(part) if isinstance(value, dict) else None
    return value if path else None


def _text_of(named: str) -> str:
    shipped = shipped_profiles()
    if named in shipped:
        return files("envs.openenv").joinpath("profiles", f"{named}.toml").read_text("utf-8")
    file = Path(named).expanduser()
    if not named.endswith(".toml"):
        raise TaskError(
            f"there is none of this name{did_you_mean(named, shipped)}; shipped are {', '.join(shipped)}, "
            "your own is path/to/profile.toml"
        )
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskError(f"the file cannot be read: {error.strerror}") from None
