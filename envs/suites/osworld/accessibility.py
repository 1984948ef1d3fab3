"""The accessibility tree of OSWorld's guest server, from its XML: as text, and for an explorer.

    outline_of   returns a line of text for each widget, for a policy
    widgets_of   returns the widgets in the form that envs.tools.atspi_tree reads

The server (desktop_env/server/main.py of OSWorld) writes an element for each widget; the tag is the widget's
role. Only a widget on the screen has a place and a size. These are attributes of a namespace whose name
contains `component` and differs between systems and releases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree as ET

from bus.errors import EnvError
from envs.contract.observed_texts import Widget, outline
from envs.tools.atspi_tree import in_place

STATES = ("active", "checked", "editable", "expanded", "focused", "modal", "selected", "showing")

_PAIR = re.compile(r"\((-?\d{1,6})(?:\.\d*)?, ?(-?\d{1,6})(?:\.\d*)?\)")


def outline_of(xml: str) -> str:
    """Return a line for each widget on the screen that has a name or a text.

    Raises EnvError for other XML.
    """
    return outline(_widgets_on_screen(_parse(xml)))


def widgets_of(xml: str) -> list[dict[str, Any]]:
    """Return all widgets, depth first, with their states. Raises EnvError for other XML."""
    widgets: list[dict[str, Any]] = []
    waiting = [(_parse(xml), 0)]
    while waiting:
        element, depth = waiting.pop()
        widgets.append(_widget(element, depth))
        waiting += [(child, depth + 1) for child in reversed(element)]
    return in_place(widgets)


def _parse(xml: str) -> ET.Element:
    """Return the root of the tree. Raises EnvError for a text that is not such a tree."""
    if "<!DOCTYPE" in xml or "<!ENTITY" in xml:  # a guest is not trusted: entities may expand
        raise EnvError("the guest's accessibility tree has a document type, which no server writes")
    try:
        return ET.fromstring(xml)  # noqa: S314 - without a document type it is only text
    except ET.ParseError as error:
        raise EnvError(f"the guest's accessibility tree is no XML: {error}") from error


def _widget(element: ET.Element, depth: int) -> dict[str, Any]:
    """Return a widget in the form that envs/suites/desktop/atspi.py writes."""
    marks = {name.rpartition("}")[2] for name, on in element.attrib.items() if on == "true"}
    box = _box(element)
    return {
        "role": element.tag.rpartition("}")[2].replace("-", " "),
        "name": element.get("name", ""),
        "text": (element.text or "").strip(),
        "depth": depth,
        "box": None if box is None else [*box],
        **{state: state in marks for state in STATES},
        "sensitive": bool(marks & {"sensitive", "enabled"}),
    }


def _widgets_on_screen(root: ET.Element) -> Iterator[Widget]:
    for element in root.iter():
        box = _box(element)
        if box is not None and min(box[2:]) > 0:
            role, name = element.tag.rpartition("}")[2], element.get("name", "")
            yield Widget(role, name, (element.text or "").strip(), box)


def _box(element: ET.Element) -> tuple[int, int, int, int] | None:
    """Return (left, top, width, height); None if the widget is not on the screen."""
    names = {name: name.rpartition("}")[2] for name in element.attrib if "component" in name}
    values = {short: element.attrib[name] for name, short in names.items()}
    place, size = _pair(values.get("screencoord")), _pair(values.get("size"))
    return None if place is None or size is None else (*place, *size)


def _pair(text: str | None) -> tuple[int, int] | None:
    match = _PAIR.fullmatch(text or "")
    return None if match is None else (int(match[1]), int(match[2]))
