"""Runs adb for one device: commands with a deadline, screenshots, and the view tree for an explorer.

find_adb       returns the program
AdbTransport   runs commands with a deadline: run(args, deadline_s) -> bytes, and methods built on it
read_views     returns the tree that `uiautomator` dumps; uiautomator waits until the screen is still, and
               fails if it never is
nodes_of       returns the windows in the tree as nodes of envs.contract.elements
focus_of       returns the package and the activity that has the focus
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree as ET

from bus.errors import EnvError, MissingPartError
from envs.contract.elements import Box, Node, Operation

POLL_S = 0.5
_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_CHATTER = 4096  # bytes of warnings before a screenshot


def find_adb(option: str = "") -> str:
    """Return the program `option`, or the first adb on PATH.

    Raises MissingPartError with the install step.
    """
    program = shutil.which(Path(option or "adb").expanduser())
    if program is None:
        fix = "apt install adb, or set env.options.adb to its path"
        raise MissingPartError(f"no adb at {option or 'any place of PATH'}: {fix}")
    return program


class AdbTransport:
    """A device, named by its `serial`; without one adb takes the only device.

    Raises EnvError if adb or the device fails.
    """

    def __init__(self, adb: str, serial: str = "", *, deadline_s: float = 30.0) -> None:
        self.name = serial or "the device"
        self._command = [adb, "-s", serial] if serial else [adb]
        self._deadline_s = deadline_s

    def run(self, args: Sequence[str], deadline_s: float | None = None) -> bytes:
        """Return the output of `adb ARGS...`. Raises EnvError if it fails or exceeds its deadline."""
        seconds = self._deadline_s if deadline_s is None else deadline_s
        what = " ".join(args)[:80]
        try:
            # In its own session, an adb that hangs is killed with its children, except for adb's server,
            # which all slots share and which detaches itself.
            process = subprocess.Popen(
                [*self._command, *args],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvError(f"cannot run {self._command[0]}: {error.strerror}") from error
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise EnvError(f"{self.name}: adb {what}: no answer in {seconds:g} s") from None
        finally:
            _end(process)
        if process.returncode != 0:
            text = (errors.strip() or output.strip()).decode("utf-8", "replace")
            line = text.rpartition("\n")[2][:200] or "nothing"
            raise EnvError(f"{self.name}: adb {what}: exit code {process.returncode}: {line}")
        return output

    def shell(self, command: str | Sequence[str], deadline_s: float | None = None) -> str:
        """Return the output of a command on the device. A text is a script for the device's shell.

        adb joins its arguments with blanks, and the device's shell reads the whole. The words of a list are
        quoted for that shell, so that they arrive as separate arguments.
        """
        script = command if isinstance(command, str) else shlex.join(command)
        return self.run(["shell", script], deadline_s).decode("utf-8", "replace")

    def screenshot(self) -> bytes:
        """Return the screen as PNG."""
        # Not `shell`, which turns line ends of older devices into CR LF.
        output = self.run(["exec-out", "screencap", "-p"])
        start = output.find(_PNG, 0, _MOST_CHATTER)  # devices with several displays warn first
        if start < 0:
            text = " ".join(output[:200].decode("utf-8", "replace").split())
            raise EnvError(f"{self.name}: screencap gave no PNG: {text or 'nothing'}")
        return output[start:]

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until the device has booted. Raises EnvError after `deadline_s`."""
        until, last = time.monotonic() + deadline_s, "it is booting"
        while (left_s := until - time.monotonic()) > 0:
            try:
                if self.shell("getprop sys.boot_completed", min(10.0, left_s)).strip() == "1":
                    return
            except EnvError as error:
                last = str(error)
            time.sleep(min(POLL_S, max(0.0, until - time.monotonic())))
        raise EnvError(f"{self.name} was not ready in {deadline_s:g} s: {last}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with the others of its session, if it still runs, and close its pipes."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


LISTS = frozenset({"RecyclerView", "ListView", "GridView", "ExpandableListView"})
MOST_CHARS = 4_000_000

_DUMP = "uiautomator dump /dev/tty"
_FOCUS = "dumpsys window | grep mCurrentFocus"
_BOUNDS = re.compile(r"\[(-?\d{1,6}),(-?\d{1,6})\]\[(-?\d{1,6}),(-?\d{1,6})\]")
_WINDOW = re.compile(r" ([\w.]+)/([\w.$]+)\}")


def read_views(device: AdbTransport) -> ET.Element:
    """Return the view tree of the present screen. Raises EnvError."""
    output = device.shell(_DUMP)[:MOST_CHARS]
    start, end = output.find("<hierarchy"), output.rfind("</hierarchy>")
    if start < 0 or end < 0:
        excerpt = " ".join(output[-200:].split())
        raise EnvError(f"{device.name}: uiautomator gave no view tree: {excerpt or 'nothing'}")
    xml = output[start : end + len("</hierarchy>")]
    if "<!DOCTYPE" in xml or "<!ENTITY" in xml:  # a device is not trusted: entities may expand
        raise EnvError(f"{device.name}: its view tree has a document type, which no device writes")
    try:
        return ET.fromstring(xml)  # noqa: S314 - without a document type it is only text
    except ET.ParseError as error:
        raise EnvError(f"{device.name}: its view tree is no XML: {error}") from error


def focus_of(device: AdbTransport, views: ET.Element) -> str:
    """Return `PACKAGE/ACTIVITY` of the window with the focus; the package of the views if there is none."""
    match = _WINDOW.search(device.shell(f"{_FOCUS} || true"))
    if match is not None:
        package, activity = match[1], match[2]
        return f"{package}/{activity.removeprefix(package)}"
    return next((view.get("package", "") for view in views.iter("node")), "")


def nodes_of(views: ET.Element, width: int, height: int) -> list[Node]:
    """Return the windows of a screen of `width` x `height` pixels, the lowest first."""
    return [_node(view, (0, 0, width, height)) for view in views.findall("node")]


def _node(view: ET.Element, frame: Box, *, listed: bool = False) -> Node:
    role = view.get("class", "").rpartition(".")[2]
    box = _box(view, frame)
    acts = _operations(view, role) if box and _is(view, "enabled") else ()
    children = [_node(child, box or frame, listed=role in LISTS) for child in view.findall("node")]
    texts = (view.get("content-desc"), view.get("text"), view.get("hint"))
    name = next((text.strip() for text in texts if text and text.strip()), "")
    if acts and not name and "scroll" not in acts:
        name = next((child.name for child in _all(children) if child.name), "")
    shows = bool(name) or role in ("ImageView", "CheckBox", "Switch", "ProgressBar")
    return Node(
        role=role if acts or shows else "",
        name=name,
        box=box,
        actions=acts,
        children=children,
        enabled=_is(view, "enabled"),
        current=_is(view, "selected"),
        listed=listed or role == "TextView",
    )


def _operations(view: ET.Element, role: str) -> tuple[Operation, ...]:
    acts: list[Operation] = []
    if _is(view, "clickable") or _is(view, "checkable"):
        acts.append("click")
    if role.endswith(("EditText", "AutoCompleteTextView")):
        acts = ["click", "type"]
    if _is(view, "scrollable"):
        acts.append("scroll")
    return tuple(acts)


def _all(nodes: list[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        yield from _all(node.children)


def _is(view: ET.Element, name: str) -> bool:
    return view.get(name) == "true"


def _box(view: ET.Element, frame: Box) -> Box | None:
    """Return the part of a view's box within `frame`; None if there is none."""
    match = _BOUNDS.fullmatch(view.get("bounds", ""))
    if match is None:
        return None
    left, top, right, bottom = map(int, match.groups())
    left, top = max(left, frame[0]), max(top, frame[1])
    right, bottom = min(right, frame[2]), min(bottom, frame[3])
    return (left, top, right, bottom) if left < right and top < bottom else None
