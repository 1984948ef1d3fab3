"""Our actions as an environment's payloads: templates of typed values, nothing of which is evaluated.

A template is any TOML value. In it "$x" stands for the value of that name, with its type, and
`{ "$call" = ["mouse_click", "$x", "$y"] }` for a call written as text, `mouse_click(3, 4)`, whose arguments are
Python literals; "$calls" for several, a line each. Any other text is itself; "$$" begins a text with "$".

    Templates       those of a profile; payloads_of(action, size)
    read_templates  the table [actions] of a profile
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bus.errors import TaskError
from envs.actions import Action, Drag, KeyDown, KeyPress, KeyUp, Scroll, Wait, within
from envs.inputs import canonical
from envs.own_code import did_you_mean

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
"""Action -> the values that its templates may name; docs/environments/openenv.md says what each is."""


_BUTTONS = ("left", "right", "middle")

Template = Any


@dataclass(frozen=True)
class Templates:
    """What performs each kind of action; one that is left out does nothing there."""

    by_kind: Mapping[str, Template]  # kind, or kind:button
    keys: Mapping[str, str]  # our name of a key -> the environment's
    join: str  # between the keys of a combination
    notch_px: int  # of a wheel

    def payloads_of(self, action: Action, size: tuple[int, int]) -> list[Any]:
        """The payloads that perform `action` on a screen of `size`; none where it does nothing.

        A template that names no button is for the left one, and one that names no modifiers for none; one that
        names a place does nothing for an action without one.
        """
        button = getattr(action, "button", "left")
        template = self.by_kind.get(f"{action.kind}:{button}")
        if template is None:
            template = self.by_kind.get(action.kind)
            if button != "left" and "button" not in set(_named(template)):
                return []
        named, values = set(_named(template)), self._values(action, size)
        if template is None or any(values[name] is None for name in named):
            return []
        if getattr(action, "modifiers", ()) and "modifiers" not in named:
            return []
        filled = _filled(template, values)
        return filled if isinstance(template, list) else [filled]

    def _values(self, action: Action, size: tuple[int, int]) -> dict[str, Any]:
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
                ahead = (dx if across else dy) > 0
                values["direction"] = (("left", "right") if across else ("up", "down"))[ahead]
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
            placed = _point(x, y, size, "") if isinstance(x, int) and isinstance(y, int) else None
            values |= placed or dict.fromkeys(_POINT)
        return values

    def _key(self, key: str) -> str:
        return self.keys.get(canonical(key), key)


def read_templates(
    actions: Mapping[str, Template], keys: Mapping[str, str], join: str, notch_px: int
) -> Templates:
    """The tables [actions] and [keys] of a profile. Raises TaskError that names the template."""
    for name, template in actions.items():
        kind, colon, button = name.partition(":")
        if kind not in VALUES:
            raise TaskError(f"actions.{name}: no action {kind!r}{did_you_mean(kind, VALUES)}")
        if colon and ("button" not in VALUES[kind] or button not in _BUTTONS):
            raise TaskError(f"actions.{name}: a button is {', '.join(_BUTTONS)}")
        for value in _named(template, f"actions.{name}"):
            if value not in VALUES[kind]:
                known = ", ".join(f"${each}" for each in VALUES[kind]) or "none"
                raise TaskError(f"actions.{name}: {kind} has no ${value}; its values are {known}")
    return Templates(actions, keys, join, notch_px)


def _named(template: Template, where: str = "") -> Iterator[str]:
    """The values that a template names; checks its calls where `where` is given."""
    if isinstance(template, dict):
        if where:
            _check_calls(template, where)
        for value in template.values():
            yield from _named(value, where)
    elif isinstance(template, list):
        for value in template:
            yield from _named(value, where)
    elif isinstance(template, str) and template.startswith("$") and not template.startswith("$$"):
        yield template[1:]


def _check_calls(table: Mapping[str, Template], where: str) -> None:
    for key, value in table.items():
        if not key.startswith("$"):
            continue
        if key not in ("$call", "$calls") or len(table) > 1:
            raise TaskError(f'{where}: a table with "$call" or "$calls" has nothing beside it')
        for call in [value] if key == "$call" else value:
            name = call[0] if isinstance(call, list) and call else None
            if not isinstance(name, str) or not name.isidentifier():
                raise TaskError(f'{where}: {key} is a list such as ["mouse_click", "$x", "$y"]')


def _filled(template: Template, values: Mapping[str, Any]) -> Any:
    match template:
        case {"$call": call}:
            return _call(call, values)
        case {"$calls": calls}:
            return "\n".join(_call(call, values) for call in calls)
        case dict():
            return {key: _filled(value, values) for key, value in template.items()}
        case list():
            return [_filled(value, values) for value in template]
        case str() if template.startswith("$$"):
            return template[1:]
        case str() if template.startswith("$"):
            return values[template[1:]]
        case _:
            return template


def _call(call: list[Any], values: Mapping[str, Any]) -> str:
    """`name(literal, ...)`: a text stays one, whatever is in it."""
    return f"{call[0]}({', '.join(repr(_filled(each, values)) for each in call[1:])})"


def _point(x: int, y: int, size: tuple[int, int], suffix: str) -> dict[str, Any]:
    """A point on the screen, in pixels and as fractions of it."""
    names = (f"{name}{suffix}" for name in _POINT)
    return dict(zip(names, (x, y, (x + 0.5) / size[0], (y + 0.5) / size[1]), strict=True))
