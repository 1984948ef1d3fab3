"""Writes the widgets of all windows of a desktop, as AT-SPI reports them, as a JSON list.

envs/suites/desktop/accessibility.py passes this file as source text to Debian's own python3 in a desktop
(packages python3-gi, gir1.2-atspi-2.0), since the desktop's user may not be able to read it.
"""

import json
import sys
from typing import Any

import gi  # type: ignore[import-not-found]

gi.require_version("Atspi", "2.0")
from gi.repository import Atspi, GLib  # type: ignore[import-not-found]  # noqa: E402

MOST_WIDGETS = 5_000
MOST_CHILDREN = 200  # of one widget: a sheet has a billion cells
STATES = (
    "ACTIVE",
    "CHECKED",
    "EDITABLE",
    "EXPANDED",
    "FOCUSED",
    "MODAL",
    "SELECTED",
    "SENSITIVE",
    "SHOWING",
)


def describe(widget: Any, depth: int) -> dict[str, Any]:
    """Return role, name, text, depth in the tree, states and box of a widget.

    The box is [left, top, width, height] on the screen in pixels, None for a widget without a place.
    """
    states, text = widget.get_state_set(), widget.get_text_iface()
    component = widget.get_component_iface()
    at = Atspi.Component.get_extents(component, Atspi.CoordType.SCREEN) if component else None
    return {
        "role": widget.get_role_name(),
        "depth": depth,
        "name": widget.get_name(),
        "text": Atspi.Text.get_text(text, 0, 10_000) if text else "",
        "box": [at.x, at.y, at.width, at.height] if at else None,
        **{name.lower(): states.contains(getattr(Atspi.StateType, name)) for name in STATES},
    }


def main() -> None:
    """Write the widgets, depth first, to stdout. A widget that closes meanwhile is left out."""
    widgets: list[dict[str, Any]] = []
    waiting = [(Atspi.get_desktop(0), 0)]
    while waiting and len(widgets) < MOST_WIDGETS:
        widget, depth = waiting.pop()
        try:
            widgets.append(describe(widget, depth))
            count = min(widget.get_child_count(), MOST_CHILDREN)
            children = [widget.get_child_at_index(at) for at in reversed(range(count))]
        except GLib.Error:
            continue
        waiting += [(child, depth + 1) for child in children if child is not None]
    json.dump(widgets, sys.stdout)


main()
