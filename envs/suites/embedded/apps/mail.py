"""A mail client: folders, messages, writing, contacts, settings."""
# ruff: noqa: D102 - overrides keep the contract that the base class documents

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from envs.contract.actions import Action
from envs.suites.embedded.app import App
from envs.suites.embedded.apps.application import AppScene, Page, Question, Way, paragraph
from envs.suites.embedded.controls import Button, ListRow, NavItem, tabs
from envs.suites.embedded.menus import Entry
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
from envs.suites.embedded.widgets import Label, Panel, Sized, Widget, column, row

FOLDERS = ("Inbox", "Sent", "Archive", "Trash")
INBOX = Page("folder", "Inbox")
SUBJECTS = (
    "Agenda for Monday", "Broken lamp", "Concert on Friday", "Dinner plans", "Exam results",
    "Flat to rent", "Garden party", "Holiday photos", "Invoice 204", "Job offer", "Key to the shed",
    "Lost umbrella", "Meeting moved", "New address", "Old bicycle", "Parcel arrived",
)  # fmt: skip
BODIES = (
    "Hello, I wanted to let you know before the weekend. Please answer when you have a moment.",
    "As we said on the phone, everything is ready. The rest comes with the next mail.",
    "It took longer than we thought, but now it works. Thank you for your patience.",
    "Could you have a look at it until tomorrow? There is no hurry with the second part.",
)
REPLIES = ("Thank you", "I agree", "See you soon", "Not today", "Call me", "Well done")
SETTINGS: Mapping[str, tuple[Spec, ...]] = {
    "General": (
        Spec("Notifications", "toggle"),
        Spec("Preview", "toggle"),
        Spec("Rows", "radio", ("Narrow", "Wide")),
    ),
    "Account": (
        Spec("Check mail", "combo", ("Every minute", "Every hour", "By hand")),
        Spec("Keep trash", "combo", ("One day", "One week", "One month", "Forever")),
    ),
    "Writing": (
        Spec("Spelling", "toggle"),
        Spec("Signature", "toggle"),
        Spec("Font size", "slider", low=8, high=24, step=2),
    ),
}


@dataclass
class Mail:
    """A mail; its number is its place in the list of all mails."""

    person: str  # the sender, or the recipient of a mail that was sent
    subject: str
    text: str
    folder: str
    starred: bool = False


