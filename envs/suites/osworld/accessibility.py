"""The accessibility tree of OSWorld's guest server, from its XML: as text, and for an explorer.

    outline_of   a line for each widget, for a policy
    told_of      the widgets as envs.tools.atspi_tree reads them

The server (desktop_env/server/main.py of OSWorld) writes an element for each widget, whose tag is its
role. Only one that is on the screen has a place and a size, attributes of a namespace whose name, which
differs between systems and releases, has `component` in it.
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
    """Return the widgets that are on the screen and have a name or a text. Raises EnvError for other text."""
    return outline(_widgets(_parsed(xml)))


def told_of(xml: str) -> list[dict[str, Any]]:
    """Return the widgets, depth first, with their states. Raises EnvError for other text."""
    found: list[dict[str, Any]] = []
    waiting = [(_parsed(xml), 0)]
    while waiting:
        element, depth = waiting.pop()
        found.append(_told(element, depth))
        waiting += [(child, depth + 1) for child in reversed(element)]
    return in_place(found)


def _parsed(xml: str) -> ET.Element:
    if "<!DOCTYPE" in xml or "<!ENTITY" in xml:  # a guest is not trusted: entities may grow
        raise EnvError("the guest's accessibility tree has a document type, which no server writes")
    try:
        return ET.fromstring(xml)  # noqa: S314 - without a document type it is only text
    except ET.ParseError as error:
        raise EnvError(f"the guest's accessibility tree is no XML: {error}") from error


def _told(element: ET.Element, depth: int) -> dict[str, Any]:
    """Return a widget as envs/suites/desktop/atspi.py writes it."""
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


def _widgets(root: ET.Element) -> Iterator[Widget]:
    for element in root.iter():
        box = _box(element)
        if box is not None and min(box[2:]) > 0:
            role, name = element.tag.rpartition("}")[2], element.get("name", "")
            yield Widget(role, name, (element.text or "").strip(), box)


def _box(element: ET.Element) -> tuple[int, int, int, int] | None:
    """Left, top, width, height."""
    names = {name: name.rpartition("}")[2] for name in element.attrib if "component" in name}
    placed = {short: element.attrib[name] for name, short in names.items()}
    place, size = _pair(placed.get("screencoord")), _pair(placed.get("size"))
    return None if place is None or size is None else (*place, *size)


def _pair(text: str | None) -> tuple[int, int] | None:
    found = _PAIR.fullmatch(text or "")
    return None if found is None else (int(found[1]), int(found[2]))
