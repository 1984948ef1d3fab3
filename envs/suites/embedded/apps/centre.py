"""A settings centre: networks, screen and sound, applications and what they may do, users, storage, reset."""
# ruff: noqa: D102 - overrides keep the contract that the base class documents

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from envs.contract.actions import Action
from envs.suites.embedded.app import App, Layer
from envs.suites.embedded.apps.application import AppScene, Page, Question, Way, paragraph
from envs.suites.embedded.controls import Button, Toggle
from envs.suites.embedded.menus import Entry, dialog
from envs.suites.embedded.tasks import words
from envs.suites.embedded.tasks.desk import fill, reach
from envs.suites.embedded.tasks.specs import (
    Spec,
    Value,
    build,
    fix,
    other_value,
    phrase,
    random_value,
)
from envs.suites.embedded.textfield import TextField
from envs.suites.embedded.widgets import Gap, Label, Widget, column, row

HOME = Page("home")
GROUPS = ("Network", "Screen", "Sound", "Applications", "Users", "Storage", "About")
PANELS: Mapping[str, tuple[Spec, ...]] = {
    "screen": (
        Spec("Brightness", "slider"),
        Spec("Night light", "toggle"),
        Spec("Theme", "radio", ("Light", "Dark")),
        Spec("Text size", "combo", ("Small", "Medium", "Large")),
    ),
    "sound": (
        Spec("Volume", "slider"),
        Spec("Output", "combo", ("Speakers", "Headphones", "Monitor")),
        Spec("Mute", "toggle"),
    ),
}
APPLICATIONS = ("Camera", "Chess", "Maps", "Music", "Notes", "Radio", "Recorder", "Weather")
RIGHTS = ("Location", "Microphone", "Contacts")
ROLES = ("Guest", "Member", "Owner")


