"""Scenes of suite `desk` with forms: log-in, sign-up, an order, a wizard."""
# ruff: noqa: D102 - overrides keep the contract that the base class documents

from __future__ import annotations

from functools import partial
from random import Random
from typing import ClassVar

from envs.contract.actions import Action
from envs.contract.base import Verdict
from envs.suites.embedded.app import App, Layer
from envs.suites.embedded.controls import Button
from envs.suites.embedded.menus import dialog
from envs.suites.embedded.scene import NOT_YET
from envs.suites.embedded.tasks import words
from envs.suites.embedded.tasks.desk import compare, reach
from envs.suites.embedded.tasks.panels import EMAILS, FULL_NAMES, ControlScene, sentence
from envs.suites.embedded.tasks.specs import Spec, Value, phrase
from envs.suites.embedded.widgets import Gap, Label, Ui, Widget, column, row


class DeskFormScene(ControlScene):
    """A form, whose values count when it is sent; sending ends the episode."""

    button: ClassVar[str] = "Submit"

    def __init__(self, rng: Random, ui: Ui) -> None:
        self.sent = False
        super().__init__(rng, ui)

    def pick(self, specs: list[Spec]) -> list[Spec]:
        return specs

    def first_value(self, spec: Spec) -> Value:
        if spec.kind in ("text", "secret"):
            return ""
        return spec.low if spec.kind == "stepper" else spec.options[0] if spec.options else False

    def describe(self, changes: list[tuple[Spec, Value]]) -> str:
        return sentence([*(phrase(s, v) for s, v in changes), f"press {self.button}"])

    def footer(self) -> list[Widget]:
        """Return the buttons at the bottom."""
        return [Button("submit", self.button, self.submit, primary=True)]

    def submit(self) -> None:
        self.sent = self.over = True

    def body(self) -> Widget:
        gap = Gap()
        space = Gap()
        buttons = row(gap, *self.footer(), grow=[gap])
        return column(*self.lines(self.page), space, buttons, gap=8, pad=14, grow=[space])

    def evaluate(self) -> Verdict:
        return compare(self.values, self.goal) if self.sent else NOT_YET

    def solve(self, app: App) -> Action:
        return self.next_change(app) or reach(app, "submit")


class LoginScene(DeskFormScene):
    """Sign in; a wrong name or password is refused and can be corrected."""

    title = "Sign in"
    units = (300, 0)
    button = "Sign in"

    def layout(self) -> dict[str, list[Spec]]:
        passwords = tuple(f"{stem}{number}" for stem in words.FILE_STEMS for number in (7, 42, 365))
        return {
            "": [Spec("User", "text", words.FIRST_NAMES), Spec("Password", "secret", passwords)]
        }

    def submit(self) -> None:
        if self.values == self.goal:
            super().submit()
        else:
            self.values["Password"] = ""


class SignUpScene(DeskFormScene):
    """A form of several kinds of control."""

    title = "New account"
    units = (340, 0)
    button = "Create account"

    def layout(self) -> dict[str, list[Spec]]:
        rng = self.rng
        return {
            "": [
                Spec("Name", "text", FULL_NAMES),
                Spec("E-mail", "text", EMAILS),
                Spec("Country", "combo", ("Choose...", *rng.sample(words.COUNTRIES, 6))),
                Spec("Plan", "radio", ("Free", "Team", "Pro")),
                Spec("I accept the terms", "check"),
            ]
        }


class OrderScene(DeskFormScene):
    """An order that asks for confirmation before it is sent."""

    title = "Order"
    units = (340, 200)
    button = "Order"

    def layout(self) -> dict[str, list[Spec]]:
        self.asking = False
        drinks = ("Choose...", "Cocoa", "Coffee", "Juice", "Lemonade", "Tea", "Water")
        return {
            "": [
                Spec("Drink", "combo", drinks),
                Spec("Size", "radio", ("Small", "Medium", "Large")),
                Spec("Quantity", "stepper", low=1, high=9, step=1),
            ]
        }

    def describe(self, changes: list[tuple[Spec, Value]]) -> str:
        values = {spec.label: value for spec, value in changes}
        size = str(values["Size"]).lower()
        return (
            f"Order {values['Quantity']} of {values['Drink']}, size {size}, and confirm the order."
        )

    def submit(self) -> None:
        self.asking = True

    def above(self) -> list[Layer]:
        if not self.asking:
            return []
        text = Label(f"Order {self.values['Quantity']} x {self.values['Drink']}?")
        return [
            dialog(
                self.ui,
                "ask",
                "Confirm",
                text,
                [("cancel", "Cancel", self._dismiss), ("ok", "Confirm", super().submit)],
                on_close=self._dismiss,
                over=self.window,
            )
        ]

    def _dismiss(self) -> None:
        self.asking = False

    def solve(self, app: App) -> Action:
        if self.asking:
            return reach(app, "ask.ok" if self.values == self.goal else "ask.cancel")
        return super().solve(app)


class WizardScene(DeskFormScene):
    """A form of three pages."""

    title = "Set up"
    units = (340, 210)
    button = "Finish"

    def layout(self) -> dict[str, list[Spec]]:
        rng = self.rng
        return {
            "Who": [Spec("Name", "text", FULL_NAMES), Spec("Company", "text", words.COMPANIES)],
            "Where": [
                Spec("Country", "combo", ("Choose...", *rng.sample(words.COUNTRIES, 5))),
                Spec("Units", "radio", ("Metric", "Imperial")),
            ],
            "What": [Spec(label, "check") for label in ("News", "Backups", "Sharing")],
        }

    def pick(self, specs: list[Spec]) -> list[Spec]:
        specs_to_change = [self.rng.choice(page) for page in self.pages.values()]
        return [spec for spec in specs if spec in specs_to_change]

    def _at(self) -> int:
        return list(self.pages).index(self.page)

    def _turn(self, step: int) -> None:
        self.page = list(self.pages)[self._at() + step]

    def footer(self) -> list[Widget]:
        at = self._at()
        back = Button("back", "Back", partial(self._turn, -1), enabled=at > 0)
        if at < len(self.pages) - 1:
            return [back, Button("next", "Next", partial(self._turn, 1), primary=True)]
        return [back, *super().footer()]

    def lines(self, page: str) -> list[Widget]:
        step = Label(f"Step {self._at() + 1} of {len(self.pages)}: {page}", muted=True)
        return [step, *super().lines(page)]

    def go(self, app: App, page: str) -> Action:
        return reach(app, "next" if list(self.pages).index(page) > self._at() else "back")

    def solve(self, app: App) -> Action:
        change = self.next_change(app)
        if change is not None:
            return change
        return reach(app, "submit" if self._at() == len(self.pages) - 1 else "next")