class MailScene(AppScene):
    """The mail client with a task, which a subclass plans and solves."""

    title = "Mail"
    name = "mail"
    first = INBOX
    telling = frozenset({"folder", "settings"})

    def begin(self) -> None:
        rng = self.rng
        people = rng.sample(words.FIRST_NAMES, 10)
        subjects = rng.sample(SUBJECTS, 12)
        count = rng.randint(5, 7)
        folders = ["Inbox"] * count + ["Sent", "Archive", "Archive", "Trash", "Trash"]
        self.mails = [
            Mail(people[at % 10], subject, rng.choice(BODIES), folder)
            for at, (subject, folder) in enumerate(zip(subjects, folders, strict=False))
        ]
        self.people = sorted(people)
        self.options: dict[str, Value] = {
            spec.label: random_value(spec, rng) for specs in SETTINGS.values() for spec in specs
        }
        self.signed_in = True
        self.draft = {"To": "", "Subject": "", "Text": ""}

    def facts(self) -> dict[str, Any]:
        mails = {
            f"mail {at}": (mail.person, mail.subject, mail.text, mail.folder, mail.starred)
            for at, mail in enumerate(self.mails)
            if mail.folder != "gone"
        }
        return {**mails, **self.options, "signed in": self.signed_in}

    def ask_for(self, at: int, *, folder: str = "", starred: bool | None = None) -> None:
        """Change the goal so that a mail is in another folder, or starred."""
        mail = self.mails[at]
        star = mail.starred if starred is None else starred
        self.goal[f"mail {at}"] = (
            mail.person,
            mail.subject,
            mail.text,
            folder or mail.folder,
            star,
        )

    def some(self, folder: str) -> int:
        """Return the number of any mail in that folder."""
        return self.rng.choice([at for at, mail in enumerate(self.mails) if mail.folder == folder])

    def mail_of(self, page: Page) -> Mail:
        return self.mails[int(page.subject)]

    # --- the pages ----------------------------------------------------------------------------------

    def contents(self) -> Mapping[str, Callable[[str], Widget]]:
        return {
            "folder": self._folder,
            "message": self._message,
            "compose": self._compose,
            "contacts": self._contacts,
            "contact": self._contact,
            "settings": self._settings,
            "help": self._help,
            "signed out": self._signed_out,
        }

    def heading(self) -> str:
        if self.page.kind == "message":
            return self.mail_of(self.page).subject
        if self.page.kind == "settings":
            return "Settings"
        return super().heading()

    def side(self) -> Widget | None:
        if not self.signed_in or self.page.kind in ("compose", "settings", "help"):
            return None
        places = [*(Page("folder", folder) for folder in FOLDERS), Page("contacts")]
        items = [
            NavItem(
                f"place.{place.subject or 'Contacts'}",
                place.subject or "Contacts",
                partial(self.home, place),
                active=place == self.page,
            )
            for place in places
        ]
        new = Button("new", "New mail", partial(self._write_to, ""), primary=True)
        return Panel(column(new, *items, gap=4, pad=8), fill=self.ui.theme.panel)

    def menus(self) -> Mapping[str, Sequence[Entry]]:
        trash = any(mail.folder == "Trash" for mail in self.mails)
        return {
            "Mail": (
                Entry("do.settings", "Settings", partial(self.go, Page("settings", "General"))),
                Entry("do.empty", "Empty trash", partial(self.ask, "empty"), enabled=trash),
                Entry("do.leave", "Log out", partial(self.ask, "leave")),
            ),
            "Help": (Entry("do.help", "First steps", partial(self.go, Page("help"))),),
        }

    def questions(self) -> Mapping[str, Question]:
        delete = "Put this mail into the trash?"
        return {
            "delete": Question("Delete", delete, "Delete", partial(self._put, "Trash")),
            "empty": Question("Empty trash", "Delete all of it for good?", "Empty", self._empty),
            "leave": Question("Log out", "Leave this account?", "Log out", self._leave),
            "discard": Question("Discard", "Throw this mail away?", "Discard", self.back),
        }

    def _folder(self, folder: str) -> Widget:
        rows = [
            ListRow(
                f"mail.{at}",
                mail.subject,
                partial(self.go, Page("message", str(at))),
                note=mail.person,
                icon="file",
            )
            for at, mail in enumerate(self.mails)
            if mail.folder == folder
        ]
        return column(*rows, gap=0) if rows else Label("  Nothing here.", muted=True)

    def _message(self, subject: str) -> Widget:
        mail = self.mails[int(subject)]
        there = mail.folder in ("Archive", "Trash")
        buttons = [
            Button("star", "Unstar" if mail.starred else "Star", self._star, pad=7),
            Button("reply", "Reply", partial(self._write_to, mail.person, mail.subject), pad=7),
            Button("restore", "To inbox", partial(self._put, "Inbox"), pad=7)
            if there
            else Button("archive", "Archive", partial(self._put, "Archive"), pad=7),
            *(
                []
                if mail.folder == "Trash"
                else [Button("delete", "Delete", partial(self.ask, "delete"), pad=7)]
            ),
        ]
        person = Label(f"{'To' if mail.folder == 'Sent' else 'From'} {mail.person}", muted=True)
        return column(row(*buttons, gap=4), person, paragraph(mail.text), gap=10, pad=12)

    def _compose(self, _: str) -> Widget:
        lines = [
            row(
                Sized(Label(label), 60),
                TextField(label, text, partial(self.draft.__setitem__, label), width=270),
            )
            for label, text in self.draft.items()
        ]
        ready = bool(self.draft["To"].strip())
        buttons = row(
            Button("send", "Send", self._send, primary=True, enabled=ready),
            Button("discard", "Discard", partial(self.ask, "discard")),
        )
        return column(*lines, buttons, gap=10, pad=12)

    def _contacts(self, _: str) -> Widget:
        links = [
            self.link(f"person.{person}", person, Page("contact", person), icon="circle")
            for person in self.people
        ]
        return column(*links, gap=0)

    def _contact(self, person: str) -> Widget:
        return column(
            Label(person, size=1.4),
            Label(f"{person.lower()}@example.org", muted=True),
            Button("write", "Write a mail", partial(self._write_to, person), primary=True),
            gap=10,
            pad=14,
            align="start",
        )

    def _settings(self, subject: str) -> Widget:
        specs = SETTINGS[subject]
        lines = [
            build(spec, self.options[spec.label], partial(self.options.__setitem__, spec.label))
            for spec in specs
        ]
        strip = tabs("tab", [*SETTINGS], subject, lambda label: self.show(Page("settings", label)))
        return column(strip, column(*lines, gap=10, pad=12), gap=0)

    def _help(self, _: str) -> Widget:
        return column(
            paragraph("Folders are on the left. A mail opens when its line is pressed."),
            paragraph("What is in the trash stays there until the trash is emptied."),
            gap=10,
            pad=14,
        )

    def _signed_out(self, _: str) -> Widget:
        return column(Label("You have logged out.", size=1.3), gap=10, pad=30)

    # --- handlers -------------------------------------------------------------------------------------

    def _write_to(self, person: str, subject: str = "") -> None:
        about = f"Re: {subject}" if subject else ""
        self.draft = {"To": person, "Subject": about, "Text": ""}
        self.go(Page("compose"))

    def _send(self) -> None:
        to, subject, text = (value.strip() for value in self.draft.values())
        self.mails.append(Mail(to, subject, text, "Sent"))
        self.back()
        self.note = f"Sent to {to}."

    def _star(self) -> None:
        mail = self.mail_of(self.page)
        mail.starred = not mail.starred

    def _put(self, folder: str) -> None:
        self.mail_of(self.page).folder = folder
        if self.trail:
            self.back()
        self.note = f"Moved to {folder}."

    def _empty(self) -> None:
        for mail in self.mails:
            if mail.folder == "Trash":
                mail.folder = "gone"
        self.home(Page("folder", "Trash"))

    def _leave(self) -> None:
        self.signed_in = False
        self.home(Page("signed out"))

    # --- the oracle -----------------------------------------------------------------------------------

    def way(self, page: Page) -> Way:
        match page.kind:
            case "folder":
                return Way(self.first, f"place.{page.subject}")
            case "message":
                folder = Page("folder", self.mail_of(page).folder)
                return Way(folder, f"mail.{page.subject}")
            case "contacts":
                return Way(self.first, "place.Contacts")
            case "contact":
                return Way(Page("contacts"), f"person.{page.subject}")
            case "settings" if page.subject == "General":
                return Way(self.first, "do.settings", menu="Mail")
            case "settings":
                return Way(Page("settings", "General"), f"tab.{page.subject}")
            case _:
                return Way(self.first, "new")

    def write(self, app: App, texts: Mapping[str, str]) -> Action | None:
        """Return the next action on the page on which a mail is written."""
        for label, text in texts.items():
            action = None if self.draft[label] == text else fill(app, label, text)
            if action is not None:
                return action
        return reach(app, "send")


