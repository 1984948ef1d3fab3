"""One task on one desktop: its files, its applications, its actions and its screen.

DesktopSession   a desktop with a task's files and applications on it
STEPS            steps of `config` and `postconfig`, except those that make files
                 (envs/suites/desktop/files.py)
PROGRAMS         programs of this suite -> their apt packages
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from bus.errors import EnvError, TaskError
from envs.contract.actions import Action, KeyDown, KeyPress, KeyUp, Type, Wait
from envs.suites.desktop.accessibility import read_widgets
from envs.suites.desktop.desktop import Desktop, Settings
from envs.suites.desktop.files import MAKERS, date_all, inside
from envs.suites.desktop.getters import GetterContext
from envs.suites.desktop.home import office_folder, write_home
from envs.suites.desktop.host_resources import DesktopNumber
from envs.suites.desktop.inputs import X11InputController
from envs.suites.desktop.screen import settle
from envs.suites.desktop.x11 import Display, X11Window
from envs.tools.taskfile import SetupStep

PROGRAMS: Mapping[str, str] = {
    "Xvfb": "xvfb",
    "openbox": "openbox",
    "dbus-daemon": "dbus-daemon",
    "mousepad": "mousepad",
    "pcmanfm": "pcmanfm",
    "galculator": "galculator",
    "localc": "libreoffice-calc libreoffice-gtk3",
    "lowriter": "libreoffice-writer",
    "loimpress": "libreoffice-impress",
}

SETTLE_AT_MOST_S = 3.0  # after an action; something that moves by itself never settles
KEY_SETTLE_S = 0.28  # after keys that press buttons: GTK shows them pressed for 250 ms
START_TIMES = 3.0
"""Deadlines that the start of an application may take: GIMP took 40 s on a busy host."""

OPEN_SETTLE_S = 0.4  # an application that has just opened draws in bursts
OPEN_AT_MOST_S = 10.0
MOST_WINDOWS = 5  # windows that one action may open or close in a row

_PRESSES = frozenset({"enter", "return", "space", " ", "alt", "escape", "esc"})
_OFFICE = ("--norestore", "--nologo", "--nolockcheck", "--nofirststartwizard")
_OFFICE_OF = {".xlsx": "--calc", ".docx": "--writer", ".pptx": "--impress"}
_PICTURES = (".png", ".jpg", ".bmp")


class DesktopSession:
    """A desktop on which a task has been set up. Raises EnvError and TaskError."""

    def __init__(
        self,
        settings: Settings,
        config: Sequence[SetupStep],
        desktop_number: DesktopNumber,
        *,
        settle_s: float,
        accessible: bool = False,
    ) -> None:
        def fill(home: Path) -> None:
            write_home(home)
            for step in config:
                if step.type in MAKERS:
                    _do(step, MAKERS[step.type], home)
            date_all(home)

        self.settings = settings
        self._settle_s = settle_s
        self.desktop = Desktop(settings, fill, desktop_number, accessible=accessible)
        try:
            with self.desktop.bounded("reading the keyboard"):
                self._input = X11InputController(
                    self._display, settings.width, settings.height, self._wait_handled
                )
            self.arrange(step for step in config if step.type not in MAKERS)
        except BaseException:
            self.close()
            raise

    def arrange(self, steps: Iterable[SetupStep]) -> None:
        """Perform set-up steps in turn."""
        for step in steps:
            _do(step, STEPS[step.type], self)

    def act(self, action: Action) -> bytes:
        """Perform an action and return the pixels once the screen has settled."""
        self.desktop.check()
        with self.desktop.bounded(f"action {action.kind}"):
            self._input.perform(action)
            self._wait_handled()
        if isinstance(action, Wait):
            self._pass(action.seconds)
        quiet_s = max(self._settle_s, KEY_SETTLE_S) if presses_button(action) else None
        return self.look(quiet_s)

    def release(self) -> None:
        """Release the keys and buttons that actions hold."""
        with self.desktop.bounded("releasing keys and buttons"):
            self._input.release()

    def look(self, quiet_s: float | None = None, at_most_s: float = SETTLE_AT_MOST_S) -> bytes:
        """Return the pixels once the screen has settled."""
        assert self.desktop.screen is not None, "a session's desktop is up"
        quiet_s = self._settle_s if quiet_s is None else quiet_s
        pixels = settle(self.desktop.screen, self.desktop.busy, quiet_s, at_most_s)
        self.desktop.check()
        return pixels

    def scene(self, answer: str | None) -> GetterContext:
        """Return the parts of the episode that an evaluator may read."""

        def clipboard() -> str | None:
            with self.desktop.bounded("reading the clipboard"):
                return self._display.clipboard(self.settings.deadline_s)

        return GetterContext(
            self.desktop.home, clipboard, answer, lambda: read_widgets(self.desktop)
        )

    def launch(self, command: Sequence[str], window: str = "") -> None:
        """Start a program and wait for its window, whose title holds `window`, to be ready."""
        with self.desktop.bounded(f"starting {command[0]}", START_TIMES + 1):
            before = {opened.id for opened in self._display.windows()}
            self.desktop.launch(Path(command[0]).name, command)

            def has_opened() -> bool:
                new_windows = [
                    opened for opened in self._display.windows() if opened.id not in before
                ]
                return any(window in opened.title for opened in new_windows)

            self.desktop.wait_for(
                has_opened, f"{command[0]} opened no window {window!r}", START_TIMES
            )
            self._wait_handled()
        self.look(OPEN_SETTLE_S, OPEN_AT_MOST_S)

    def open(self, path: str) -> None:
        """Open a file or folder in HOME with its application."""
        place = inside(self.desktop.home, path)
        if place.is_dir():
            self.launch(["pcmanfm", str(place)], place.name)
        elif place.suffix in _PICTURES:
            self.launch(["gimp", "--no-splash", "--new-instance", str(place)], f"[{place.stem}]")
        elif place.suffix in _OFFICE_OF:
            office = str(office_folder() / "soffice.bin")
            self.launch([office, *_OFFICE, _OFFICE_OF[place.suffix], str(place)], place.name)
        else:
            self.launch(["mousepad", "--disable-server", str(place)], place.name)

    def activate_window(self, window_name: str) -> None:
        """Give the focus to the window whose title contains `window_name`."""
        with self.desktop.bounded(f"activating {window_name}"):
            self._display.activate(self._find(window_name).id)
        self.look()

    def close_window(self, window_name: str) -> None:
        """Close the window whose title contains `window_name`, as its close button does."""
        with self.desktop.bounded(f"closing {window_name}"):
            self._display.close_window(self._find(window_name).id)
        self.look()

    def press(self, keys: list[str]) -> None:
        """Press keys together."""
        self.act(KeyPress(keys=keys))

    def close(self) -> None:
        """End the desktop; may be called twice."""
        self.desktop.close()

    @property
    def _display(self) -> Display:
        assert self.desktop.display is not None, "a session's desktop is up"
        return self.desktop.display

    def _find(self, title: str) -> X11Window:
        for window in self._display.windows():
            if title in window.title:
                return window
        raise EnvError(f"no window {title!r} is open")

    def _wait_handled(self) -> None:
        """Wait until the application with the focus has handled its events. Raises EnvError."""
        deadline_s = self.settings.deadline_s
        for _ in range(MOST_WINDOWS):
            window = self._display.active()
            if window and not self._display.answers(window, deadline_s):
                raise EnvError(f"the application did not answer in {deadline_s:g} s")
            if self._display.active() == window:
                return

    def _pass(self, seconds: float) -> None:
        assert self.desktop.screen is not None, "a session's desktop is up"
        settle(self.desktop.screen, self.desktop.busy, seconds, seconds)


STEPS: Mapping[str, Callable[..., None]] = {
    "launch": DesktopSession.launch,
    "open": DesktopSession.open,
    "activate_window": DesktopSession.activate_window,
    "close_window": DesktopSession.close_window,
    "press": DesktopSession.press,
}


def _do(step: SetupStep, function: Callable[..., None], on: object) -> None:
    """Perform a set-up step on HOME or a session. Raises TaskError for wrong parameters."""
    try:
        function(on, **step.parameters)
    except TypeError as error:
        raise TaskError(f"set-up step {step.type}: {error}") from error


def presses_button(action: Action) -> bool:
    """Return True if an action may press a button by the keyboard, as Enter does in a dialog."""
    match action:
        case Type(text=text):
            return "\n" in text
        case KeyPress(keys=keys):
            return not _PRESSES.isdisjoint(key.lower() for key in keys)
        case KeyDown(key=key) | KeyUp(key=key):
            return key.lower() in _PRESSES
        case _:
            return False


def check_step(step: SetupStep) -> None:
    """Raise TaskError for a set-up step that does not exist."""
    kinds = sorted((*MAKERS, *STEPS))
    if step.type not in kinds:
        raise TaskError(f"no set-up step {step.type!r}; there are {', '.join(kinds)}")
