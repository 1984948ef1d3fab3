"""Typed GUI actions, in pixels of the screenshot that they answer.

There is one set for all models; the parsers of model families are in dart_cli/language/parsers. `modifiers`
are keys that are held while the pointer acts. MouseDown and KeyDown hold a button or key for the actions
that follow, until it is released or the episode ends. `python -m dart_cli.cli.reference` writes the table
of the classes in docs/environments/index.md (with_table).
"""

from __future__ import annotations

import inspect
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from bus.errors import ActionError

MouseButton = Literal["left", "right", "middle"]
Modifier = Literal["ctrl", "shift", "alt", "meta"]

_X = Annotated[int, Field(description="pixels from the left")]
_Y = Annotated[int, Field(description="pixels from the top")]
_Modifiers = Annotated[tuple[Modifier, ...], Field(description="held while the pointer acts")]
_Key = Annotated[str, Field(min_length=1, description="a name as in `KeyPress`")]


class _Action(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_serializer(mode="wrap")
    def _without_empty(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave empty fields out: an action without modifiers or place is stored without those fields."""
        return {name: value for name, value in dump(self).items() if value not in (None, (), [])}


class Click(_Action):
    """Press and release a mouse button at (x, y).

    Example: Click(x=84, y=60)
    """

    kind: Literal["click"] = "click"
    x: _X
    y: _Y
    button: MouseButton = "left"
    modifiers: _Modifiers = ()


class DoubleClick(_Action):
    """Click the left button twice at (x, y) in quick succession.

    Example: DoubleClick(x=84, y=60)
    """

    kind: Literal["double_click"] = "double_click"
    x: _X
    y: _Y
    modifiers: _Modifiers = ()


class TripleClick(_Action):
    """Click the left button three times at (x, y), which selects a line or a paragraph.

    Example: TripleClick(x=84, y=60)
    """

    kind: Literal["triple_click"] = "triple_click"
    x: _X
    y: _Y
    modifiers: _Modifiers = ()


class Move(_Action):
    """Move the pointer to (x, y): a hover, or a part of a drag while a button is down.

    Example: Move(x=84, y=60)
    """

    kind: Literal["move"] = "move"
    x: _X
    y: _Y


class Drag(_Action):
    """Press a button at the first point, follow the path, release at the last.

    Example: Drag(path=[(20, 60), (84, 60)])
    """

    kind: Literal["drag"] = "drag"
    path: list[tuple[int, int]] = Field(min_length=2, description="points (x, y), pixels")
    button: MouseButton = "left"
    modifiers: _Modifiers = ()


class _Button(_Action):
    x: int | None = Field(default=None, description="as in `Click`; default: the pointer's place")
    y: int | None = Field(default=None, description="required with `x`")
    button: MouseButton = "left"

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.x is None) != (self.y is None):
            raise ValueError("x and y are given both or not at all")
        return self


class MouseDown(_Button):
    """Press a mouse button and hold it.

    Example: MouseDown(x=84, y=60)
    """

    kind: Literal["mouse_down"] = "mouse_down"


class MouseUp(_Button):
    """Release a mouse button, if it is down.

    Example: MouseUp()
    """

    kind: Literal["mouse_up"] = "mouse_up"


class Scroll(_Action):
    """Turn the wheel at (x, y): `dy` notches down (negative: up), `dx` notches right.

    Example: Scroll(x=84, y=60, dy=3)
    """

    kind: Literal["scroll"] = "scroll"
    x: _X
    y: _Y
    dx: int = Field(default=0, description="notches to the right; negative: to the left")
    dy: int = Field(default=0, description="notches down; negative: up")


class Type(_Action):
    """Type text into the widget that has the keyboard focus; a newline is Enter.

    Example: Type(text="hello")
    """

    kind: Literal["type"] = "type"
    text: Annotated[str, Field(description="the text to type")]


class KeyPress(_Action):
    """Press keys together, modifiers first: ["ctrl", "a"], ["enter"]. Names are lower case.

    Example: KeyPress(keys=["ctrl", "a"])
    """

    kind: Literal["keypress"] = "keypress"
    keys: list[str] = Field(
        min_length=1,
        description='letters, signs, "enter", "tab", "escape", "pageup", "f5", ...; the held keys come first',
    )


class KeyDown(_Action):
    """Press one key and hold it while other actions follow. Its name is as in KeyPress.

    Example: KeyDown(key="shift")
    """

    kind: Literal["key_down"] = "key_down"
    key: _Key


class KeyUp(_Action):
    """Release one key, if it is down.

    Example: KeyUp(key="shift")
    """

    kind: Literal["key_up"] = "key_up"
    key: _Key


class Goto(_Action):
    """Open an address in the active tab of a browser whose frame is not on the screen.

    Example: Goto(url="http://localhost:8000/")
    """

    kind: Literal["goto"] = "goto"
    url: str = Field(min_length=1, description="an address such as http://localhost:8000/")


class Wait(_Action):
    """Do nothing for a moment.

    Example: Wait(seconds=0.5)
    """

    kind: Literal["wait"] = "wait"
    seconds: float = Field(default=1.0, ge=0, le=60, description="0 to 60")


class Done(_Action):
    """Declare the task finished.

    Example: Done()
    """

    kind: Literal["done"] = "done"


class Fail(_Action):
    """Declare that the task cannot be done.

    Example: Fail()
    """

    kind: Literal["fail"] = "fail"


class Answer(_Action):
    """Answer a question, and declare the task finished.

    Example: Answer(text="42")
    """

    kind: Literal["answer"] = "answer"
    text: Annotated[str, Field(description="the answer, for the evaluator")]


Action = Annotated[
    Click
    | DoubleClick
    | TripleClick
    | Move
    | Drag
    | MouseDown
    | MouseUp
    | Scroll
    | Type
    | KeyPress
    | KeyDown
    | KeyUp
    | Goto
    | Wait
    | Done
    | Fail
    | Answer,
    Field(discriminator="kind"),
]

_ADAPTER: TypeAdapter[Action] = TypeAdapter(Action)


def within(action: Action, size: tuple[int, int]) -> Action:
    """Return the action with points beyond a screen of `size` (width, height) moved onto it."""

    def clamped(x: int, y: int) -> tuple[int, int]:
        return min(max(x, 0), size[0] - 1), min(max(y, 0), size[1] - 1)

    if isinstance(action, Drag):
        return action.model_copy(update={"path": [clamped(*point) for point in action.path]})
    x, y = getattr(action, "x", None), getattr(action, "y", None)
    if x is None or y is None:
        return action
    return action.model_copy(update=dict(zip("xy", clamped(x, y), strict=True)))


def action_to_dict(action: Action) -> dict[str, Any]:
    """Return the action as plain JSON values, for the wire and the store."""
    return _ADAPTER.dump_python(action, mode="json")  # type: ignore[no-any-return]


def action_from_dict(value: dict[str, Any]) -> Action:
    """Return the action that a dict describes. Raises ActionError, which names the wrong field."""
    try:
        return _ADAPTER.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "action"
        raise ActionError(f"{where}: {first['msg']}") from None


BEGIN, END = "<!-- table actions -->\n", "<!-- end actions -->"
CLASSES: tuple[type[BaseModel], ...] = get_args(get_args(Action)[0])


def table() -> str:
    """Return the table of the actions in Markdown: one row for each class, in the order of the union."""
    lines = ["| class, `kind` | what it does | fields | example |", "|---|---|---|---|"]
    for action_class in CLASSES:
        summary, _, example = (inspect.getdoc(action_class) or "").partition("\n\nExample: ")
        fields = [
            _field(name, field)
            for name, field in action_class.model_fields.items()
            if name != "kind"
        ]
        kind = action_class.model_fields["kind"].default
        cells = (
            f"`{action_class.__name__}`, `{kind}`",
            " ".join(summary.split()),
            "<br>".join(fields) or "-",
        )
        lines.append(f"| {' | '.join(cells)} | `{example}` |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """Return the page with the present table. Raises ValueError if the page lacks the marks around it."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page needs the marks {BEGIN.strip()} and {END}")
    return f"{before}{BEGIN}{table()}\n{END}{after}"


def _field(name: str, field: FieldInfo) -> str:
    """Return the cell of a field: its name, type, default and description."""
    default = "" if field.is_required() else f" = {field.default!r}"
    description = f": {field.description}" if field.description else ""
    return f"`{name}` {_type(field.annotation)}{default.replace(chr(39), chr(34))}{description}"


def _type(annotation: Any) -> str:
    """Return a type in words, e.g. `list of str`."""
    inner = get_args(annotation)
    kind = get_origin(annotation)
    if kind is Literal:
        return ", ".join(f'"{value}"' for value in inner)
    if kind in (Union, UnionType):
        return " or ".join(map(_type, inner))
    if kind is list or (kind is tuple and inner[-1] is Ellipsis):
        return f"{kind.__name__} of {_type(inner[0])}"
    if kind is tuple:
        return f"({', '.join(map(_type, inner))})"
    return "None" if annotation is NoneType else str(annotation.__name__)