class CentreScene(AppScene):
    """The settings centre with a task, which a subclass plans and solves."""

    title = "Settings centre"
    name = "centre"
    first = HOME
    telling = frozenset({"group"})

    def begin(self) -> None:
        rng = self.rng
        names = rng.sample(words.COMPANIES, 4)
        self.networks = {network: rng.random() < 0.5 for network in names}  # whether it is known
        self.joined = rng.choice([*names, ""])
        if self.joined:
            self.networks[self.joined] = True
        self.options: dict[str, Value] = {
            spec.label: random_value(spec, rng) for specs in PANELS.values() for spec in specs
        }
        self.installed = sorted(rng.sample(APPLICATIONS, 5))
        self.rights = {
            (application, right): rng.random() < 0.5
            for application in self.installed
            for right in RIGHTS
        }
        people = rng.sample(words.FIRST_NAMES, 3)
        self.users = {person: rng.choice(ROLES) for person in sorted(people)}
        self.draft = ""
        self.cached = True
        self.reset_done = False

    def facts(self) -> dict[str, Any]:
        return {
            **{f"network {network}": is_known for network, is_known in self.networks.items()},
            **{f"{application}: {right}": on for (application, right), on in self.rights.items()},
            **{f"user {user}": role for user, role in self.users.items()},
            **self.options,
            "joined": self.joined,
            "cache": self.cached,
            "reset": self.reset_done,
        }

    # --- the pages ----------------------------------------------------------------------------------

    def contents(self) -> Mapping[str, Callable[[str], Widget]]:
        return {
            "home": self._home,
            "networks": self._networks,
            "network": self._network,
            "screen": partial(self._panel, "screen"),
            "sound": partial(self._panel, "sound"),
            "applications": self._applications,
            "application": self._application,
            "rights": self._rights,
            "users": self._users,
            "user": self._user,
            "storage": self._storage,
            "about": self._about,
            "licences": self._licences,
            "reset": self._reset,
        }

    def heading(self) -> str:
        return "Settings centre" if self.page == HOME else super().heading()

    def menus(self) -> Mapping[str, Sequence[Entry]]:
        return {
            "Go to": (
                Entry("do.users", "Users", partial(self.go, Page("users"))),
                Entry("do.licences", "Licences", partial(self.go, Page("licences"))),
            )
        }

    def questions(self) -> Mapping[str, Question]:
        remove = "Remove {subject} with all its data?"
        return {
            "forget": Question("Forget", "Forget the network {subject}?", "Forget", self._forget),
            "remove": Question("Remove", remove, "Remove", self._uninstall),
            "delete": Question("Delete user", "Delete the user {subject}?", "Delete", self._delete),
            "clear": Question("Clear", "Delete all temporary files?", "Clear", self._clear),
            "reset": Question("Reset", "Delete everything on this device?", "Reset", self._erase),
        }

    def above(self) -> list[Layer]:
        if self.asking != "add":
            return super().above()
        field = TextField("Name", self.draft, self._name, width=170, on_enter=self._add)
        buttons = [("no", "Keep", self.dismiss), ("yes", "Add", self._add)]
        body = row(Label("Name"), field)
        layer = dialog(
            self.ui, "ask", "Add a user", body, buttons, on_close=self.dismiss, over=self.window
        )
        return [layer]

    def _home(self, _: str) -> Widget:
        kinds = ("networks", "screen", "sound", "applications", "users", "storage", "about")
        notes = (self.joined or "Not connected", "", "", f"{len(self.installed)}", "", "", "")
        rows = [
            self.link(f"group.{label}", label, Page(kind), note=note, icon="folder")
            for label, kind, note in zip(GROUPS, kinds, notes, strict=True)
        ]
        return column(*rows, gap=4, pad=6)

    def _networks(self, _: str) -> Widget:
        rows = [
            self.link(
                f"network.{network}",
                network,
                Page("network", network),
                note=self._network_state(network),
            )
            for network in self.networks
        ]
        return column(*rows, gap=0)

    def _network_state(self, network: str) -> str:
        fallback = "Known" if self.networks[network] else ""
        return "Connected" if network == self.joined else fallback

    def _network(self, name: str) -> Widget:
        here = name == self.joined
        join = partial(self._join, "" if here else name)
        forget = partial(self.ask, "forget")
        return column(
            Label(self._network_state(name) or "Unknown", muted=True),
            row(
                Button("join", "Disconnect" if here else "Connect", join, primary=not here),
                Button("forget", "Forget", forget, enabled=self.networks[name]),
            ),
            gap=12,
            pad=14,
            align="start",
        )

    def _panel(self, kind: str, _: str) -> Widget:
        lines = [
            build(spec, self.options[spec.label], partial(self.options.__setitem__, spec.label))
            for spec in PANELS[kind]
        ]
        return column(*lines, gap=10, pad=14)

    def _applications(self, _: str) -> Widget:
        rows = [
            self.link(
                f"application.{application}",
                application,
                Page("application", application),
                icon="circle",
            )
            for application in self.installed
        ]
        return column(*rows, gap=0)

    def _application(self, name: str) -> Widget:
        return column(
            self.link("rights", "Rights", Page("rights", name)),
            Button("remove", "Remove", partial(self.ask, "remove")),
            gap=12,
            pad=14,
            align="start",
        )

    def _rights(self, name: str) -> Widget:
        gap = {right: Gap() for right in RIGHTS}
        lines = [
            row(
                Label(right),
                gap[right],
                self._right(name, right),
                grow=[gap[right]],
            )
            for right in RIGHTS
        ]
        return column(*lines, gap=10, pad=14)

    def _right(self, name: str, right: str) -> Widget:
        toggle = Toggle(right, "", self.rights[name, right], partial(self._allow, name, right))
        toggle.caption = right
        return toggle

    def _users(self, _: str) -> Widget:
        rows = [
            self.link(f"user.{user}", user, Page("user", user), note=role, icon="circle")
            for user, role in self.users.items()
        ]
        return column(*rows, Button("add", "Add a user", self._ask_name), gap=6, pad=6)

    def _user(self, name: str) -> Widget:
        spec = Spec("Role", "combo", ROLES)
        choice = build(spec, self.users[name], lambda role: self._grant(name, str(role)))
        delete = Button(
            "delete", "Delete user", partial(self.ask, "delete"), enabled=len(self.users) > 1
        )
        return column(choice, delete, gap=12, pad=14, align="start")

    def _storage(self, _: str) -> Widget:
        used = "12 of 32 GB in use" if self.cached else "9 of 32 GB in use"
        clear = Button("clear", "Clear cache", partial(self.ask, "clear"), enabled=self.cached)
        reset = Button("reset", "Factory reset", partial(self.ask, "reset"))
        return column(Label(used), clear, reset, gap=12, pad=14, align="start")

    def _about(self, _: str) -> Widget:
        licences = self.link("licences", "Licences", Page("licences"))
        return column(Label("Version 4.2"), licences, gap=12, pad=14)

    def _licences(self, _: str) -> Widget:
        texts = ("Fonts: free to use.", "Icons: drawn for this system.", "Sounds: none.")
        return column(*(paragraph(text) for text in texts), gap=8, pad=14)

    def _reset(self, _: str) -> Widget:
        return column(Label("This device is empty.", size=1.3), gap=10, pad=30)

    # --- handlers -------------------------------------------------------------------------------------

    def _join(self, name: str) -> None:
        self.joined = name
        if name:
            self.networks[name] = True

    def _forget(self) -> None:
        name = self.page.subject
        self.networks[name] = False
        self.joined = "" if self.joined == name else self.joined

    def _allow(self, name: str, right: str) -> None:
        self.rights[name, right] = not self.rights[name, right]

    def _uninstall(self) -> None:
        name = self.page.subject
        self.installed.remove(name)
        for right in RIGHTS:
            del self.rights[name, right]
        self.home(HOME)
        self.go(Page("applications"))

    def _ask_name(self) -> None:
        self.draft = ""
        self.asking = "add"
        self.ui.focus, self.ui.anchor, self.ui.caret = "Name", 0, 0

    def _name(self, text: str) -> None:
        self.draft = text

    def _add(self) -> None:
        name = self.draft.strip()
        if name and name not in self.users:
            self.users[name] = ROLES[0]
            self.asking = ""

    def _grant(self, name: str, role: str) -> None:
        self.users[name] = role

    def _delete(self) -> None:
        del self.users[self.page.subject]
        self.home(HOME)
        self.go(Page("users"))

    def _clear(self) -> None:
        self.cached = False

    def _erase(self) -> None:
        self.reset_done = True
        self.home(Page("reset"))

    # --- the oracle -----------------------------------------------------------------------------------

    def way(self, page: Page) -> Way:
        name = page.subject
        match page.kind:
            case "network":
                return Way(Page("networks"), f"network.{name}")
            case "application":
                return Way(Page("applications"), f"application.{name}")
            case "rights":
                return Way(Page("application", name), "rights")
            case "user":
                return Way(Page("users"), f"user.{name}")
            case "networks":
                return Way(HOME, "group.Network")
            case _:
                return Way(HOME, f"group.{page.kind.capitalize()}")


