"""Scenes made of controls: a panel, tabs, a form to submit, a wizard, the settings application."""

# ruff: noqa: ARG002, D102 - overrides keep the contract that the base class documents
from __future__ import annotations

from functools import partial
from random import Random
from typing import ClassVar

from envs.actions import Action
from envs.base import Verdict
from envs.embedded.app import App, Layer
from envs.embedded.controls import Button, NavItem, tabs
from envs.embedded.menus import dialog
from envs.embedded.scene import NOT_YET
from envs.embedded.scrolling import ScrollView
from envs.embedded.tasks import words
from envs.embedded.tasks.desk import DeskScene, compare, finish, reach
from envs.embedded.tasks.specs import Spec, Value, build, fix, other_value, phrase, random_value
from envs.embedded.textfield import TextField
from envs.embedded.widgets import Gap, Label, Panel, Ui, Widget, column, row

FULL_NAMES = tuple(f"{first} {last}" for first in words.FIRST_NAMES for last in words.LAST_NAMES)
EMAILS = tuple(
    f"{first}@{company}.org".lower() for first in words.FIRST_NAMES for company in words.COMPANIES
)
PAGES = "pages"


def sentence(parts: list[str]) -> str:
    """`parts` as one sentence."""
    text = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]
    return text[0].upper() + text[1:] + "."


class ControlScene(DeskScene):
    """Controls, the values they hold, and those they are to hold."""

    changes: ClassVar[tuple[int, int]] = (1, 1)  # fewest and most controls to change

    def set_up(self) -> None:
        self.pages = self.layout()
        self.page = next(iter(self.pages))
        specs = [spec for page in self.pages.values() for spec in page]
        self.specs = {spec.label: spec for spec in specs}
        self.values = {spec.label: self.first_value(spec) for spec in specs}
        wanted = self.pick(specs)
        self.goal = dict(self.values)
        for spec in wanted:
            self.goal[spec.label] = other_value(spec, self.values[spec.label], self.rng)
        self.instruction = self.describe([(spec, self.goal[spec.label]) for spec in wanted])

    def layout(self) -> dict[str, list[Spec]]:
        """The controls by page."""
        raise NotImplementedError

    def first_value(self, spec: Spec) -> Value:
        """What a control holds at first."""
        return random_value(spec, self.rng)

    def pick(self, specs: list[Spec]) -> list[Spec]:
        """Which controls are to be changed."""
        fewest, most = self.changes
        chosen = self.rng.sample(specs, self.rng.randint(fewest, min(most, len(specs))))
        return [spec for spec in specs if spec in chosen]

    def describe(self, wanted: list[tuple[Spec, Value]]) -> str:
        return sentence([phrase(spec, want) for spec, want in wanted])

    def put(self, label: str, value: Value) -> None:
        self.values[label] = value

    def lines(self, page: str) -> list[Widget]:
        """The controls of one page."""
        return [
            build(spec, self.values[spec.label], partial(self.put, spec.label))
            for spec in self.pages[page]
        ]

    def body(self) -> Widget:
        return column(*self.lines(self.page), gap=9, pad=14)

    def judge(self) -> Verdict:
        return compare(self.values, self.goal)

    def page_of(self, label: str) -> str:
        """The page that a control is on."""
        return next(page for page, specs in self.pages.items() if self.specs[label] in specs)

    def go(self, app: App, page: str) -> Action:
        """The oracle's next action towards another page."""
        raise NotImplementedError

    def next_change(self, app: App) -> Action | None:
        """The oracle's next action towards the goal values; None where all hold."""
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

    def describe(self, wanted: list[tuple[Spec, Value]]) -> str:
        spec, want = wanted[0]
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
    """Switches on several tabs."""

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


# --- forms ------------------------------------------------------------------------------------


class DeskFormScene(ControlScene):
    """Controls that count once the form is sent; what is sent is sent."""

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

    def describe(self, wanted: list[tuple[Spec, Value]]) -> str:
        return sentence([*(phrase(s, v) for s, v in wanted), f"press {self.button}"])

    def footer(self) -> list[Widget]:
        """The buttons at the bottom."""
        return [Button("submit", self.button, self.submit, primary=True)]

    def submit(self) -> None:
        self.sent = self.over = True

    def body(self) -> Widget:
        gap = Gap()
        space = Gap()
        buttons = row(gap, *self.footer(), grow=[gap])
        return column(*self.lines(self.page), space, buttons, gap=8, pad=14, grow=[space])

    def judge(self) -> Verdict:
        return compare(self.values, self.goal) if self.sent else NOT_YET

    def solve(self, app: App) -> Action:
        return self.next_change(app) or reach(app, "submit")


class LoginScene(DeskFormScene):
    """Sign in; wrong words are refused and can be corrected."""

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
    """An order that asks back before it is sent."""

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

    def describe(self, wanted: list[tuple[Spec, Value]]) -> str:
        values = {spec.label: value for spec, value in wanted}
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
        chosen = [self.rng.choice(page) for page in self.pages.values()]
        return [spec for spec in specs if spec in chosen]

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


# --- the settings application -------------------------------------------------------------------

