"""A page as a tree of nodes, read from Chromium: what can be used on it, and where it is.

    read_page    the page's tree: roles and names from the accessibility tree, places from a layout snapshot
    route_of     the address of a page without its host and its query, which may name a session

Two commands read a page: `Accessibility.getFullAXTree` for each document, `DOMSnapshot.captureSnapshot` for
all of them. Both name DOM nodes by the same ids (`backendDOMNodeId`). `DOM.getNodeForLocation` says which node
a click in the middle of an element reaches, so that covered elements have no actions. Frames of other sites,
which run in other processes, are not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from envs.contract.elements import Box, Node, Operation
from envs.tools.browser.cdp import Call, CdpResult
from envs.tools.browser.tab import Tab

MOST_NODES = 5_000
"""Most nodes of a page that are read; further ones are left out."""

MOST_LEVELS = 100
"""Most levels of a page that are read; what is deeper is left out."""

ROLES: Mapping[str, str] = {
    "StaticText": "text",
    "textbox": "field",
    "searchbox": "field",
    "spinbutton": "field",
    "combobox": "combo",
    "listitem": "list item",
    "treeitem": "tree item",
    "row": "table row",
    "gridcell": "cell",
    "menuitem": "menu item",
    "menuitemcheckbox": "menu item",
    "menuitemradio": "menu item",
    "DisclosureTriangle": "button",
}
"""Chromium's role -> the role of a Node, where they differ."""

LAYOUT = frozenset("generic none paragraph RootWebArea Iframe LabelText Section".split())
"""Chromium's roles of nodes that only group others."""

PRESSED = frozenset(
    {"button", "link", "checkbox", "radio", "tab", "option", "combo", "field", "slider", "switch"}
    | {"menu item", "tree item"}
)
"""Roles that are pressed, whether or not a script listens for it."""

PARTS = ("list item", "table row", "cell")
"""Roles that are pressed if the list or table around them listens."""

Rect = tuple[float, float, float, float]
"""Left, top, right, bottom in pixels of the screenshot."""


def read_page(tab: Tab) -> Node:
    """Return the tree of the page, in pixels of its screenshots. Raises EnvError."""
    scale, (width, height) = tab.rules.scale, tab.rules.size
    styles = ["overflow-x", "overflow-y", "position"]
    snapshot = tab.session.call(
        "DOMSnapshot.captureSnapshot", computedStyles=styles, includeDOMRects=True
    )
    layout = _Layout(snapshot, (0.0, 0.0, width * scale, height * scale))
    replies = tab.session.send(
        [Call("Accessibility.getFullAXTree", {"frameId": frame}) for frame in layout.frames]
    )
    root = _TreeReader([reply["nodes"] for reply in replies], layout).read()
    _leave_out_covered(tab, root, layout)
    return root


def route_of(tab: Tab) -> str:
    """Return the path and the fragment of the page's address. Raises EnvError."""
    return str(tab.evaluate("location.pathname + location.hash"))


# --- places ---------------------------------------------------------------------------------------


@dataclass
class _Place:
    """A DOM node of the snapshot."""

    parent: int  # the DOM node around it; 0 for none
    rect: Rect | None = None  # all of it; None if it has no layout
    visible: Rect | None = None  # what nothing around it cuts off
    listens: bool = False  # for presses
    scrolls: bool = False


