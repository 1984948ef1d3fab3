"""The X display of a desktop: windows, pings, clipboard, input events.

    Display          a connection to an X server
    connecting       a lock that lets one thread connect at a time
    X11Window        a window in the window manager's list
    write_authority  writes the cookie, which lets only this process connect

A Display is used by one thread at a time. Calls of python-xlib have no deadline: if one hangs, the caller has
to end the server (Desktop.bounded), whereupon the call raises EnvError.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from Xlib import X, Xatom
from Xlib import display as xdisplay
from Xlib.error import ConnectionClosedError, DisplayConnectionError, XError
from Xlib.ext import xtest
from Xlib.protocol import event as xevent

from bus.errors import EnvError
from envs.contract.queueing import SharedLock

LOOK_AGAIN_S = 0.1  # seconds between two checks that the window that should answer is still open

_ATOMS = (
    "_NET_CLIENT_LIST",
    "_NET_ACTIVE_WINDOW",
    "_NET_SUPPORTING_WM_CHECK",
    "_NET_WM_NAME",
    "UTF8_STRING",
    "_NET_WM_PING",
    "_NET_CLOSE_WINDOW",
    "WM_PROTOCOLS",
    "CLIPBOARD",
    "DART_SELECTION",
)
_COOKIE = b"MIT-MAGIC-COOKIE-1"
_FAMILY_LOCAL, _FAMILY_WILD = 256, 65535  # X11/Xauth.h
_connecting = SharedLock("the connection of another desktop to its X server")


class X11Window(NamedTuple):
    """A window in the window manager's list."""

    id: int
    title: str
    classes: tuple[str, ...]  # instance and class name


def connecting(patience_s: float) -> AbstractContextManager[None]:
    """Return the lock to hold while a Display is made: python-xlib reads the cookie from a variable.

    Raises EnvError if another thread holds it for `patience_s`.
    """
    otherwise = f"another desktop has connected to its X server for {patience_s:g} s"
    return _connecting.hold(patience_s, otherwise)


