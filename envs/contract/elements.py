"""What an explorer needs from an environment: the elements on a screen, and an id of the screen.

    Element             one thing that can be seen and reached: role, name, box, actions, place
    ScreenState         the id of a screen, and the reason why two screens have the same id
    Explorable          the methods `elements()` and `state()`, which are optional for a GuiEnv
    Node                one node of the tree that an environment reads: a widget, a DOM or accessibility node
    elements_of         the elements of a tree, in reading order
    state_of            the state of a tree: a digest of its route and its skeleton
    grid_elements       cells to click, for a screen without a tree
    GridEnv             makes any GuiEnv explorable: its elements are cells, its state is a coarse picture
    as_explorable       an environment itself if it is Explorable, else in a GridEnv
    make_explorable     an environment of a suite, made explorable
    element_from_dict   an element from its JSON form (dataclasses.asdict)
    performing          an operation on an element, as actions of `envs.contract.actions`

Every environment with a tree converts it into `Node`s, so that places, reading order and skeletons are the
same everywhere:

- A node without a role is layout. It counts if it groups two nodes or more; otherwise it is left out.
- `place` is the path from the root, as numbers among siblings. Nodes that are scrolled out of sight are
  counted, so that scrolling does not change a place.
- The skeleton has the roles of the visible nodes, to `DEPTH` levels, without any text. Neighbours of equal
  shape in a list count once (`REPEATED`): an inbox with five mails and one with six are the same screen.
  The open tab, page or menu counts (`current`), and so does what cannot be used (`enabled`).
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, Literal, Protocol, runtime_checkable

from PIL import Image

from bus.errors import EnvError
from envs.contract.actions import Action, Click, DoubleClick, Scroll, TripleClick, Type
from envs.contract.base import GuiEnv, Observation, Verdict
from envs.contract.registry import load_suite, make_env
from envs.contract.screenshots import as_seen

Operation = Literal["click", "double_click", "type", "scroll"]
Box = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels of the screenshot; right and bottom are one past the last pixel."""

DEPTH = 10  # levels of a skeleton
SCROLL_NOTCHES = 3  # downwards, of the operation `scroll`
LONGEST_NAME = 200  # characters of an element's name that are kept
REPEATED = frozenset(
    {"", "area", "row", "option", "list item", "tree item", "table row", "cell", "text"}
)
"""Roles whose neighbours of equal shape count once; "" is a group of nodes, such as a card."""


@dataclass(frozen=True)
class Element:
    """One thing on the screen that can be seen and reached."""

    role: str  # button, link, field, row, ...: the environment's own word
    name: str  # its text or label; empty if it has none
    box: Box  # the part that can be seen
    actions: tuple[Operation, ...]  # at least one
    place: str  # its path in the tree: unique on the screen, the same at the next visit

    @property
    def centre(self) -> tuple[int, int]:
        """The pixel to act on, in the middle of the box."""
        left, top, right, bottom = self.box
        return (left + right) // 2, (top + bottom) // 2


@dataclass(frozen=True)
class ScreenState:
    """The state of a screen: two visits with the same `id` are visits of one screen."""

    id: str  # 32 hex digits
    route: str  # the place in the application, in words or as an address; empty if unknown
    reason: str  # what was compared, which is why two screens with this id count as one


@runtime_checkable
class Explorable(Protocol):
    """A GuiEnv that reports the elements on its screen.

    Optional: GridEnv does that for any other environment.
    """

    def elements(self) -> list[Element]:
        """Return the elements that can be seen and reached now, in reading order. Raises EnvError."""
        ...

    def state(self) -> ScreenState:
        """Return the state of the present screen. Raises EnvError."""
        ...


@dataclass
class Node:
    """One node of the tree that an environment reads from its screen."""

    role: str = ""  # empty: layout
    name: str = ""
    box: Box | None = None  # the visible part; None if nothing of it is visible
    actions: tuple[Operation, ...] = ()  # empty for a node that only shows or groups something
    children: list[Node] = field(default_factory=list)
    enabled: bool = True
    current: bool = False  # the open tab, page or menu
    listed: bool = False  # one of a list, whatever its role