class _Layout:
    """The places of all DOM nodes, by their ids, and the documents that frames show."""

    def __init__(self, snapshot: CdpResult, screen: Rect) -> None:
        self.screen = screen
        self.places: dict[int, _Place] = {}
        self.document_in: dict[int, int] = {}  # DOM node of a frame -> number of its document
        self._strings: Sequence[str] = snapshot["strings"]
        documents: Sequence[CdpResult] = snapshot["documents"]
        self.frames = [self._text(document["frameId"]) for document in documents]
        self.scrolled = tuple(documents[0].get(f"scrollOffset{axis}", 0.0) for axis in "XY")
        waiting = [(0, (0.0, 0.0), screen)]
        while waiting:
            number, corner, frame = waiting.pop()
            waiting += self._add(documents[number], corner, frame)
        if documents[0].get("contentHeight", 0) > screen[3] + 1:
            self.places[documents[0]["nodes"]["backendNodeId"][0]].scrolls = True

    def _add(
        self, document: CdpResult, corner: tuple[float, float], frame: Rect
    ) -> Iterator[tuple[int, tuple[float, float], Rect]]:
        """Add the nodes of a document that begins at `corner` and shows within `frame`.

        Yields (number, corner, frame) of each document in a frame of this one.
        """
        nodes, layout = document["nodes"], document["layout"]
        ids: Sequence[int] = nodes["backendNodeId"]
        # 1. All nodes, also those without a layout.
        for dom_id, parent in zip(ids, nodes["parentIndex"], strict=True):
            self.places[dom_id] = _Place(ids[parent] if parent >= 0 else 0)
        for at in nodes.get("isClickable", {}).get("index", []):
            self.places[ids[at]].listens = nodes["nodeType"][at] == 1 and not self._is_page(
                nodes, at
            )
        # 2. Where they are. A node comes after the node around it.
        left = corner[0] - document.get("scrollOffsetX", 0.0)
        top = corner[1] - document.get("scrollOffsetY", 0.0)
        inner: dict[int, Rect | None] = {}  # DOM node -> what it lets its children show in
        rows = zip(
            *(
                layout[key]
                for key in ("nodeIndex", "bounds", "styles", "scrollRects", "clientRects")
            ),
            strict=True,
        )
        for at, (x, y, width, height), styles, scrolled, client in rows:
            place = self.places[ids[at]]
            overflow_x, overflow_y, position = (
                map(self._text, styles) if styles else ("visible",) * 3
            )
            around = (
                frame if position in ("absolute", "fixed") else self._inner(place, inner, frame)
            )
            place.rect = (x + left, y + top, x + left + width, y + top + height)
            place.visible = _cut(place.rect, around)
            clips = (overflow_x, overflow_y) != ("visible", "visible")
            inner[ids[at]] = place.visible if clips else around
            if scrolled and client and overflow_y in ("auto", "scroll"):
                place.scrolls = scrolled[3] > client[3] + 1
        # 3. The documents in its frames.
        contents = nodes.get("contentDocumentIndex", {"index": [], "value": []})
        for at, number in zip(contents["index"], contents["value"], strict=True):
            place = self.places[ids[at]]
            if place.rect is not None and place.visible is not None:
                self.document_in[ids[at]] = number
                yield number, place.rect[:2], place.visible

    def _is_page(self, nodes: CdpResult, at: int) -> bool:
        """Return True for the elements that are the whole page; scripts listen there for its parts."""
        return self._text(nodes["nodeName"][at]) in ("HTML", "BODY")

    def _inner(self, place: _Place, inner: Mapping[int, Rect | None], frame: Rect) -> Rect | None:
        """Return what the nearest node around a place lets its children show in."""
        at = place.parent
        while at and at not in inner:
            at = self.places[at].parent
        return inner[at] if at else frame

    def _text(self, index: int) -> str:
        return self._strings[index] if index >= 0 else ""


def _cut(rect: Rect, frame: Rect | None) -> Rect | None:
    """Return the part of `rect` within `frame`; None if there is none."""
    if frame is None:
        return None
    left, top = max(rect[0], frame[0]), max(rect[1], frame[1])
    right, bottom = min(rect[2], frame[2]), min(rect[3], frame[3])
    return (left, top, right, bottom) if left < right and top < bottom else None


def _pixels(rect: Rect | None) -> Box | None:
    """Return the pixels whose upper left corners are within a rectangle; None if there are none."""
    if rect is None:
        return None
    left, top, right, bottom = (math.ceil(edge - 1e-3) for edge in rect)
    return (left, top, right, bottom) if left < right and top < bottom else None


# --- the tree -------------------------------------------------------------------------------------


@dataclass
class _PageNode(Node):
    """A node with the id of its DOM node."""

    dom_id: int = 0


