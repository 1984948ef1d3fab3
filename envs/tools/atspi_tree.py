"""The accessibility tree of a desktop (AT-SPI) as nodes of envs.contract.elements, for an explorer.

    elements_from   the elements that can be seen and reached; cells of a grid if there is no tree
    state_from      the state of the screen; by its picture if there is no tree
    nodes_of        the windows with their widgets, as nodes
    route_of        the applications, and the titles of their dialogs
    in_place        the widgets with their boxes corrected

AT-SPI reports neither which window covers another nor which widgets a pointer grab makes unreachable. So
these rules apply: a modal dialog makes the rest of its application unreachable, an open menu everything but
menus, and the active window covers what is beneath it. A widget that is unreachable has no actions, but
counts for the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from envs.contract.base import Observation
from envs.contract.elements import (
    Box,
    Element,
    Node,
    Operation,
    ScreenState,
    elements_of,
    grid_elements,
    grid_state,
    state_of,
)

Report = Mapping[str, Any]
"""A widget as envs/suites/desktop/atspi.py writes it: role, name, text, depth, box, states."""

PRESSED = frozenset({
    "push button", "toggle button", "check box", "radio button", "menu", "menu item",
    "check menu item", "radio menu item", "page tab", "combo box", "link", "slider", "spin button",
    "column header", "table column header",
})  # fmt: skip
OPENED = frozenset({"icon", "list item", "tree item", "table cell"})
"""Roles that a double click opens."""

WRITTEN = frozenset({"text", "entry", "password text", "spin button", "paragraph", "terminal"})
SCROLLED = frozenset({"scroll pane"})
CLIPS = frozenset({"menu bar", "scroll pane", "viewport"})
"""Roles that cut off the widgets in them."""

NOWHERE: Box = (0, 0, 0, 0)
MENUS = frozenset({"menu", "menu item", "check menu item", "radio menu item", "tearoff menu item"})
LISTS = frozenset({"icon view", "layered pane", "list", "list box", "table", "tree", "tree table"})
DIALOGS = frozenset(
    {"dialog", "alert", "file chooser", "color chooser", "font chooser", "option pane"}
)
LAYOUT = frozenset({
    "filler", "panel", "unknown", "split pane", "grouping", "section", "redundant object",
    "layered pane", "root pane", "scroll bar", "separator", "image", "static", "label", "table",
    "viewport", "internal frame", "glass pane", "form", "invalid", "extended", "status bar", "progress bar",
})  # fmt: skip
"""Roles without actions that do not count for the state; the text of a label differs by seed."""


_Area = tuple[int, ...]
"""Left, top, width, height."""

_NO_AREA: _Area = (0, 0, 0, 0)


@dataclass(frozen=True)
class _Reach:
    """The reasons why a click may not reach the widgets of a window."""

    screen: Box
    over: Sequence[Box]  # of windows above it
    shut: bool  # a dialog is open, or a widget around them takes the click
    in_menus: bool  # a menu is open

    def admits(self, role: str, box: Box) -> bool:
        """Return True if a click in the middle of the box reaches a widget of that role."""
        x, y = (box[0] + box[2]) // 2, (box[1] + box[3]) // 2
        covered = any(x0 <= x < x1 and y0 <= y < y1 for x0, y0, x1, y1 in self.over)
        return not (covered or self.shut or (self.in_menus and role not in MENUS))


@dataclass
class _Widget:
    """A reported widget with the widgets below it."""

    report: Report
    below: list[_Widget] = field(default_factory=list)

    @property
    def role(self) -> str:
        return str(self.report["role"])


def elements_from(widgets: Sequence[Report], observation: Observation) -> list[Element]:
    """Return the elements that can be seen and reached, or the cells of a grid if there is no tree."""
    windows = nodes_of(widgets, observation.width, observation.height)
    return elements_of(windows) if windows else grid_elements(observation.width, observation.height)


def state_from(widgets: Sequence[Report], observation: Observation) -> ScreenState:
    """Return the state of the screen: by the skeletons of its windows, or by the picture if it has none."""
    windows = nodes_of(widgets, observation.width, observation.height)
    return state_of(route_of(widgets), windows) if windows else grid_state(observation)


def nodes_of(widgets: Sequence[Report], width: int, height: int) -> list[Node]:
    """Return the windows of every application that are on a screen of `width` x `height` pixels."""
    screen: Box = (0, 0, width, height)
    windows = [pair for pair in _windows(widgets) if pair[1].report["showing"]]
    in_menus = any(_shows_menu(window) for _, window in windows)
    modal = {application for application, window in windows if window.report["modal"]}
    active = [_box(window.report, screen) for _, window in windows if window.report["active"]]
    nodes = []
    for application, window in windows:
        shut = application in modal and not window.report["modal"]
        on_top = window.report["active"] or window.report["modal"]
        over = [] if on_top else [box for box in active if box]
        nodes.append(_node(window, screen, _Reach(screen, over, shut, in_menus)))
    return nodes


def route_of(widgets: Sequence[Report]) -> str:
    """Return the applications with a window on the screen, and the titles of their dialogs."""
    names = []
    for application, window in _windows(widgets):
        if window.report["showing"]:
            dialog = window.role in DIALOGS and (window.report["name"] or "").strip()
            names.append(f"{application}: {dialog}" if dialog else application)
    return " > ".join(names)


def in_place(widgets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Correct the boxes of LibreOffice's widgets, and return the widgets.

    LibreOffice reports the contents of a window too high by the height of its menu bar, as if the root pane
    began where the panel around both begins. The GTK widgets among them (lists, fields) have right boxes.
    """
    above: list[tuple[_Area, _Area]] = []  # by depth: the box, and the offset of its contents
    for widget in widgets:
        del above[widget["depth"] :]
        around, (x, y, *_) = above[-1] if above else (_NO_AREA, _NO_AREA)
        box = tuple(widget["box"] or _NO_AREA)
        if widget["role"] == "root pane" and (x, y) == (0, 0) and box[2:] == around[2:]:
            x, y = around[0] - box[0], around[1] - box[1]
        there = (box[0] + x, box[1] + y, box[2], box[3])
        if not _inside(there, around) and _inside(box, around):
            x, y, there = 0, 0, box
        above.append((there, (x, y, 0, 0)))
        widget["box"] = widget["box"] and [*there]
    return widgets


