"""Phrases for elements, outcomes and screens, from the names that an environment reports.

descriptive    phrases that ask for an element by its name
outcome        a query that names what the screen after a step shows
title_of       the title of a screen, from its route
names_of       the names of elements, each once
spoken         a step in words
labels_of      a label for each screen of a graph
has_own_text   True if an element probably shows its name as text
listed         names in quotation marks, as a part of a sentence
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dart_cli.explore.graph import Edge, Screen
from envs.contract.elements import Element

MOST_CHARS = 60
"""Longer names are paragraphs, and are not used."""

_ROLES = {
    "button": ("button", "push button", "toggle button", "imagebutton"),
    "check box": ("checkbox", "check box"),
    "radio button": ("radio", "radio button"),
    "switch": ("toggle", "switch"),
    "tab": ("tab", "page tab"),
    "menu": ("menu",),
    "menu item": ("menu item", "menuitem", "check menu item", "radio menu item"),
    "option": ("option",),
    "item": ("item", "list item", "listitem", "li"),
    "row": ("row",),
    "cell": ("table cell",),
    "field": ("field", "textfield", "entry", "text", "textbox", "input", "textarea", "edittext"),
    "list": ("combo", "combo box", "combobox", "select", "spinner"),
    "slider": ("slider",),
    "link": ("link", "a"),
    "icon": ("icon",),
    "picture": ("image", "img", "imageview"),
}
"""Noun of a query -> roles in lower case; other roles have no noun."""
_NOUNS = {role: noun for noun, roles in _ROLES.items() for role in roles}

_WITH_TEXT = ("check box", "radio button", "menu", "menu item", "tab", "option", "link", "row")
_OPENED = ("tab", "menu", "list")
_SHOWN = 2  # names in a query about an outcome, at most


def descriptive(element: Element) -> list[str]:
    """Return phrases that ask for an element by its name, the plainest first; none if it has no name."""
    name = _name(element)
    if not name:
        return []
    noun = _NOUNS.get(_role(element), "")
    if not noun:
        return [f'click "{name}"']
    verb = "open" if noun in _OPENED else "click"
    return [f'{verb} the "{name}" {noun}', f'click "{name}"']


def outcome(
    before: Screen,
    after: Screen,
    element: Element,
    *,
    shows: Sequence[str],
    had: Sequence[str],
    whole: bool = True,
) -> str:
    """Return a query that names what a step leads to, and not the element.

    It is empty if nothing with another name changed.

    `shows` are names on the screen after the step, `had` names that the screen before may have had. If
    `whole`, these are all names, so that a missing name has disappeared.
    """
    own = _name(element).lower()
    title = title_of(after)
    if title and title != title_of(before) and not (own and own in title.lower()):
        return f'go to "{title}"'
    if after.has_ended:  # the elements of a screen after its episode are unknown
        return ""
    if new := [name for name in dict.fromkeys(shows) if name not in had and name.lower() != own]:
        return f"show {listed(new[:_SHOWN])}"
    missing = [name for name in dict.fromkeys(had) if name not in shows and name.lower() != own]
    return f"make {listed(missing[:_SHOWN])} go away" if whole and missing else ""


def title_of(screen: Screen) -> str:
    """Return the screen's route in words; empty if it is an address or an internal name.

    For `Settings > Sound` that is all of it, for `mail/settings/Account + Check mail` the last part: Check
    mail.
    """
    route = " ".join(screen.route.split())
    title = route
    if "/" in route:
        last, _, opened = route.rpartition("/")[2].rpartition(" + ")
        title = opened.rpartition(".")[2] if last else opened.removeprefix(".")
        if "." in title:
            return ""
    return "" if len(title) > MOST_CHARS or any(mark in route for mark in ":#?=") else title


def names_of(elements: Sequence[Element]) -> list[str]:
    """Return the names of elements, each once."""
    return list(dict.fromkeys(name for element in elements if (name := _name(element))))


def spoken(edge: Edge) -> str:
    """Return a step in words, e.g. `click the "Save" button`."""
    phrase = next(iter(descriptive(edge.element)), "")
    what = phrase.partition(" ")[2] or f"the {_NOUNS.get(_role(edge.element)) or edge.element.role}"
    match edge.action:
        case "type":
            return f'type "{edge.text}" into {what}'
        case "scroll":
            return f"scroll {what}"
        case "double_click":
            return f"double-click {what}"
    return f"click {what}"


def labels_of(screens: Sequence[Screen]) -> dict[str, str]:
    """Return a label for each screen by id: its title or route, and a rare name if others have the same."""
    heads = {screen.id: title_of(screen) or screen.route for screen in screens}
    shared = Counter(heads.values())
    names = {screen.id: set(names_of(screen.elements)) for screen in screens}
    count = Counter(name for own in names.values() for name in own)
    labels = {}
    for screen in screens:
        rare = sorted(names_of(screen.elements), key=lambda name: count[name])[:1]
        parts = [heads[screen.id], *(rare if shared[heads[screen.id]] > 1 else ())]
        labels[screen.id] = ": ".join(part for part in parts if part) or screen.id[:8]
    return labels


def has_own_text(element: Element) -> bool:
    """Return True if an element probably shows its name as text.

    Trees do not tell; a button that is hardly wider than high is taken as an icon.
    """
    if _NOUNS.get(_role(element)) in ("icon", "picture"):
        return False
    left, top, right, bottom = element.box
    return _NOUNS.get(_role(element)) in _WITH_TEXT or right - left > 1.5 * (bottom - top)


def _role(element: Element) -> str:
    return element.role.strip().lower()


def _name(element: Element) -> str:
    name = " ".join(element.name.split())
    return name if len(name) <= MOST_CHARS else ""


def listed(names: Sequence[str]) -> str:
    """Return names in quotation marks, joined by "and"."""
    return " and ".join(f'"{name}"' for name in names)
