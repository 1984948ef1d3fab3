"""Scenes of controls on a panel or on tabs, and their base class, whose goal is certain values."""

# ruff: noqa: ARG002, D102 - overrides keep the contract that the base class documents
from __future__ import annotations

from functools import partial
from typing import ClassVar

from envs.contract.actions import Action
from envs.contract.base import Verdict
from envs.suites.embedded.app import App
from envs.suites.embedded.controls import tabs
from envs.suites.embedded.tasks import words
from envs.suites.embedded.tasks.desk import DeskScene, compare, finish, reach
from envs.suites.embedded.tasks.specs import (
    Spec,
    Value,
    build,
    fix,
    other_value,
    phrase,
    random_value,
)
from envs.suites.embedded.widgets import Panel, Widget, column

FULL_NAMES = tuple(f"{first} {last}" for first in words.FIRST_NAMES for last in words.LAST_NAMES)
EMAILS = tuple(
    f"{first}@{company}.org".lower() for first in words.FIRST_NAMES for company in words.COMPANIES
)
PAGES = "pages"


def sentence(parts: list[str]) -> str:
    """Return the parts joined into one sentence."""
    text = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]
    return text[0].upper() + text[1:] + "."


class ControlScene(DeskScene):
    """A scene of controls with their present values and their goal values."""

    changes: ClassVar[tuple[int, int]] = (1, 1)  # fewest and most controls to change

    def set_up(self) -> None:
        self.pages = self.layout()
        self.page = next(iter(self.pages))
        specs = [spec for page in self.pages.values() for spec in page]
        self.specs = {spec.label: spec for spec in specs}
        self.values = {spec.label: self.first_value(spec) for spec in specs}
        specs_to_change = self.pick(specs)
        self.goal = dict(self.values)
        for spec in specs_to_change:
            self.goal[spec.label] = other_value(spec, self.values[spec.label], self.rng)
        self.instruction = self.describe(
            [(spec, self.goal[spec.label]) for spec in specs_to_change]
        )

    def layout(self) -> dict[str, list[Spec]]:
        """Return the controls by page."""
        raise NotImplementedError

    def first_value(self, spec: Spec) -> Value:
        """Return the first value of a control."""
        return random_value(spec, self.rng)

    def pick(self, specs: list[Spec]) -> list[Spec]:
        """Return the controls that are to be changed."""
        fewest, most = self.changes
        specs_to_change = self.rng.sample(specs, self.rng.randint(fewest, min(most, len(specs))))
        return [spec for spec in specs if spec in specs_to_change]

    def describe(self, changes: list[tuple[Spec, Value]]) -> str:
        return sentence([phrase(spec, want) for spec, want in changes])

    def put(self, label: str, value: Value) -> None:
        self.values[label] = value

    def lines(self, page: str) -> list[Widget]:
        """Return the controls of one page."""
        return [
            build(spec, self.values[spec.label], partial(self.put, spec.label))
            for spec in self.pages[page]
        ]

    def body(self) -> Widget:
        return column(*self.lines(self.page), gap=9, pad=14)

    def evaluate(self) -> Verdict:
        return compare(self.values, self.goal)

    def page_of(self, label: str) -> str:
        """Return the page of a control."""
        return next(page for page, specs in self.pages.items() if self.specs[label] in specs)

    def go(self, app: App, page: str) -> Action:
        """Return the oracle's next action towards another page."""
        raise NotImplementedError

    def next_change(self, app: App) -> Action | None:
        """Return the oracle's next action towards the goal values; None if all are reached."""
        wrong = [label for label, want in self.goal.items() if self.values[label] != want]
        if not wrong:
            return None
        here = [label for label in wrong if self.page_of(label) == self.page]
        if not here:
            return self.go(app, self.page_of(wrong[0]))
        label = here[0]
        return fix(app, self.specs[label], self.values[label], self.goal[label])

    def solve(self, app: App) -> Action:
        return self.next_change(app) or finish(app)


# --- one panel --------------------------------------------------------------------------------