SETTINGS: dict[str, tuple[Spec, ...]] = {
    "Network": (
        Spec("Wi-Fi", "toggle"),
        Spec("Bluetooth", "toggle"),
        Spec("Flight mode", "toggle"),
        Spec("Proxy", "combo", ("None", "Automatic", "Manual")),
    ),
    "Display": (
        Spec("Brightness", "slider"),
        Spec("Night light", "toggle"),
        Spec("Theme", "radio", ("Light", "Dark", "Auto")),
        Spec("Text size", "combo", ("Small", "Medium", "Large", "Huge")),
        Spec("Animations", "toggle"),
    ),
    "Sound": (
        Spec("Volume", "slider"),
        Spec("Alerts", "slider"),
        Spec("Output", "combo", ("Speakers", "Headphones", "Monitor", "Hands-free")),
        Spec("Mute", "toggle"),
    ),
    "Privacy": (
        Spec("Location", "toggle"),
        Spec("Camera", "toggle"),
        Spec("Microphone", "toggle"),
        Spec("Keep history", "combo", ("Never", "One day", "One week", "One month", "Forever")),
        Spec("Usage reports", "toggle"),
    ),
    "System": (
        Spec("Language", "combo", words.LANGUAGES),
        Spec("Clock", "radio", ("12 hours", "24 hours")),
        Spec("Updates", "toggle"),
        Spec("Start sound", "toggle"),
    ),
}


class SettingsScene(ControlScene):
    """Several pages, a search field, and Apply and Revert: only what is applied counts."""

    title = "Settings"
    units = (428, 300)

    def layout(self) -> dict[str, list[Spec]]:
        self.query = ""
        names = self.rng.sample(list(SETTINGS), len(SETTINGS))
        return {name: list(SETTINGS[name]) for name in names}

    def set_up(self) -> None:
        super().set_up()
        self.applied = dict(self.values)
        self.page = self.rng.choice(list(self.pages))
        self.instruction += " Press Apply."

    def judge(self) -> Verdict:
        return compare(self.applied, self.goal)

    def found(self) -> list[Spec]:
        """What the page shows: its own controls, or those that match the search."""
        if not self.query:
            return self.pages[self.page]
        return [s for s in self.specs.values() if self.query.lower() in s.label.lower()]

    def body(self) -> Widget:
        theme = self.ui.theme
        search = TextField("search", self.query, self._search, hint="Search", width=96)
        items = [
            NavItem(
                f"page.{page}",
                page,
                partial(self._open, page),
                active=page == self.page and not self.query,
            )
            for page in self.pages
        ]
        side = Panel(column(search, *items, gap=4, pad=8), fill=theme.panel)
        lines = [
            build(spec, self.values[spec.label], partial(self.put, spec.label))
            for spec in self.found()
        ]
        heading = Label("Results" if self.query else self.page, size=1.25)
        view = ScrollView("content", column(heading, *lines, gap=10, pad=12))
        gap = Gap()
        changed = self.values != self.applied
        foot = Panel(
            row(
                gap,
                Button("revert", "Revert", self._revert, enabled=changed),
                Button("apply", "Apply", self._apply, primary=True, enabled=changed),
                grow=[gap],
            ),
            fill=theme.panel,
            pad=7,
        )
        right = column(view, foot, gap=0, grow=[view])
        return row(side, right, gap=0, align="fill", grow=[right])

    def _search(self, text: str) -> None:
        self.query = text

    def _open(self, page: str) -> None:
        self.page, self.query = page, ""
        self.ui.offsets.pop("content", None)

    def _apply(self) -> None:
        self.applied = dict(self.values)

    def _revert(self) -> None:
        self.values = dict(self.applied)

    def go(self, app: App, page: str) -> Action:
        return reach(app, f"page.{page}")

    def next_change(self, app: App) -> Action | None:
        shown = {spec.label for spec in self.found()}
        wrong = [label for label, want in self.goal.items() if self.values[label] != want]
        here = [label for label in wrong if label in shown]
        if here:
            return fix(app, self.specs[here[0]], self.values[here[0]], self.goal[here[0]])
        return self.go(app, self.page_of(wrong[0])) if wrong else None

    def solve(self, app: App) -> Action:
        change = self.next_change(app)
        if change is not None:
            return change
        return reach(app, "apply") if self.applied != self.goal else finish(app)


class SettingsSwitchScene(SettingsScene):
    """One switch."""

    kinds: ClassVar[tuple[str, ...]] = ("toggle",)

    def pick(self, specs: list[Spec]) -> list[Spec]:
        return super().pick([spec for spec in specs if spec.kind in self.kinds])


class SettingsChoiceScene(SettingsSwitchScene):
    """One drop-down list or radio group."""

    kinds = ("combo", "radio")


class SettingsLevelScene(SettingsSwitchScene):
    """One slider."""

    kinds = ("slider",)


class SettingsTwoScene(SettingsScene):
    """Two settings, on whichever pages they are."""

    changes = (2, 2)


class SettingsThreeScene(SettingsScene):
    """Three settings on three pages."""

    def pick(self, specs: list[Spec]) -> list[Spec]:
        pages = self.rng.sample(list(self.pages), 3)
        return [self.rng.choice(self.pages[page]) for page in pages]
