"""Typed GUI actions, in pixels of the screenshot they answer.

One canonical set; emitters and parsers per model family are in dart_cli/policy.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from bus.errors import ActionError

MouseButton = Literal["left", "right", "middle"]


class _Action(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Click(_Action):
    """Press and release a mouse button at (x, y)."""

    kind: Literal["click"] = "click"
    x: int
    y: int
    button: MouseButton = "left"


class DoubleClick(_Action):
    """Two left clicks at (x, y) in quick succession."""

    kind: Literal["double_click"] = "double_click"
    x: int
    y: int


class Move(_Action):
    """Move the pointer to (x, y): a hover."""

    kind: Literal["move"] = "move"
    x: int
    y: int


class Drag(_Action):
    """Press the left button at the first point, follow the path, release at the last."""

    kind: Literal["drag"] = "drag"
    path: list[tuple[int, int]] = Field(min_length=2)


class Scroll(_Action):
    """Turn the wheel at (x, y): `dy` notches down (negative: up), `dx` notches right."""

    kind: Literal["scroll"] = "scroll"
    x: int
    y: int
    dx: int = 0
    dy: int = 0


class Type(_Action):
    """Type text into the widget that has the keyboard focus; a newline is Enter."""

    kind: Literal["type"] = "type"
    text: str


class KeyPress(_Action):
    """Press keys together, modifiers first: ["ctrl", "a"], ["enter"]. Names are lower case."""

    kind: Literal["keypress"] = "keypress"
    keys: list[str] = Field(min_length=1)


class Wait(_Action):
    """Do nothing for a moment."""

    kind: Literal["wait"] = "wait"
    seconds: float = Field(default=1.0, ge=0, le=60)


class Done(_Action):
    """The policy says the task is finished."""

    kind: Literal["done"] = "done"


class Fail(_Action):
    """The policy says the task cannot be done."""

    kind: Literal["fail"] = "fail"


class Answer(_Action):
    """The policy answers a question and is finished."""

    kind: Literal["answer"] = "answer"
    text: str


Action = Annotated[
    Click | DoubleClick | Move | Drag | Scroll | Type | KeyPress | Wait | Done | Fail | Answer,
    Field(discriminator="kind"),
]

_ADAPTER: TypeAdapter[Action] = TypeAdapter(Action)


def action_to_dict(action: Action) -> dict[str, Any]:
    """The action as plain JSON values, for the wire and the store."""
    return _ADAPTER.dump_python(action, mode="json")  # type: ignore[no-any-return]


def action_from_dict(value: dict[str, Any]) -> Action:
    """The action a dict describes. Raises ActionError naming the field that is wrong."""
    try:
        return _ADAPTER.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "action"
        raise ActionError(f"{where}: {first['msg']}") from None