class CheckScene(ControlScene):
    """Tick and untick boxes."""

    title = "Shopping list"
    units = (230, 0)
    changes = (1, 3)

    def layout(self) -> dict[str, list[Spec]]:
        return {"": [Spec(food, "check") for food in self.rng.sample(words.FOODS, 7)]}


class RadioScene(ControlScene):
    """Choose one of each group."""

    title = "Delivery"
    units = (360, 0)

    def layout(self) -> dict[str, list[Spec]]:
        groups = [
            Spec("Delivery", "radio", ("Standard", "Express", "Pick-up")),
            Spec("Payment", "radio", ("Card", "Invoice", "Cash")),
            Spec("Size", "radio", ("Small", "Medium", "Large")),
            Spec("Wrapping", "radio", ("None", "Paper", "Box")),
        ]
        return {"": self.rng.sample(groups, self.rng.randint(3, 4))}


class ComboScene(ControlScene):
    """Choose from drop-down lists."""

    title = "Region"
    units = (290, 0)

    def layout(self) -> dict[str, list[Spec]]:
        rng = self.rng
        return {
            "": [
                Spec("Country", "combo", tuple(rng.sample(words.COUNTRIES, rng.randint(5, 9)))),
                Spec("Language", "combo", tuple(rng.sample(words.LANGUAGES, rng.randint(5, 9)))),
                Spec("Currency", "combo", ("Dollar", "Euro", "Franc", "Krone", "Pound", "Yen")),
            ]
        }


_ADDRESS = (
    Spec("Name", "text", words.FIRST_NAMES),
    Spec("City", "text", words.CITIES),
    Spec("Company", "text", words.COMPANIES),
    Spec("Street", "text", words.STREETS),
)


class TextScene(ControlScene):
    """Type into one of several empty fields."""

    title = "Address"
    units = (310, 0)

    def layout(self) -> dict[str, list[Spec]]:
        return {"": self.rng.sample(_ADDRESS, self.rng.randint(3, 4))}

    def first_value(self, spec: Spec) -> Value:
        return ""


class EditScene(TextScene):
    """Replace the text of one of several fields."""

    title = "Edit address"

    def first_value(self, spec: Spec) -> Value:
        return random_value(spec, self.rng)

    def describe(self, changes: list[tuple[Spec, Value]]) -> str:
        spec, want = changes[0]
        return f'Change {spec.label} from "{self.values[spec.label]}" to "{want}".'


class SliderScene(ControlScene):
    """Move a slider."""

    title = "Mixer"
    units = (330, 0)

    def layout(self) -> dict[str, list[Spec]]:
        names = ("Volume", "Bass", "Treble", "Balance", "Echo", "Speed")
        return {"": [Spec(name, "slider") for name in self.rng.sample(names, 4)]}


class StepperScene(ControlScene):
    """Count up or down."""

    title = "Guests"
    units = (260, 0)

    def layout(self) -> dict[str, list[Spec]]:
        names = ("Adults", "Children", "Rooms", "Nights", "Dogs", "Bags")
        specs = [Spec(n, "stepper", low=0, high=9, step=1) for n in self.rng.sample(names, 3)]
        return {"": specs}


class DeskTabsScene(ControlScene):
    """Turn switches on several tabs on or off."""

    title = "Preferences"
    units = (320, 0)
    changes = (1, 2)

    def layout(self) -> dict[str, list[Spec]]:
        pages = {
            "General": ("Autosave", "Tips", "Sounds", "Backup"),
            "Display": ("Night mode", "Large text", "Animations", "Status bar"),
            "Editor": ("Line numbers", "Spell check", "Word wrap", "Ruler"),
            "Mail": ("Signature", "Receipts", "Threads", "Filters"),
        }
        names = self.rng.sample(list(pages), 3)
        return {
            name: [Spec(label, "toggle") for label in self.rng.sample(pages[name], 3)]
            for name in names
        }

    def body(self) -> Widget:
        strip = Panel(
            tabs("tab", list(self.pages), self.page, self.go_to), fill=self.ui.theme.panel
        )
        return column(strip, column(*self.lines(self.page), gap=9, pad=16), gap=0)

    def go_to(self, page: str) -> None:
        self.page = page

    def go(self, app: App, page: str) -> Action:
        return reach(app, f"tab.{page}")