class StarScene(MailScene):
    """Star a mail of the inbox."""

    def plan(self) -> None:
        self.at = self.some("Inbox")
        self.ask_for(self.at, starred=True)
        self.instruction = f'Star the mail "{self.mails[self.at].subject}".'

    def move(self, app: App) -> Action | None:
        return self.to(app, Page("message", str(self.at))) or reach(app, "star")


class ArchiveScene(MailScene):
    """Archive a mail of the inbox."""

    def plan(self) -> None:
        self.at = self.some("Inbox")
        self.ask_for(self.at, folder="Archive")
        self.instruction = f'Archive the mail "{self.mails[self.at].subject}".'

    def move(self, app: App) -> Action | None:
        return self.to(app, Page("message", str(self.at))) or reach(app, "archive")


class DeleteMailScene(MailScene):
    """Delete a mail of the inbox or the archive; the application asks for confirmation."""

    def plan(self) -> None:
        folder = self.rng.choice(["Inbox", "Archive"])
        self.at = self.some(folder)
        self.ask_for(self.at, folder="Trash")
        self.instruction = f'Delete the mail "{self.mails[self.at].subject}" from the {folder}.'

    def move(self, app: App) -> Action | None:
        page = Page("message", str(self.at))
        return self.to(app, page) or self.confirm(app, "delete", "delete")