def _inside(box: _Area, around: _Area) -> bool:
    x, y, width, height = box
    left, top, wide, high = around
    return left <= x and top <= y and x + width <= left + wide and y + height <= top + high


def _windows(widgets: Sequence[Report]) -> list[tuple[str, _Widget]]:
    """Return the windows, each with the name of its application, in the order of the tree."""
    windows = []
    for desktop in _nested(widgets):
        for application in desktop.below:
            name = str(application.report["name"] or "")
            windows += [(name, window) for window in application.below]
    return windows


def _nested(widgets: Iterable[Report]) -> list[_Widget]:
    """Return widgets, which come depth first with their depth, as trees."""
    roots: list[_Widget] = []
    path: list[_Widget] = []
    for report in widgets:
        widget = _Widget(report)
        del path[int(report["depth"]) :]
        (path[-1].below if path else roots).append(widget)
        path.append(widget)
    return roots


def _shows_menu(window: _Widget) -> bool:
    """Return True if a menu of the window is open, which means that an entry of it is on the screen."""
    waiting = [window]
    while waiting:
        widget = waiting.pop()
        if widget.role == "menu" and any(
            entry.report["showing"] and _has_area(entry.report) for entry in widget.below
        ):
            return True
        waiting += widget.below
    return False


def _node(widget: _Widget, frame: Box, reach: _Reach, *, listed: bool = False) -> Node:
    """Return a widget with those below it as nodes; `frame` is the part of the screen that shows them."""
    report, role = widget.report, widget.role
    box = _box(report, frame) if report["showing"] else None
    acts = _operations(report) if box and report["sensitive"] and reach.admits(role, box) else ()
    below = replace(reach, shut=True) if role in OPENED else reach
    inner = frame
    if role in CLIPS and report["showing"]:
        inner = box or NOWHERE
    elif role in MENUS:
        inner = reach.screen  # an open menu is a separate window
    children = [_node(child, inner, below, listed=role in LISTS) for child in widget.below]
    name = (report["name"] or "").strip() or _label(report)
    if acts and not name and role in OPENED:
        name = next((child.name for child in _all(children) if child.name), "")
    opened = (report["selected"] and role in ("page tab", "menu")) or (
        report["expanded"] and role == "combo box"
    )
    return Node(
        role="" if role in LAYOUT else role,
        name=name,
        box=box,
        actions=acts,
        children=children,
        enabled=bool(report["sensitive"]) or role in LAYOUT,
        current=bool(opened),
        listed=listed,
    )


def _all(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        yield from _all(node.children)


def _operations(report: Report) -> tuple[Operation, ...]:
    role = report["role"]
    acts: list[Operation] = []
    if role in PRESSED or role in OPENED or (role in WRITTEN and report["editable"]):
        acts.append("click")
    if role in OPENED:
        acts.append("double_click")
    if role in WRITTEN and report["editable"]:
        acts.append("type")
    if role in SCROLLED:
        acts.append("scroll")
    return tuple(acts)


def _label(report: Report) -> str:
    """Return the text of a widget in place of a name; the text in a field is not its name."""
    return "" if report["role"] in WRITTEN else str(report["text"] or "").strip()[:200]


def _has_area(report: Report) -> bool:
    return bool(report["box"]) and min(report["box"][2:]) > 0


def _box(report: Report, frame: Box) -> Box | None:
    """Return the part of a widget's box within `frame`; None if there is none."""
    if not report["box"]:
        return None
    x, y, width, height = (int(number) for number in report["box"])
    left, top = max(x, frame[0]), max(y, frame[1])
    right, bottom = min(x + width, frame[2]), min(y + height, frame[3])
    return (left, top, right, bottom) if left < right and top < bottom else None
