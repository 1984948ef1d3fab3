"""Pages of an exploration: the graph, one screen, the steps, the pictures that counted as known screens.

overview   the graph as a picture, with its numbers
screen     one screen: what was tried there, and where each step led
steps      all steps, by outcome
merges     all pictures that counted as known screens, and why
whole      the graph and every screen, for one file
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from bus.errors import UserError
from dart_cli.explore.found import paths_from, steady, tried
from dart_cli.explore.graph import DATABASE, Edge, GraphReader, Outcome, Screen
from dart_cli.explore.phrasing import labels_of, spoken
from dart_cli.inspection.curves import Series
from dart_cli.inspection.find import written_at
from dart_cli.view.charts import legend, line_chart
from dart_cli.view.graph_picture import (
    MOST_DRAWN,
    Node,
    anchor_of,
    element_marks,
    graph_picture,
    step_mark,
)
from dart_cli.view.query import ROWS, Query, page_of
from dart_cli.view.screens import screenshot
from dart_cli.view.site import LIVE_S, Site, Values, page_values

OUTCOMES: tuple[Outcome, ...] = ("moved", "none", "error")
WORDS = {"moved": "another screen", "none": "no-op", "error": "error"}
MOST_EXPORTED = 100
"""Screens with a part of their own in an exported file: those nearest to the start."""


def overview(graph: GraphReader, site: Site, query: Query) -> Values:
    """The graph of each application, and its numbers."""
    screens, edges, starts = graph.screens(), graph.edges(), graph.starts()
    tries: dict[str, list[Edge]] = defaultdict(list)
    for edge in edges:
        tries[edge.before].append(edge)
    begun = {start.screen for start in starts}
    labels = labels_of(screens)
    by_application: dict[str, list[Screen]] = defaultdict(list)
    for each in screens:
        by_application[each.application].append(each)
    pictures = [
        {
            "name": name,
            "screens": len(own),
            "hidden": max(0, len(own) - MOST_DRAWN),
            "picture": graph_picture(
                site,
                [Node(each, labels[each.id], tries[each.id], each.id in begun) for each in own],
                edges,
            ),
        }
        for name, own in by_application.items()
    ]
    return _header(graph, site, query) | {
        "facts": _facts(graph, screens, edges),
        "growth": _growth(by_application, len(edges)),
        "applications": pictures,
        "settings": sorted((key, _told(value)) for key, value in graph.settings().items()),
    }


def screen(graph: GraphReader, site: Site, query: Query, key: str) -> Values:
    """One screen. Raises UserError where there is none."""
    return _header(graph, site, query) | {"subject": _Known(graph, site).part(key)}


def whole(graph: GraphReader, site: Site) -> Values:
    """The graph, and a part for each of its first screens."""
    known = _Known(graph, site)
    first = sorted(known.screens.values(), key=lambda each: (each.depth, each.first_step))
    return overview(graph, site, Query()) | {
        "parts": [known.part(each.id) for each in first[:MOST_EXPORTED]],
        "hidden": max(0, len(first) - MOST_EXPORTED),
    }


def steps(graph: GraphReader, site: Site, query: Query) -> Values:
    """All steps, the newest first."""
    known = _Known(graph, site)
    outcome = query.one_of("outcome", OUTCOMES)
    names = sorted({each.application for each in known.screens.values()})
    application = query.one_of("application", names)
    found = [
        edge
        for edge in reversed(known.edges)
        if outcome in (None, edge.outcome)
        and application in (None, known.screens[edge.before].application)
    ]
    page = page_of(query, len(found))
    return _header(graph, site, query, reload=False) | {
        "rows": [known.step([edge]) for edge in found[page.offset : page.offset + ROWS]],
        "page": page,
        "asked": {"outcome": outcome, "application": application},
        "choices": {"outcome": OUTCOMES, "application": names},
    }


def merges(graph: GraphReader, site: Site, query: Query) -> Values:
    """All pictures that counted as known screens, the newest first."""
    known = _Known(graph, site)
    found = graph.merges()[::-1]
    page = page_of(query, len(found))
    rows = [
        known.merge(each.step, each.screen, each.screenshot, each.reason)
        for each in found[page.offset : page.offset + ROWS]
    ]
    return _header(graph, site, query, reload=False) | {"rows": rows, "page": page, "asked": {}}


class _Known:
    """What several pages show of a graph."""

    def __init__(self, graph: GraphReader, site: Site) -> None:
        self.graph = graph
        self.site = site
        self.screens = {each.id: each for each in graph.screens()}
        self._labels = labels_of(list(self.screens.values()))
        self.edges = graph.edges()
        self._tried = tried(self.edges)
        self._starts = graph.starts()
        self._merged = graph.merges()
        way = steady(self.edges)
        self._paths: dict[str, list[Edge]] = {}
        for start in dict.fromkeys(each.screen for each in self._starts):
            for target, path in paths_from(start, way).items():
                if target not in self._paths or len(path) < len(self._paths[target]):
                    self._paths[target] = path

    def part(self, key: str) -> Values:
        """Everything about one screen."""
        if key not in self.screens:
            raise UserError(
                f"no screen {key} in {self.graph.folder}; the page of the graph has all"
            )
        screen = self.screens[key]
        here = [same for (before, _, _), same in self._tried.items() if before == key]
        order = {each.place: at for at, each in enumerate(screen.elements)}
        here.sort(key=lambda same: (order.get(same[0].element.place, len(order)), same[0].step))
        arriving: dict[str, list[Edge]] = defaultdict(list)
        for edge in self.edges:
            if edge.after == key and edge.outcome == "moved":
                arriving[edge.before].append(edge)
        marks = element_marks(screen, [edge for same in here for edge in same])
        return {
            "screen": screen,
            "label": self._labels[screen.id],
            "is_start": any(start.screen == key for start in self._starts),
            "picture": self._picture(screen.screenshot, screen, marks),
            "untried": [
                each.name or each.role
                for each in screen.elements
                if not any(same[0].element.place == each.place for same in here)
            ],
            "path": [self._way(edge) for edge in self._paths.get(key, ())],
            "steps": [self.step(same) for same in here],
            "arriving": [
                {"id": before, "label": self._labels[before], "told": _ways(found)}
                for before, found in arriving.items()
            ],
            "merges": [
                self.merge(each.step, each.screen, each.screenshot, each.reason)
                for each in self._merged
                if each.screen == key
            ],
        }

    def step(self, same: Sequence[Edge]) -> Values:
        """One thing that was tried: its steps, of which the last one that moved is shown."""
        shown = next((edge for edge in reversed(same) if edge.outcome == "moved"), same[-1])
        before = self.screens[shown.before]
        afters = dict.fromkeys(edge.after for edge in same if edge.outcome == "moved")
        last = self.screens[shown.after] if shown.after else None
        return {
            "edge": shown,
            "anchor": anchor_of(before.id, shown.element.place),
            "told": spoken(shown),
            "counts": [
                (outcome, WORDS[outcome], count)
                for outcome, count in Counter(edge.outcome for edge in same).items()
            ],
            "screen": before.id,
            "label": self._labels[before.id],
            "before": self._picture(shown.shot_before, before, step_mark(shown)),
            "after": self._picture(shown.shot_after, last) if last and shown.shot_after else "",
            "leads": [(str(each), self._labels[str(each)]) for each in afters],
            "numbers": [edge.step for edge in same],
        }

    def merge(self, step: int, key: str, screenshot: str, reason: str) -> Values:
        """A picture that counted as a known screen, beside that screen's own."""
        screen = self.screens[key]
        return {
            "step": step,
            "screen": key,
            "label": self._labels[screen.id],
            "known": self._picture(screen.screenshot, screen),
            "merged": self._picture(screenshot, screen),
            "reason": reason,
        }

    def _way(self, edge: Edge) -> Values:
        return {
            "id": edge.before,
            "label": self._labels[edge.before],
            "told": spoken(edge),
        }

    def _picture(self, key: str, screen: Screen, over: Markup | str = "") -> Markup:
        """A screenshot of a screen's size, with what is drawn over it."""
        size = screen.width, screen.height
        return screenshot(self.site.picture(key, *size), *size, over)