class WriteScene(MailScene):
    """Write a mail to a contact."""

    def plan(self) -> None:
        self.person = self.rng.choice(self.people)
        self.subject = self.rng.choice(SUBJECTS)
        self.goal[f"mail {len(self.mails)}"] = (self.person, self.subject, "", "Sent", False)
        self.instruction = f'Send {self.person} a mail with the subject "{self.subject}".'

    def move(self, app: App) -> Action | None:
        if self.page.kind == "compose":
            return self.write(app, {"To": self.person, "Subject": self.subject, "Text": ""})
        return self.to(app, Page("contact", self.person)) or reach(app, "write")


class ReplyScene(MailScene):
    """Answer a mail of the inbox."""

    def plan(self) -> None:
        self.at = self.some("Inbox")
        self.text = self.rng.choice(REPLIES)
        mail = self.mails[self.at]
        sent = (mail.person, f"Re: {mail.subject}", self.text, "Sent", False)
        self.goal[f"mail {len(self.mails)}"] = sent
        self.instruction = f'Reply "{self.text}" to the mail "{mail.subject}".'

    def move(self, app: App) -> Action | None:
        mail = self.mails[self.at]
        if self.page.kind == "compose":
            texts = {"To": mail.person, "Subject": f"Re: {mail.subject}", "Text": self.text}
            return self.write(app, texts)
        return self.to(app, Page("message", str(self.at))) or reach(app, "reply")


class MailSettingScene(MailScene):
    """Change a setting of the mail client."""

    def plan(self) -> None:
        self.tab = self.rng.choice([*SETTINGS])
        self.spec = self.rng.choice(SETTINGS[self.tab])
        want = other_value(self.spec, self.options[self.spec.label], self.rng)
        self.goal[self.spec.label] = want
        self.instruction = f"In the settings of the mail client {phrase(self.spec, want)}."

    def move(self, app: App) -> Action | None:
        label = self.spec.label
        away = self.to(app, Page("settings", self.tab))
        return away or fix(app, self.spec, self.options[label], self.goal[label])


class RestoreScene(MailScene):
    """Put a mail from the trash back into the inbox."""

    def plan(self) -> None:
        self.at = self.some("Trash")
        self.ask_for(self.at, folder="Inbox")
        self.instruction = f'Put the mail "{self.mails[self.at].subject}" back into the inbox.'

    def move(self, app: App) -> Action | None:
        return self.to(app, Page("message", str(self.at))) or reach(app, "restore")


class EmptyTrashScene(MailScene):
    """Empty the trash by the menu; the application asks for confirmation."""

    def plan(self) -> None:
        for at, mail in enumerate(self.mails):
            if mail.folder == "Trash":
                del self.goal[f"mail {at}"]
        self.instruction = "Empty the trash."

    def move(self, app: App) -> Action | None:
        if self.asking == "empty":
            return reach(app, "ask.yes")
        return self.to(app, INBOX) or self.choose(app, "Mail", "do.empty")
