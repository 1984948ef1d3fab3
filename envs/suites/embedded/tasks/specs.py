"""Controls described by data, so that forms, settings and wizards are lists of them.

A `Spec` describes a control. `build` makes its widgets, `other_value` draws a new value for it, `phrase`
puts that value into words, and `fix` returns the oracle's next action towards it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Literal

from envs.contract.actions import Action
from envs.suites.embedded.app import App
from envs.suites.embedded.controls import Button, CheckBox, Slider, Toggle, radios
from envs.suites.embedded.menus import Combo
from envs.suites.embedded.tasks.desk import choose, fill, reach, slide
from envs.suites.embedded.textfield import TextField
from envs.suites.embedded.widgets import Gap, Label, Sized, Widget, row

Kind = Literal["check", "toggle", "radio", "combo", "text", "secret", "slider", "stepper"]
Value = bool | int | str
LABEL_UNITS = 96.0  # design units of the column of labels


@dataclass(frozen=True)
class Spec:
    """The description of a control: its label, its kind and its values."""

    label: str
    kind: Kind
    options: tuple[str, ...] = ()  # choices, or texts to draw from
    low: int = 0
    high: int = 100
    step: int = 10


def random_value(spec: Spec, rng: Random) -> Value:
    """Return any value of the control."""
    if spec.kind in ("check", "toggle"):
        return rng.random() < 0.5
    if spec.kind in ("slider", "stepper"):
        return rng.randrange(spec.low, spec.high + 1, spec.step)
    return rng.choice(spec.options)


def other_value(spec: Spec, value: Value, rng: Random) -> Value:
    """Return any value but the present one."""
    if spec.kind == "stepper":
        assert isinstance(value, int)
        near = [v for v in range(value - 3, value + 4) if spec.low <= v <= spec.high and v != value]
        return rng.choice(near)
    while True:
        candidate = random_value(spec, rng)
        if candidate != value:
            return candidate


def phrase(spec: Spec, want: Value) -> str:
    """Return an instruction to set the control to `want`."""
    label = spec.label
    match spec.kind:
        case "check":
            return f"{'tick' if want else 'untick'} {label}"
        case "toggle":
            return f"turn {'on' if want else 'off'} {label}"
        case "radio":
            return f"choose {want} for {label}"
        case "text" | "secret":
            return f'enter "{want}" as {label}'
        case _:
            return f"set {label} to {want}"


def build(spec: Spec, value: Value, on_change: Callable[[Value], None]) -> Widget:
    """Return a line of a panel with the label and the control."""
    line = _line(spec, value, on_change)
    for widget in line.walk():
        if widget.name == spec.label:
            widget.caption = spec.label
    return line


def _line(spec: Spec, value: Value, on_change: Callable[[Value], None]) -> Widget:
    name = spec.label
    if spec.kind == "check":
        return row(CheckBox(name, name, bool(value), lambda: on_change(not value)))
    gap = Gap()
    label = Sized(Label(name), LABEL_UNITS)
    if spec.kind == "toggle":
        return row(
            Label(name),
            gap,
            Toggle(name, "", bool(value), lambda: on_change(not value)),
            grow=[gap],
        )
    if spec.kind == "radio":
        return row(label, *radios(name, spec.options, str(value), on_change), gap=4)
    if spec.kind == "combo":
        return row(label, Combo(name, str(value), spec.options, on_change, width=130))
    if spec.kind in ("text", "secret"):
        field = TextField(name, str(value), on_change, width=160, secret=spec.kind == "secret")
        return row(label, field)
    assert isinstance(value, int)
    if spec.kind == "slider":
        slider = Slider(name, value, on_change, low=spec.low, high=spec.high, step=spec.step)
        return row(label, slider, Label(str(value)))
    less = partial(on_change, max(spec.low, value - spec.step))
    more = partial(on_change, min(spec.high, value + spec.step))
    return row(
        label,
        Button(f"{name}.less", "-", less),
        Sized(Label(str(value)), 18),
        Button(f"{name}.more", "+", more),
    )


def fix(app: App, spec: Spec, value: Value, want: Value) -> Action | None:
    """Return the oracle's next action on the control; None if its value is `want`."""
    if value == want:
        return None
    name = spec.label
    match spec.kind:
        case "check" | "toggle":
            return reach(app, name)
        case "radio":
            return reach(app, f"{name}.{want}")
        case "combo":
            return choose(app, name, str(want))
        case "text" | "secret":
            return fill(app, name, str(want))
        case "slider":
            assert isinstance(want, int)
            return slide(app, name, want)
        case "stepper":
            assert isinstance(want, int)
            assert isinstance(value, int)
            return reach(app, f"{name}.more" if value < want else f"{name}.less")