class Display:
    """A connection to display `number`, made under `connecting`. Raises EnvError if the server is gone."""

    def __init__(self, number: int, authority: Path) -> None:
        with _environment("XAUTHORITY", str(authority)), _env_errors():
            self._display = xdisplay.Display(f":{number}")
        with _env_errors():
            self._root = self._display.screen().root
            self._atoms = {name: self._display.intern_atom(name) for name in _ATOMS}
            self._pings = 0
            self._root.change_attributes(event_mask=X.SubstructureNotifyMask)
            self._owner = self._root.create_window(0, 0, 1, 1, 0, X.CopyFromParent)
            self._display.sync()

    def paint_root(self, colour: int) -> None:
        """Fill the screen behind all windows with a colour (0xRRGGBB)."""
        with _env_errors():
            self._root.change_attributes(background_pixel=colour)
            self._root.clear_area(0, 0, 0, 0)
            self._display.sync()

    def managed(self) -> bool:
        """Return True if a window manager runs."""
        return bool(self._property(self._root, "_NET_SUPPORTING_WM_CHECK", Xatom.WINDOW))

    def windows(self) -> list[X11Window]:
        """Return the applications' windows, the oldest first."""
        return [self._window(window) for window in self._ids("_NET_CLIENT_LIST")]

    def active(self) -> int:
        """Return the id of the window with the keyboard's focus, 0 if there is none."""
        return next(iter(self._ids("_NET_ACTIVE_WINDOW")), 0)

    def activate(self, window: int) -> None:
        """Raise a window and give it the focus."""
        self._ask_manager(window, "_NET_ACTIVE_WINDOW", [2, X.CurrentTime, 0, 0, 0])

    def close_window(self, window: int) -> None:
        """Ask a window to close, as its close button does."""
        self._ask_manager(window, "_NET_CLOSE_WINDOW", [X.CurrentTime, 2, 0, 0, 0])

    def answers(self, window: int, deadline_s: float) -> bool:
        """Wait until the application has handled its events so far; return False if it has not in time.

        This sends _NET_WM_PING of the window manager's specification, which an application answers after
        earlier events. A window that does not support it, or is closed, counts as answering.
        """
        with _env_errors():
            try:
                protocols = self._property(self._resource(window), "WM_PROTOCOLS", Xatom.ATOM)
            except XError:
                return True
            if self._atoms["_NET_WM_PING"] not in protocols:
                return True
            self._pings += 1
            data = [self._atoms["_NET_WM_PING"], self._pings, window, 0, 0]
            message = self._message(window, "WM_PROTOCOLS", data)
            self._resource(window).send_event(message, event_mask=0, onerror=_ignore)
            until = time.monotonic() + deadline_s
            while not self._pong(self._pings, min(until, time.monotonic() + LOOK_AGAIN_S)):
                if window not in self._ids("_NET_CLIENT_LIST"):
                    return True
                if time.monotonic() > until:
                    return False
            return True

    def clipboard(self, deadline_s: float) -> str | None:
        """Return the text of the clipboard; None if no window owns the clipboard."""
        with _env_errors():
            selection = self._atoms["CLIPBOARD"]
            if self._display.get_selection_owner(selection) in (X.NONE, None):
                return None
            target = self._atoms["DART_SELECTION"]
            self._owner.convert_selection(
                selection, self._atoms["UTF8_STRING"], target, X.CurrentTime
            )
            for event in self._events(time.monotonic() + deadline_s):
                if event.type == X.SelectionNotify:
                    if event.property == X.NONE:
                        return None
                    selected = self._owner.get_full_property(target, X.AnyPropertyType)
                    value = selected.value if selected else b""
                    # Numbers instead of bytes begin the transfer of a long text in pieces.
                    return value.decode(errors="replace") if isinstance(value, bytes) else ""
        raise EnvError(f"the owner of the clipboard gave nothing in {deadline_s:g} s")

    def keyboard(self) -> dict[int, Sequence[int]]:
        """Return keycode -> its keysyms: plain, shifted, ..."""
        with _env_errors():
            info = self._display.display.info
            first, last = info.min_keycode, info.max_keycode
            rows = self._display.get_keyboard_mapping(first, last - first + 1)
            return {first + number: list(row) for number, row in enumerate(rows)}

    def bind_key(self, keycode: int, keysym: int) -> None:
        """Bind a key to `keysym`."""
        with _env_errors():
            self._display.change_keyboard_mapping(keycode, [[keysym] * 4])

    def key(self, keycode: int, down: bool) -> None:
        """Press or release a key."""
        self._fake(X.KeyPress if down else X.KeyRelease, keycode)

    def button(self, number: int, down: bool) -> None:
        """Press or release a mouse button."""
        self._fake(X.ButtonPress if down else X.ButtonRelease, number)

    def move(self, x: int, y: int) -> None:
        """Move the pointer."""
        self._fake(X.MotionNotify, 0, x, y)

    def sync(self) -> None:
        """Wait until the server has handled all requests."""
        with _env_errors():
            self._display.sync()

    def close(self) -> None:
        """Close the connection, also to a server that is gone; may be called twice."""
        self._display.display.socket.close()

    def _fake(self, kind: int, detail: int, x: int = 0, y: int = 0) -> None:
        with _env_errors():
            xtest.fake_input(self._display, kind, detail, x=x, y=y)

    def _pong(self, number: int, until: float) -> bool:
        """Return True if the answer to ping `number` arrives before `until`."""
        for event in self._events(until):
            if event.type == X.ClientMessage and event.client_type == self._atoms["WM_PROTOCOLS"]:
                kind, ping = event.data[1][:2]
                if kind == self._atoms["_NET_WM_PING"] and ping == number:
                    return True
        return False

    def _events(self, until: float) -> Iterator[Any]:
        """Yield events as they arrive, until the time `until`; pending ones are yielded even after it."""
        while True:
            while self._display.pending_events():
                yield self._display.next_event()
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            select.select([self._display.fileno()], [], [], left_s)

    def _ids(self, name: str) -> list[int]:
        with _env_errors():
            return [window for window in self._property(self._root, name, Xatom.WINDOW) if window]

    def _window(self, window: int) -> X11Window:
        resource = self._resource(window)
        with _env_errors():
            try:
                title = resource.get_full_property(
                    self._atoms["_NET_WM_NAME"], self._atoms["UTF8_STRING"]
                )
                classes = resource.get_wm_class()
            except XError:  # the window closed meanwhile
                return X11Window(window, "", ())
        text = title.value.decode(errors="replace") if title else ""
        return X11Window(window, text, tuple(classes or ()))

    def _resource(self, window: int) -> Any:
        return self._display.create_resource_object("window", window)

    def _property(self, window: Any, name: str, kind: int) -> Sequence[int]:
        with _env_errors():
            values = window.get_full_property(self._display.intern_atom(name), kind)
            return values.value if values else ()

    def _message(self, window: int, name: str, data: list[int]) -> Any:
        return xevent.ClientMessage(window=window, client_type=self._atoms[name], data=(32, data))

    def _ask_manager(self, window: int, name: str, data: list[int]) -> None:
        mask = X.SubstructureRedirectMask | X.SubstructureNotifyMask
        with _env_errors():
            self._root.send_event(self._message(window, name, data), event_mask=mask)
            self._display.sync()


def write_authority(path: Path, cookie: bytes, number: int | None) -> None:
    """Write a file for XAUTHORITY with the cookie of display `number`; None stands for any display."""
    display = b"" if number is None else str(number).encode()
    entries = ((_FAMILY_LOCAL, socket.gethostname().encode()), (_FAMILY_WILD, b""))
    with path.open("wb") as file:
        for family, address in entries:
            file.write(struct.pack(">H", family))
            for part in (address, display, _COOKIE, cookie):
                file.write(struct.pack(">H", len(part)) + part)


@contextmanager
def _env_errors() -> Iterator[None]:
    """Turn errors of a lost connection into EnvError."""
    try:
        yield
    except (ConnectionClosedError, DisplayConnectionError, OSError, ValueError) as error:
        raise EnvError(f"the X server is gone: {error}") from error


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable while a block runs: python-xlib reads the cookie's path only from there."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _ignore(*_: object) -> bool:
    """Ignore an error of a closed window, which other code handles."""
    return True