class ConnectScene(CentreScene):
    """Connect to another network."""

    def plan(self) -> None:
        self.network = self.rng.choice(
            [network for network in self.networks if network != self.joined]
        )
        self.goal |= {"joined": self.network, f"network {self.network}": True}
        self.instruction = f"Connect to the network {self.network}."

    def move(self, app: App) -> Action | None:
        return self.to(app, Page("network", self.network)) or reach(app, "join")


class ForgetScene(CentreScene):
    """Forget a network; the application asks for confirmation."""

    def begin(self) -> None:
        super().begin()
        self.networks[next(iter(self.networks))] = True

    def plan(self) -> None:
        known_networks = [network for network, is_known in self.networks.items() if is_known]
        self.network = self.rng.choice(known_networks)
        self.goal[f"network {self.network}"] = False
        if self.joined == self.network:
            self.goal["joined"] = ""
        self.instruction = f"Forget the network {self.network}."

    def move(self, app: App) -> Action | None:
        away = self.to(app, Page("network", self.network))
        return away or self.confirm(app, "forget", "forget")


class PanelScene(CentreScene):
    """Change a setting of the screen or the sound."""

    def plan(self) -> None:
        self.kind = self.rng.choice([*PANELS])
        self.spec = self.rng.choice(PANELS[self.kind])
        want = other_value(self.spec, self.options[self.spec.label], self.rng)
        self.goal[self.spec.label] = want
        text = phrase(self.spec, want)
        self.instruction = f"{text[0].upper()}{text[1:]}."

    def move(self, app: App) -> Action | None:
        label = self.spec.label
        away = self.to(app, Page(self.kind))
        return away or fix(app, self.spec, self.options[label], self.goal[label])


class RightScene(CentreScene):
    """Allow an application something, or forbid it."""

    def plan(self) -> None:
        self.application = self.rng.choice(self.installed)
        self.right = self.rng.choice(RIGHTS)
        may = self.rights[self.application, self.right]
        self.goal[f"{self.application}: {self.right}"] = not may
        verb = "Forbid" if may else "Allow"
        self.instruction = f"{verb} the application {self.application} the right {self.right}."

    def move(self, app: App) -> Action | None:
        return self.to(app, Page("rights", self.application)) or reach(app, self.right)


class RemoveScene(CentreScene):
    """Remove an application; the application asks for confirmation."""

    def plan(self) -> None:
        self.application = self.rng.choice(self.installed)
        for right in RIGHTS:
            del self.goal[f"{self.application}: {right}"]
        self.instruction = f"Remove the application {self.application}."

    def move(self, app: App) -> Action | None:
        away = self.to(app, Page("application", self.application))
        return away or self.confirm(app, "remove", "remove")


class AddUserScene(CentreScene):
    """Add a user by a name that is typed."""

    def plan(self) -> None:
        free = [name for name in words.FIRST_NAMES if name not in self.users]
        self.user = self.rng.choice(free)
        self.goal[f"user {self.user}"] = ROLES[0]
        self.instruction = f"Add a user {self.user}."

    def move(self, app: App) -> Action | None:
        if self.asking == "add":
            typed = None if self.draft == self.user else fill(app, "Name", self.user)
            return typed or reach(app, "ask.yes")
        return self.to(app, Page("users")) or reach(app, "add")


class RoleScene(CentreScene):
    """Give a user another role."""

    def plan(self) -> None:
        self.user = self.rng.choice([*self.users])
        self.role = self.rng.choice([role for role in ROLES if role != self.users[self.user]])
        self.goal[f"user {self.user}"] = self.role
        self.instruction = f"Give the user {self.user} the role {self.role}."

    def move(self, app: App) -> Action | None:
        away = self.to(app, Page("user", self.user))
        return away or fix(app, Spec("Role", "combo", ROLES), self.users[self.user], self.role)