def elements_of(roots: Sequence[Node]) -> list[Element]:
    """Return the visible, enabled nodes with actions as elements, in reading order."""
    elements = [
        Element(
            node.role, " ".join(node.name.split())[:LONGEST_NAME], node.box, node.actions, place
        )
        for node, place in _placed(roots)
        if node.box is not None and node.actions and node.enabled
    ]
    return in_reading_order(elements)


def state_of(route: str, roots: Sequence[Node]) -> ScreenState:
    """Return the state of a screen: its route, and a digest of the route and the skeleton of `roots`."""
    shapes = _shapes([part for root in roots if (part := _visible_part(root)) is not None], DEPTH)
    skeleton = " ".join(shapes)
    key = hashlib.blake2b(f"{route}\n{skeleton}".encode(), digest_size=16).hexdigest()
    count = sum(1 for _ in _placed(roots))
    at = f"route {route!r}" if route else "no route"
    reason = f"{at}; roles of {count} nodes to depth {DEPTH} compared, texts left out"
    return ScreenState(key, route, reason)


def in_reading_order(elements: Iterable[Element]) -> list[Element]:
    """Return the elements sorted by line, and from left to right within a line.

    An element is on a line if its middle is above the bottom of each element of that line.
    """
    lines: list[list[Element]] = []
    bottom = 0  # of the line, pixels
    for element in sorted(elements, key=lambda item: (item.centre[1], item.centre[0])):
        if lines and element.centre[1] < bottom:
            lines[-1].append(element)
            bottom = min(bottom, element.box[3])
        else:
            lines.append([element])
            bottom = element.box[3]
    return [item for line in lines for item in sorted(line, key=lambda item: item.centre)]


