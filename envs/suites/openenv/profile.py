"""A profile: a description in TOML of an environment's observations, actions and rewards.

    read_profile    reads and checks a profile, by the name of a shipped one or by its path
    Profile         the contents of a profile
    at              returns the value at a path such as `info.screen`
    Templates       turns dart's actions into the environment's payloads: payloads_of(action, size)
    read_templates  reads the tables [actions] and [keys] of a profile

A template is any TOML value; no part of it is executed. In a template:

    "$x"                                        stands for the value of that name, with its type
    { "$call" = ["mouse_click", "$x", "$y"] }   stands for a call as text, `mouse_click(3, 4)`, with Python
                                                literals
    { "$calls" = [[...], [...]] }               stands for several calls, one in each line
    "$$..."                                     is a text that begins with "$"; any other text stands for
                                                itself
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bus.error_texts import did_you_mean
from bus.errors import TaskError
from envs.contract.actions import Action, Drag, KeyDown, KeyPress, KeyUp, Scroll, Wait, within
from envs.contract.base import Task
from envs.contract.options import first_problem
from envs.tools.inputs import canonical
from envs.tools.textfiles import read_text

_Path = Annotated[str, Field(pattern=r"^[^.]+(\.[^.]+)*$")]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
_Steps = Annotated[int, Field(ge=1, le=10_000)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ObservationTable(_Table):
    """The paths of the parts of an observation."""

    screenshot: _Path
    encoding: Literal["list", "base64", "data_url"]
    """A nested list of numbers [height, width, 3], or an encoded image as text."""
    shape: _Path | None = None
    """For a flat list, the path of its [height, width, 3]."""
    instruction: _Path | None = None
    """The path of the instruction. If there is none, the task's instruction is used."""
    failed: _Path | None = None
    """The path of a value that is true, or a text, if the last action failed."""
    error: _Path | None = None
    """The path of a text with the reason why an observation has no screenshot."""
    no_screenshot: str = ""
    """Advice to the user for an observation without a screenshot."""


class RewardTable(_Table):
    """How the rewards of an episode become a verdict."""

    of: Literal["last", "sum", "max"] = "last"
    low: float = 0.0
    high: float = 1.0
    """Rewards from `low` to `high` are scaled to [0, 1]."""
    clip: bool = False
    """Whether a reward outside [low, high] is clipped; otherwise it makes the episode invalid."""
    pass_from: float | None = None
    """The server's reward from which an episode passes; None: it passes if the scaled reward is 1."""


class ResetTable(_Table):
    """The arguments of a reset."""

    seed: str = "seed"
    """The argument that gets the seed; empty if there is none."""
    arguments: dict[str, Any] = {}
    """Arguments of the resets of all tasks."""


class RefusedTable(_Table):
    """Actions that fail only if the server does not support them."""

    actions: list[str]
    cure: str


class TaskTable(_Table):
    """A task."""

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
    """The contents of a profile. Raises TaskError if they contradict each other."""

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
        for entry in file.tasks:
            task = Task(
                f"{file.name}/{entry.id}",
                suite,
                entry.instruction,
                max_steps=entry.max_steps or file.max_steps,
                split="heldout" if entry.heldout else "train",
                params=entry.reset,
            )
            if task.id in self.tasks:
                raise TaskError(f"tasks: {entry.id} is there twice")
            self.tasks[task.id] = (task, {**file.reset.arguments, **entry.reset})


def shipped_profiles() -> list[str]:
    """Return the names of the profiles that ship with dart."""
    folder = files("envs.suites.openenv").joinpath("profiles")
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir())


