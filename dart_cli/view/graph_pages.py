"""Pages of an exploration: the graph, one screen, the steps, the pictures that counted as known screens.

overview   the graph as a picture, with its numbers
screen     one screen: what was tried there, and where each step led
steps      all steps, by outcome
merges     all pictures that counted as known screens, and why
whole      the graph and every screen, for one file
GraphView  what all pages know of a graph, and how they draw it
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from markupsafe import Markup

from bus.errors import UserError
from dart_cli.explore.found import paths_from, steady, tried
from dart_cli.explore.graph import DATABASE, Edge, GraphReader, Merge, Outcome, Screen
from dart_cli.explore.phrasing import labels_of, spoken
from dart_cli.inspection.curves import Series
from dart_cli.inspection.find import written_at
from dart_cli.view.charts import TASK_COLOURS, legend, line_chart
from dart_cli.view.graph_picture import (
    MOST_DRAWN,
    anchor_of,
    element_marks,
    graph_picture,
    step_mark,
)
from dart_cli.view.query import ROWS, Query, page_of
from dart_cli.view.screens import screenshot
from dart_cli.view.site import LIVE_S, Site, Values, page_values

OUTCOMES: tuple[Outcome, ...] = ("moved", "none", "error")
MOST_EXPORTED = 100
"""Screens with a part of their own in an exported file: those nearest to the start."""


def overview(graph: GraphReader, site: Site, query: Query) -> Values:
    """The graph of each application, and its numbers."""
    known = GraphView(graph, site)
    applications: dict[str, list[Screen]] = defaultdict(list)
    for each in known.screens.values():
        applications[each.application].append(each)
    return _page(known, query) | {
        "growth": _growth(applications, len(known.edges)),
        "applications": [
            (name, own, graph_picture(site, own, known.edges, known.labels, known.starts))
            for name, own in applications.items()
        ],
        "most_drawn": MOST_DRAWN,
        "settings": sorted((key, _told(value)) for key, value in graph.settings().items()),
    }


def screen(graph: GraphReader, site: Site, query: Query, key: str) -> Values:
    """One screen. Raises UserError where there is none."""
    known = GraphView(graph, site)
    if key not in known.screens:
        raise UserError(f"no screen {key} in {graph.folder}; the page of the graph has all")
    return _page(known, query) | {"shown": known.screens[key]}


def whole(graph: GraphReader, site: Site) -> Values:
    """The graph, and a part for each of its first screens."""
    screens = sorted(graph.screens(), key=lambda each: (each.depth, each.first_step))
    hidden = max(0, len(screens) - MOST_EXPORTED)
    return overview(graph, site, Query()) | {"parts": screens[:MOST_EXPORTED], "hidden": hidden}


def steps(graph: GraphReader, site: Site, query: Query) -> Values:
    """All steps, the newest first."""
    known = GraphView(graph, site)
    names = sorted({each.application for each in known.screens.values()})
    outcome, application = query.one_of("outcome", OUTCOMES), query.one_of("application", names)
    found = [
        edge
        for edge in reversed(known.edges)
        if outcome in (None, edge.outcome)
        and application in (None, known.screens[edge.before].application)
    ]
    page = page_of(query, len(found))
    return _page(known, query, reload=False) | {
        "rows": found[page.offset : page.offset + ROWS],
        "page": page,
        "asked": {"outcome": outcome, "application": application},
        "choices": {"outcome": OUTCOMES, "application": names},
    }


def merges(graph: GraphReader, site: Site, query: Query) -> Values:
    """All pictures that counted as known screens, the newest first."""
    known = GraphView(graph, site)
    page = page_of(query, len(known.merges))
    rows = known.merges[::-1][page.offset : page.offset + ROWS]
    return _page(known, query, reload=False) | {"rows": rows, "page": page, "asked": {}}


class GraphView:
    """A graph as the pages show it."""

    def __init__(self, graph: GraphReader, site: Site) -> None:
        self.site = site
        self.folder = graph.folder
        self.screens = {each.id: each for each in graph.screens()}
        self.labels = labels_of(list(self.screens.values()))
        self.edges, self.merges = graph.edges(), graph.merges()
        self.episodes = graph.starts()
        self.starts = {each.screen for each in self.episodes}
        self._tried = tried(self.edges)
        way = steady(self.edges)
        self.paths: dict[str, list[Edge]] = {}  # the shortest from a start to each other screen
        for start in dict.fromkeys(each.screen for each in self.episodes):
            for target, path in paths_from(start, way).items():
                if target not in self.paths or len(path) < len(self.paths[target]):
                    self.paths[target] = path

    def tried_on(self, screen: Screen) -> list[list[Edge]]:
        """The steps of each thing that was tried there, in the order of its elements."""
        here = [same for (before, _, _), same in self._tried.items() if before == screen.id]
        order = {each.place: at for at, each in enumerate(screen.elements)}
        return sorted(
            here, key=lambda same: (order.get(same[0].element.place, len(order)), same[0].step)
        )

    def untried(self, screen: Screen) -> list[str]:
        """Names of the elements that nothing was tried on."""
        places = {same[0].element.place for same in self.tried_on(screen)}
        return [each.name or each.role for each in screen.elements if each.place not in places]

    def arriving(self, screen: Screen) -> dict[str, str]:
        """The screens with steps to it -> these steps in words."""
        ways: dict[str, dict[str, None]] = defaultdict(dict)
        for edge in self.edges:
            if edge.after == screen.id and edge.outcome == "moved":
                ways[edge.before][spoken(edge)] = None
        return {before: "; ".join(found) for before, found in ways.items()}

    def merged(self, screen: Screen) -> list[Merge]:
        """The pictures that counted as this screen."""
        return [each for each in self.merges if each.screen == screen.id]

    def telling(self, same: Sequence[Edge]) -> Edge:
        """Of the steps of one thing the one that is shown: the last that moved."""
        return next((edge for edge in reversed(same) if edge.outcome == "moved"), same[-1])

    def outcomes(self, same: Sequence[Edge]) -> dict[Outcome, int]:
        """How often each came of it."""
        return Counter(edge.outcome for edge in same)

    def leads(self, same: Sequence[Edge]) -> list[str]:
        """The screens that it led to."""
        return list(dict.fromkeys(str(edge.after) for edge in same if edge.outcome == "moved"))

    def anchor(self, edge: Edge) -> str:
        """The name of its element's part of its screen's page."""
        return anchor_of(edge.before, edge.element.place)

    def words(self, edge: Edge) -> str:
        """What it does."""
        return spoken(edge)

    def whole_picture(self, screen: Screen) -> Markup:
        """The screen with its elements."""
        edges = [edge for same in self.tried_on(screen) for edge in same]
        return self.picture(screen, screen.screenshot, element_marks(screen, edges))

    def before(self, edge: Edge) -> Markup:
        """The screen that a step left, with where it acted."""
        return self.picture(self.screens[edge.before], edge.shot_before, step_mark(edge))

    def after(self, edge: Edge) -> Markup:
        """The screen that it led to; empty for none."""
        if not (edge.after and edge.shot_after):
            return Markup("")
        return self.picture(self.screens[edge.after], edge.shot_after)

    def picture(self, screen: Screen, key: str, over: Markup | str = "") -> Markup:
        """A screenshot of a screen's size, with what is drawn over it."""
        size = screen.width, screen.height
        return screenshot(self.site.picture(key, *size), *size, over)


def _page(known: GraphView, query: Query, *, reload: bool = True) -> Values:
    """What all pages show; a page of a live exploration is loaded again from time to time."""
    silent_s = time.time() - written_at(known.folder / DATABASE)
    heard = silent_s if silent_s < LIVE_S else None
    page = page_values(known.site, query, known.folder, silent_s=heard, reload=reload)
    return page | {"known": known}


def _growth(screens: dict[str, list[Screen]], last: int) -> Markup:
    """Distinct screens against steps, by application."""
    lines = []
    for at, (name, own) in enumerate(screens.items()):
        points: list[tuple[float, float]] = []
        for count, each in enumerate(sorted(own, key=lambda one: one.first_step), start=1):
            points += [(each.first_step, count - 1), (each.first_step, count)] if points else []
            points = points or [(each.first_step, 1)]
        lines.append(Series(name, [*points, (last, len(own))], f"t{at % TASK_COLOURS}"))
    chart = line_chart(lines, width=900, height=200, low=0.0, label="distinct screens by step")
    return chart and chart + (legend(lines) if len(lines) > 1 else Markup(""))


def _told(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value in (None, "") else str(value)
