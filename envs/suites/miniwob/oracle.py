"""The DOM of a page: the next action of a solution, read from it, and the page as nodes for an explorer.

oracle.js, oracle_drawing.js and oracle_forms.js have one solver for each task that can be solved in this
way. A solver reads the present state of the page and returns the next action of a solution, in CSS pixels. It
keeps no state, so that it continues from any state in which a policy left the page. elements.js reads the
tree.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from bus.errors import ActionError, EnvError, NoOracleError
from envs.contract.actions import Action, action_from_dict
from envs.contract.base import Task
from envs.contract.elements import Node
from envs.suites.miniwob.browser import TaskPage


@dataclass(frozen=True)
class PageWidget:
    """A widget on the page that can be pressed and is not covered."""

    role: str  # its HTML element: button, input, a, circle, ...
    label: str  # its text or colour; empty if it has none
    box: tuple[float, float, float, float]  # left, top, right, bottom; pixels of the screenshot


class Oracle:
    """The solver of one episode of `task` on `page`."""

    def __init__(self, page: TaskPage, task: Task, scale: float) -> None:
        self._page = page
        self._task = task
        self._scale = scale
        self._loaded = False  # whether oracle.js is loaded in the page

    def action(self) -> Action:
        """Return the next action. Raises NoOracleError if the task has no solver, EnvError if it fails."""
        name = json.dumps(self._task.params["page"])
        answer = self._ask(f"dartOracle({name})")
        if not isinstance(answer, dict):
            raise NoOracleError(f"{self._task.id} has no oracle")
        try:
            return action_from_dict(_scaled(answer, self._scale))
        except ActionError as error:
            raise EnvError(f"{self._task.id}: its oracle returned {answer}: {error}") from error

    def widgets(self) -> list[PageWidget]:
        """Return the widgets that can be pressed, on pages made of buttons, links, fields and boxes."""
        return [
            PageWidget(
                widget["role"], widget["label"], tuple(self._scale * at for at in widget["box"])
            )
            for widget in self._ask("dartWidgets()")
        ]

    def _ask(self, expression: str) -> Any:
        if not self._loaded:
            self._page.evaluate(_script())
            self._loaded = True
        return self._page.evaluate(expression)


@lru_cache(maxsize=1)
def _script() -> str:
    folder = files("envs.suites.miniwob")
    names = ("oracle.js", "oracle_drawing.js", "oracle_forms.js")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def _scaled(action: dict[str, Any], scale: float) -> dict[str, Any]:
    """Convert an action from CSS pixels to pixels of the screenshot."""
    scaled = dict(action)
    for axis in ("x", "y"):
        if axis in scaled:
            scaled[axis] = round(scaled[axis] * scale)
    if "path" in scaled:
        scaled["path"] = [[round(x * scale), round(y * scale)] for x, y in scaled["path"]]
    return scaled


MOST_NODES = 5_000
"""The largest number of nodes of a page that are read; further ones are left out."""


def read_page(page: TaskPage, scale: float) -> Node:
    """Return the page's document as nodes, without the instruction above it. Raises EnvError."""
    root = page.evaluate(f"({_tree_script()})({scale:g}, {MOST_NODES})")
    if not isinstance(root, dict):
        raise EnvError(f"the page of {page.loaded} has no tree: {root!r}")
    return _node(root)


def route_of(page: TaskPage) -> str:
    """Return the name of the document's file and the fragment of its address. Raises EnvError."""
    address = page.evaluate("[location.pathname.split('/').pop(), location.hash]")
    name, part = (str(value) for value in address)
    return name.removesuffix(".html") + (part if len(part) > 1 else "")


def _node(value: dict[str, Any]) -> Node:
    left_top_right_bottom = value["box"]
    return Node(
        role=value["role"],
        name=value["name"],
        box=None if left_top_right_bottom is None else tuple(left_top_right_bottom),
        actions=tuple(value["acts"]),
        children=[_node(child) for child in value["below"]],
        enabled=value["enabled"],
        current=value["current"],
    )


@lru_cache(maxsize=1)
def _tree_script() -> str:
    """Return a JavaScript expression, the function that reads the tree."""
    return files("envs.suites.miniwob").joinpath("elements.js").read_text(encoding="utf-8").strip()