def grid_elements(width: int, height: int, *, columns: int = 12, rows: int = 8) -> list[Element]:
    """Return cells to click, line by line, and the whole screen as an element to scroll."""
    across = [width * at // columns for at in range(columns + 1)]
    down = [height * at // rows for at in range(rows + 1)]
    cells = [
        Element("cell", "", (left, top, right, bottom), ("click",), f"{row},{column}")
        for row, (top, bottom) in enumerate(pairwise(down))
        for column, (left, right) in enumerate(pairwise(across))
        if left < right and top < bottom
    ]
    return [*cells, Element("screen", "", (0, 0, width, height), ("scroll",), "screen")]


def element_from_dict(value: Mapping[str, Any]) -> Element:
    """Return the element with the fields in `value`, which has lists in place of tuples."""
    left, top, right, bottom = value["box"]
    return Element(
        value["role"],
        value["name"],
        (left, top, right, bottom),
        tuple(value["actions"]),
        value["place"],
    )


def performing(element: Element, operation: Operation, text: str = "") -> list[Action]:
    """Return the actions of an operation on an element; `type` replaces the text of a field by `text`."""
    x, y = element.centre
    match operation:
        case "click":
            return [Click(x=x, y=y)]
        case "double_click":
            return [DoubleClick(x=x, y=y)]
        case "type":
            return [TripleClick(x=x, y=y), Type(text=text)]
        case "scroll":
            return [Scroll(x=x, y=y, dy=SCROLL_NOTCHES)]


# --- the tree without layout --------------------------------------------------------------------


def _placed(roots: Sequence[Node]) -> Iterator[tuple[Node, str]]:
    """Yield every node that counts, with its place, depth first."""
    waiting = [(node, f"{at}") for at, node in reversed([*enumerate(_simple(roots))])]
    while waiting:
        node, place = waiting.pop()
        yield node, place
        below = [*enumerate(_simple(node.children))]
        waiting += [(child, f"{place}.{at}") for at, child in reversed(below)]


def _simple(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes without the layout nodes that group fewer than two."""
    return [rest for node in nodes if (rest := _without_layout(node)) is not None]


def _without_layout(node: Node) -> Node | None:
    """Return the node; for a layout node its child if it has one, and None if it has none."""
    while not node.role and not node.actions:
        children = _simple(node.children)
        if len(children) != 1:
            return Node(box=node.box, children=children) if children else None
        node = children[0]
    return node


def _visible_part(node: Node) -> Node | None:
    """Return the node with the visible nodes below it; None if neither it nor any of them is visible."""
    children = [rest for child in node.children if (rest := _visible_part(child)) is not None]
    if node.box is None and not children:
        return None
    role = node.role if node.box is not None else ""
    return Node(role, "", node.box, (), children, node.enabled, node.current, node.listed)


def _shapes(nodes: Sequence[Node], depth: int) -> list[str]:
    """Return the shape of each node; neighbours in a list with equal shapes count once."""
    shapes: list[str] = []
    shapes_of_nodes = [(_is_repeated(node), _shape(node, depth)) for node in _simple(nodes)]
    for (repeated, shape), same in groupby(shapes_of_nodes):
        shapes += [shape] if repeated else [shape for _ in same]
    return shapes


def _is_repeated(node: Node) -> bool:
    return node.listed or node.role in REPEATED


def _shape(node: Node, depth: int) -> str:
    marks = ("!" if node.current else "") + ("" if node.enabled else "~")
    below = " ".join(_shapes(node.children, depth - 1)) if depth > 1 else ""
    return f"{node.role}{marks}({below})" if below else f"{node.role}{marks}"


COARSE = 24
"""Number of cells of a coarse picture, across and down."""

STEP = 6
"""The least difference between two neighbouring cells that counts, in grey levels of 255."""


def make_explorable(suite: str, **options: object) -> tuple[GuiEnv, Explorable]:
    """Return an environment of `suite`, and the object that reports its elements (often the same).

    `options` are as for envs.contract.registry.make_env. The text `accessibility` is requested if the suite
    gives it, since its elements come from that tree. Raises TaskError.
    """
    has_tree_text = "accessibility" in getattr(load_suite(suite), "observes", ())
    return as_explorable(
        make_env(suite, observe=("accessibility",) if has_tree_text else (), **options)
    )


def as_explorable(env: GuiEnv) -> tuple[GuiEnv, Explorable]:
    """Return the environment to play, and the object that reports its elements.

    Both are `env` itself if it is Explorable, else a GridEnv that plays it.
    """
    if isinstance(env, Explorable):
        return env, env
    grid = GridEnv(env)
    return grid, grid


def grid_state(observation: Observation) -> ScreenState:
    """Return the state of a screen without a tree: by the suite's own key, else by a coarse picture."""
    if observation.screen_key:
        return ScreenState(
            observation.screen_key, "", "no tree; the environment's own key of the screen"
        )
    with Image.open(io.BytesIO(observation.screenshot)) as picture:
        key = coarse_key(as_seen(picture))
    return ScreenState(key, "", f"no tree; light and dark of {COARSE}x{COARSE} cells compared")


def coarse_key(screen: Image.Image) -> str:
    """Return a difference hash of a screen, 32 hex digits.

    Two screens have the same hash if for each cell its right neighbour is darker, lighter or neither on both
    of them.
    """
    import numpy as np  # here, so that importing this module does not load it

    small = screen.convert("L").resize((COARSE + 1, COARSE), Image.Resampling.BOX)
    cells = np.asarray(small, dtype=np.int16)
    steps = cells[:, 1:] - cells[:, :-1]
    signs = (np.sign(steps) * (np.abs(steps) >= STEP)).astype(np.int8)
    return hashlib.blake2b(signs.tobytes(), digest_size=16).hexdigest()


class GridEnv:
    """An explorable environment that plays `env`: its elements are cells, its states coarse pictures."""

    def __init__(self, env: GuiEnv, *, columns: int = 12, rows: int = 8) -> None:
        self.env = env
        self.columns = columns
        self.rows = rows
        self._observation: Observation | None = None

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Reset `env`."""
        self._observation, info = self.env.reset(seed=seed, options=options)
        return self._observation, info

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform one action in `env`."""
        self._observation, reward, terminated, truncated, info = self.env.step(action)
        return self._observation, reward, terminated, truncated, info

    def evaluate(self) -> Verdict:
        """Return the verdict of `env`."""
        return self.env.evaluate()

    def close(self) -> None:
        """Close `env`."""
        self._observation = None
        self.env.close()

    def elements(self) -> list[Element]:
        """Return the cells of the grid, and the whole screen as an element to scroll."""
        observation = self._last()
        return grid_elements(
            observation.width, observation.height, columns=self.columns, rows=self.rows
        )

    def state(self) -> ScreenState:
        """Return the state by the suite's own key if it gives one, else by a coarse picture."""
        return grid_state(self._last())

    def _last(self) -> Observation:
        if self._observation is None:
            raise EnvError("no episode is being played; call reset first")
        return self._observation