def read_profile(name: str, suite: str) -> Profile:
    """Return the shipped profile or the profile file `name`. Raises TaskError that names the place."""
    try:
        text = _text_of(name)
        return Profile(_Profile.model_validate(tomllib.loads(text)), suite)
    except ValidationError as error:
        raise TaskError(f"profile {name}: {first_problem(error)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"profile {name}: no TOML: {error}") from None
    except TaskError as error:
        raise TaskError(f"profile {name}: {error}") from None


def at(value: object, path: str | None) -> object:
    """Return the value at a path; None if there is no value or no path."""
    for part in path.split(".") if path else ():
        value = value.get(part) if isinstance(value, dict) else None
    return value if path else None


def _text_of(name: str) -> str:
    names = shipped_profiles()
    if name in names:
        return files("envs.suites.openenv").joinpath("profiles", f"{name}.toml").read_text("utf-8")
    file = Path(name).expanduser()
    if not name.endswith(".toml"):
        raise TaskError(
            f"there is none of this name{did_you_mean(name, names)}; shipped are {', '.join(names)}, "
            "your own is path/to/profile.toml"
        )
    try:
        return read_text(file)
    except OSError as error:
        raise TaskError(f"the file cannot be read: {error.strerror}") from None


_POINT = ("x", "y", "fx", "fy")
VALUES: dict[str, tuple[str, ...]] = {
    "click": (*_POINT, "button", "modifiers"),
    "double_click": (*_POINT, "modifiers"),
    "triple_click": (*_POINT, "modifiers"),
    "move": _POINT,
    "drag": ("x0", "y0", "x1", "y1", "fx0", "fy0", "fx1", "fy1", "path", "button", "modifiers"),
    "mouse_down": (*_POINT, "button"),
    "mouse_up": (*_POINT, "button"),
    "scroll": (*_POINT, "dx", "dy", "dx_px", "dy_px", "direction", "amount"),
    "type": ("text",),
    "keypress": ("keys", "combination"),
    "key_down": ("key",),
    "key_up": ("key",),
    "goto": ("url",),
    "wait": ("seconds", "ms"),
    "done": (),
    "fail": (),
    "answer": ("text",),
}
"""Action -> the values that its templates may name; docs/environments/openenv.md explains each value."""


_BUTTONS = ("left", "right", "middle")

Template = Any


@dataclass(frozen=True)
class Templates:
    """The template of each kind of action. A kind without a template does nothing."""

    by_kind: Mapping[str, Template]  # by kind, or by kind:button
    keys: Mapping[str, str]  # dart's name of a key -> the environment's
    join: str  # between the keys of a combination
    notch_px: int  # pixels of a notch of the wheel

    def payloads_of(self, action: Action, size: tuple[int, int]) -> list[Any]:
        """Return the payloads that perform `action` on a screen of `size`; [] if it does nothing.

        A template that does not name `$button` is only for the left button, and one that does not name
        `$modifiers` only for clicks without them. A template that names a point does nothing for an action
        without one.
        """
        button = getattr(action, "button", "left")
        template = self.by_kind.get(f"{action.kind}:{button}")
        if template is None:
            template = self.by_kind.get(action.kind)
            if button != "left" and "button" not in set(_value_names(template)):
                return []
        names, values = set(_value_names(template)), self._values(action, size)
        if template is None or any(values[name] is None for name in names):
            return []
        if getattr(action, "modifiers", ()) and "modifiers" not in names:
            return []
        filled = _fill(template, values)
        return filled if isinstance(template, list) else [filled]

    def _values(self, action: Action, size: tuple[int, int]) -> dict[str, Any]:
        """Return the values that templates may name for an action; a value is None if the action lacks it."""
        action = within(action, size)
        values = action.model_dump(mode="json")
        values.setdefault("modifiers", [])
        match action:
            case Drag(path=path):
                values |= _point(*path[0], size, "0") | _point(*path[-1], size, "1")
            case Scroll(dx=dx, dy=dy):
                values |= {
                    "dx": dx,
                    "dy": dy,
                    "dx_px": dx * self.notch_px,
                    "dy_px": dy * self.notch_px,
                }
                across = abs(dx) > abs(dy)
                is_positive = (dx if across else dy) > 0
                values["direction"] = (("left", "right") if across else ("up", "down"))[is_positive]
                values["amount"] = max(abs(dx), abs(dy))
            case KeyPress(keys=keys):
                values["keys"] = [self._key(key) for key in keys]
                values["combination"] = self.join.join(values["keys"])
            case Wait(seconds=seconds):
                values["ms"] = round(seconds * 1000)
            case KeyDown(key=key) | KeyUp(key=key):
                values["key"] = self._key(key)
            case _:
                values["modifiers"] = [self._key(key) for key in values["modifiers"]]
        if action.kind != "drag" and "x" in VALUES[action.kind]:
            x, y = values.get("x"), values.get("y")
            point_values = (
                _point(x, y, size, "") if isinstance(x, int) and isinstance(y, int) else None
            )
            values |= point_values or dict.fromkeys(_POINT)
        return values

    def _key(self, key: str) -> str:
        return self.keys.get(canonical(key), key)


def read_templates(
    actions: Mapping[str, Template], keys: Mapping[str, str], join: str, notch_px: int
) -> Templates:
    """Return the templates of a profile's tables [actions] and [keys].

    Raises TaskError that names the template.
    """
    for name, template in actions.items():
        kind, colon, button = name.partition(":")
        if kind not in VALUES:
            raise TaskError(f"actions.{name}: no action {kind!r}{did_you_mean(kind, VALUES)}")
        if colon and ("button" not in VALUES[kind] or button not in _BUTTONS):
            raise TaskError(f"actions.{name}: a button is {', '.join(_BUTTONS)}")
        for value in _value_names(template, f"actions.{name}"):
            if value not in VALUES[kind]:
                values = ", ".join(f"${value_name}" for value_name in VALUES[kind]) or "none"
                raise TaskError(f"actions.{name}: {kind} has no ${value}; its values are {values}")
    return Templates(actions, keys, join, notch_px)


def _value_names(template: Template, where: str = "") -> Iterator[str]:
    """Yield the names of values in a template. If `where` is set, check its calls; errors name `where`."""
    if isinstance(template, dict):
        if where:
            _check_calls(template, where)
        for value in template.values():
            yield from _value_names(value, where)
    elif isinstance(template, list):
        for value in template:
            yield from _value_names(value, where)
    elif isinstance(template, str) and template.startswith("$") and not template.startswith("$$"):
        yield template[1:]


def _check_calls(table: Mapping[str, Template], where: str) -> None:
    """Raise TaskError if a `$call` or `$calls` is malformed, or has something beside it."""
    for key, value in table.items():
        if not key.startswith("$"):
            continue
        if key not in ("$call", "$calls") or len(table) > 1:
            raise TaskError(f'{where}: a table with "$call" or "$calls" has nothing beside it')
        for call in [value] if key == "$call" else value:
            name = call[0] if isinstance(call, list) and call else None
            if not isinstance(name, str) or not name.isidentifier():
                raise TaskError(f'{where}: {key} is a list such as ["mouse_click", "$x", "$y"]')


def _fill(template: Template, values: Mapping[str, Any]) -> Any:
    """Return the payload that a template stands for."""
    match template:
        case {"$call": call}:
            return _call(call, values)
        case {"$calls": calls}:
            return "\n".join(_call(call, values) for call in calls)
        case dict():
            return {key: _fill(value, values) for key, value in template.items()}
        case list():
            return [_fill(value, values) for value in template]
        case str() if template.startswith("$$"):
            return template[1:]
        case str() if template.startswith("$"):
            return values[template[1:]]
        case _:
            return template


def _call(call: list[Any], values: Mapping[str, Any]) -> str:
    """Return a call as text, `name(literal, ...)`. A text argument is quoted, whatever it contains."""
    return f"{call[0]}({', '.join(repr(_fill(argument, values)) for argument in call[1:])})"


def _point(x: int, y: int, size: tuple[int, int], suffix: str) -> dict[str, Any]:
    """Return a point on the screen, in pixels and as fractions of it."""
    names = (f"{name}{suffix}" for name in _POINT)
    return dict(zip(names, (x, y, (x + 0.5) / size[0], (y + 0.5) / size[1]), strict=True))