def _header(graph: GraphReader, site: Site, query: Query, *, reload: bool = True) -> Values:
    """What all pages show; a page of a live exploration is loaded again from time to time."""
    silent_s = time.time() - written_at(graph.folder / DATABASE)
    heard = silent_s if silent_s < LIVE_S else None
    return page_values(site, query, graph.folder, silent_s=heard, reload=reload)


def _facts(
    graph: GraphReader, screens: Sequence[Screen], edges: Sequence[Edge]
) -> list[tuple[str, str]]:
    count = Counter(edge.outcome for edge in edges)
    share = count["none"] / len(edges) if edges else 0.0
    return [
        ("screens", str(len(screens))),
        ("greatest depth", str(max((each.depth for each in screens), default=0))),
        ("steps", str(len(edges))),
        ("no-ops", f"{count['none']} ({share:.0%})"),
        ("errors", str(count["error"])),
        ("episodes", str(len(graph.starts()))),
        ("merged pictures", str(len(graph.merges()))),
    ]


def _growth(screens: dict[str, list[Screen]], last: int) -> Markup:
    """Distinct screens against steps, by application."""
    lines = []
    for at, (name, own) in enumerate(screens.items()):
        points: list[tuple[float, float]] = []
        for count, each in enumerate(sorted(own, key=lambda one: one.first_step), start=1):
            points += [(each.first_step, count - 1), (each.first_step, count)] if points else []
            points = points or [(each.first_step, 1)]
        lines.append(Series(name, [*points, (last, len(own))], f"t{at % 12}"))
    chart = line_chart(lines, width=900, height=200, low=0.0, label="distinct screens by step")
    return chart and chart + (legend(lines) if len(lines) > 1 else Markup(""))


def _ways(edges: Sequence[Edge]) -> str:
    return "; ".join(dict.fromkeys(spoken(edge) for edge in edges))


def _told(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value in (None, "") else str(value)