class _TreeReader:
    """Makes nodes of the accessibility trees of a page's documents."""

    def __init__(self, trees: Sequence[Sequence[CdpResult]], layout: _Layout) -> None:
        self._trees = trees
        self._by_id = [{node["nodeId"]: node for node in tree} for tree in trees]
        self._layout = layout
        self._count = 0

    def read(self) -> Node:
        """Return the first document's tree, with those of its frames within it."""
        root = self._trees[0][0]
        node = Node(box=_pixels(self._layout.screen), children=self._below(0, root, 1))
        if self._place(root).scrolls:
            node.role, node.actions = "view", ("scroll",)
        return node

    def _place(self, node: CdpResult) -> _Place:
        return self._layout.places.get(node.get("backendDOMNodeId", 0), _Place(0))

    def _below(self, number: int, node: CdpResult, level: int) -> list[Node]:
        """Return the nodes below a node of document `number`, which are on a level of the page."""
        if level > MOST_LEVELS:
            return []
        nodes = self._by_id[number]
        children = (nodes[child] for child in node.get("childIds", []) if child in nodes)
        nodes_below = [self._page_node(number, child, level) for child in children]
        return [below for below in nodes_below if below is not None]

    def _page_node(self, number: int, node: CdpResult, level: int) -> Node | None:
        """Return a node with all below it; None for a line of a text, and beyond MOST_NODES."""
        chromium_role = node.get("role", {}).get("value", "")
        self._count += 1
        if chromium_role == "InlineTextBox" or self._count > MOST_NODES:
            return None
        # 1. What it is.
        dom_id, place = node.get("backendDOMNodeId", 0), self._place(node)
        is_layout = node.get("ignored", False) or chromium_role in LAYOUT
        role = "" if is_layout else ROLES.get(chromium_role, chromium_role)
        properties = {
            each["name"]: each["value"].get("value") for each in node.get("properties", [])
        }
        # 2. What is below it: in a frame, the document there.
        children = self._below(number, node, level + 1)
        if (inner := self._layout.document_in.get(dom_id)) is not None and self._trees[inner]:
            children = self._below(inner, self._trees[inner][0], level + 1)
        page_node = _PageNode(
            role=role,
            name="" if is_layout else " ".join(str(node.get("name", {}).get("value", "")).split()),
            box=_pixels(place.visible),
            children=children,
            enabled=not properties.get("disabled", False),
            current=True in (properties.get("selected"), properties.get("expanded")),
            dom_id=dom_id,
        )
        # 3. What can be done with it.
        is_pressed = role in PRESSED or (place.listens and _press_parts(page_node))
        acts: list[Operation] = ["click"] if is_pressed else []
        if is_pressed and properties.get("editable") and not properties.get("readonly"):
            acts.append("type")
        if place.scrolls:
            acts.append("scroll")
        page_node.actions = tuple(acts)
        if is_pressed:
            page_node.name = page_node.name or _words(page_node)
            page_node.role = page_node.role or ("area" if page_node.name else "icon")
            page_node.children = [child for child in page_node.children if child.role != "text"]
        elif place.scrolls:
            page_node.role = page_node.role or "view"
        return page_node


def _press_parts(node: Node) -> bool:
    """Return True if a node that listens is pressed itself.

    One that listens for nodes below it is not; of a list or a table, the parts are pressed.
    """
    below = [*_all(node.children)]
    if any("click" in each.actions for each in below):
        return False
    parts = [each for each in below if each.role in PARTS]
    for part in parts:
        part.actions = ("click", *part.actions)
        part.name = part.name or _words(part)
    return not parts


def _all(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        yield from _all(node.children)


def _words(node: Node) -> str:
    """Return the texts within a node."""
    return " ".join(each.name for each in _all(node.children) if each.role == "text")


# --- what is covered ------------------------------------------------------------------------------


def _leave_out_covered(tab: Tab, root: Node, layout: _Layout) -> None:
    """Take the presses from elements whose middle is covered: by a dialog, say.

    Chromium counts these places from the corner of the document, however far it is scrolled.
    """
    scale = tab.rules.scale
    pressed = [
        (node, node.box)
        for node in _all(root.children)
        if isinstance(node, _PageNode) and node.box is not None and "click" in node.actions
    ]
    acting = {node.dom_id for node, _ in pressed}
    calls = [
        Call(
            "DOM.getNodeForLocation",
            {
                "x": int(((left + right) // 2 + layout.scrolled[0]) / scale),
                "y": int(((top + bottom) // 2 + layout.scrolled[1]) / scale),
                "includeUserAgentShadowDOM": False,
            },
        )
        for _, (left, top, right, bottom) in pressed
    ]
    for (node, _), reached in zip(pressed, tab.session.send(calls) if calls else [], strict=True):
        at = reached["backendNodeId"]
        while at and at not in acting:
            at = layout.places.get(at, _Place(0)).parent
        if at != node.dom_id:
            node.actions = tuple(act for act in node.actions if act not in ("click", "type"))
