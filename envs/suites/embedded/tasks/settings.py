"""Scenes of suite `desk` in a settings window with pages."""
# ruff: noqa: ARG002, D102 - overrides keep the contract that the base class documents

from __future__ import annotations

from functools import partial
from typing import ClassVar

from envs.contract.actions import Action
from envs.contract.base import Verdict
from envs.suites.embedded.app import App
from envs.suites.embedded.controls import Button, NavItem, ScrollView
from envs.suites.embedded.tasks import words
from envs.suites.embedded.tasks.desk import compare, finish, reach
from envs.suites.embedded.tasks.panels import ControlScene
from envs.suites.embedded.tasks.specs import Spec, build, fix
from envs.suites.embedded.textfield import TextField
from envs.suites.embedded.widgets import Gap, Label, Panel, Widget, column, row

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
    """Several pages, a search field, and the buttons Apply and Revert; only applied values count."""

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

    def evaluate(self) -> Verdict:
        return compare(self.applied, self.goal)

    def matching_specs(self) -> list[Spec]:
        """Return the controls that are shown: the page's controls, or all that match the search."""
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
            for spec in self.matching_specs()
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
        labels = {spec.label for spec in self.matching_specs()}
        wrong = [label for label, want in self.goal.items() if self.values[label] != want]
        here = [label for label in wrong if label in labels]
        if here:
            return fix(app, self.specs[here[0]], self.values[here[0]], self.goal[here[0]])
        return self.go(app, self.page_of(wrong[0])) if wrong else None

    def solve(self, app: App) -> Action:
        change = self.next_change(app)
        if change is not None:
            return change
        return reach(app, "apply") if self.applied != self.goal else finish(app)


class SettingsSwitchScene(SettingsScene):
    """Turn one switch on or off."""

    kinds: ClassVar[tuple[str, ...]] = ("toggle",)

    def pick(self, specs: list[Spec]) -> list[Spec]:
        return super().pick([spec for spec in specs if spec.kind in self.kinds])


class SettingsChoiceScene(SettingsSwitchScene):
    """Choose in one drop-down list or radio group."""

    kinds = ("combo", "radio")


class SettingsLevelScene(SettingsSwitchScene):
    """Move one slider."""

    kinds = ("slider",)


class SettingsTwoScene(SettingsScene):
    """Change two settings, on any pages."""

    changes = (2, 2)


class SettingsThreeScene(SettingsScene):
    """Change three settings on three pages."""

    def pick(self, specs: list[Spec]) -> list[Spec]:
        pages = self.rng.sample(list(self.pages), 3)
        return [self.rng.choice(self.pages[page]) for page in pages]
