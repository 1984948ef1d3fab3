"""The pages of an exploration. Each of the first five functions returns the values for a template.

overview       the graph as a picture, with its numbers
screen         one screen: the elements that were tried, and where each step led
steps          all steps, filtered by outcome
merges         all pictures that counted as known screens, with the reasons
whole          the graph and its screens, for an exported file
GraphView      a graph as the pages show it
graph_picture  the screens of one application as a tree of the steps that found them, a column for each depth
places         where each screen stands in that picture
element_marks  boxes around the elements of a screen
step_mark      a mark where a step acted
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from markupsafe import Markup

from bus.errors import UserError
from dart_cli.explore.graph import DATABASE, Edge, GraphReader, Merge, Outcome, Screen
from dart_cli.explore.paths import paths_from, steady, tried
from dart_cli.explore.phrasing import labels_of, spoken
from dart_cli.inspection.curves import Series
from dart_cli.inspection.run_lookup import written_at
from dart_cli.view.charts import TASK_COLOURS, legend, line_chart
from dart_cli.view.screenshot_svg import screenshot
from dart_cli.view.site import LIVE_S, ROWS, Query, Site, Values, page_of, page_values
from envs.contract.elements import Element

OUTCOMES: tuple[Outcome, ...] = ("moved", "none", "error")
WIDE, HIGH = 132, 100
"""Pixels of a screen's picture, at most."""
LABEL = 34  # pixels of the two lines below the picture
ACROSS, DOWN = WIDE + 64, HIGH + LABEL + 14
MOST_DRAWN = 200
"""Screens in one picture, at most: those nearest to the start."""
_CHARS = 21  # characters of a line below a screen
MOST_EXPORTED = 100
"""Screens with their own section in an exported file, at most: those nearest to the start."""


def overview(graph: GraphReader, site: Site, query: Query) -> Values:
    """Return the values of the graph's page: a picture for each application, and numbers."""
    view = GraphView(graph, site)
    applications: dict[str, list[Screen]] = defaultdict(list)
    for screen in view.screens.values():
        applications[screen.application].append(screen)
    return _page(view, query) | {
        "growth": _growth(applications, len(view.edges)),
        "applications": [
            (name, screens, graph_picture(site, screens, view.edges, view.labels, view.starts))
            for name, screens in applications.items()
        ],
        "most_drawn": MOST_DRAWN,
        "settings": sorted((key, _setting_text(value)) for key, value in graph.settings().items()),
    }


def screen(graph: GraphReader, site: Site, query: Query, key: str) -> Values:
    """Return the values of one screen. Raises UserError for an unknown screen."""
    view = GraphView(graph, site)
    if key not in view.screens:
        raise UserError(
            f"no screen {key} in {graph.folder}; the page of the graph shows its screens"
        )
    return _page(view, query) | {"screen": view.screens[key]}


def whole(graph: GraphReader, site: Site) -> Values:
    """Return the values of an exported file: the graph, and the screens nearest to the start."""
    screens = sorted(graph.screens(), key=lambda screen: (screen.depth, screen.first_step))
    hidden = max(0, len(screens) - MOST_EXPORTED)
    return overview(graph, site, Query()) | {"parts": screens[:MOST_EXPORTED], "hidden": hidden}


def steps(graph: GraphReader, site: Site, query: Query) -> Values:
    """Return the values of the list of steps, the newest first."""
    view = GraphView(graph, site)
    names = sorted({screen.application for screen in view.screens.values()})
    outcome, application = query.one_of("outcome", OUTCOMES), query.one_of("application", names)
    edges = [
        edge
        for edge in reversed(view.edges)
        if outcome in (None, edge.outcome)
        and application in (None, view.screens[edge.before].application)
    ]
    page = page_of(query, len(edges))
    return _page(view, query, reload=False) | {
        "rows": edges[page.offset : page.offset + ROWS],
        "page": page,
        "filters": {"outcome": outcome, "application": application},
        "choices": {"outcome": OUTCOMES, "application": names},
    }


def merges(graph: GraphReader, site: Site, query: Query) -> Values:
    """Return the values of the list of pictures that counted as known screens, the newest first."""
    view = GraphView(graph, site)
    page = page_of(query, len(view.merges))
    rows = view.merges[::-1][page.offset : page.offset + ROWS]
    return _page(view, query, reload=False) | {"rows": rows, "page": page, "filters": {}}


class GraphView:
    """A graph as the pages show it."""

    def __init__(self, graph: GraphReader, site: Site) -> None:
        self.site = site
        self.folder = graph.folder
        self.screens = {screen.id: screen for screen in graph.screens()}
        self.labels = labels_of(list(self.screens.values()))
        self.edges, self.merges = graph.edges(), graph.merges()
        self.episodes = graph.starts()
        self.starts = {episode.screen for episode in self.episodes}
        self._tried = tried(self.edges)
        steady_edges = steady(self.edges)
        self.paths: dict[str, list[Edge]] = {}  # screen -> the shortest path to it from a start
        for start in dict.fromkeys(episode.screen for episode in self.episodes):
            for target, path in paths_from(start, steady_edges).items():
                if target not in self.paths or len(path) < len(self.paths[target]):
                    self.paths[target] = path

    def tried_on(self, screen: Screen) -> list[list[Edge]]:
        """Return the steps of each action that was tried on a screen, in the order of its elements."""
        here = [same for (before, _, _), same in self._tried.items() if before == screen.id]
        order = {element.place: index for index, element in enumerate(screen.elements)}
        return sorted(
            here, key=lambda same: (order.get(same[0].element.place, len(order)), same[0].step)
        )

    def untried(self, screen: Screen) -> list[str]:
        """Return the names of the elements on which no action was tried."""
        places = {same[0].element.place for same in self.tried_on(screen)}
        return [
            element.name or element.role
            for element in screen.elements
            if element.place not in places
        ]

    def arriving(self, screen: Screen) -> dict[str, str]:
        """Return screen -> the steps from it to this one, in words."""
        ways: dict[str, dict[str, None]] = defaultdict(dict)
        for edge in self.edges:
            if edge.after == screen.id and edge.outcome == "moved":
                ways[edge.before][spoken(edge)] = None
        return {before: "; ".join(texts) for before, texts in ways.items()}

    def merged(self, screen: Screen) -> list[Merge]:
        """Return the pictures that counted as this screen."""
        return [merge for merge in self.merges if merge.screen == screen.id]

    def example(self, same: Sequence[Edge]) -> Edge:
        """Return the step that is shown for all steps of one action: the last that led to another screen."""
        return next((edge for edge in reversed(same) if edge.outcome == "moved"), same[-1])

    def outcomes(self, same: Sequence[Edge]) -> dict[Outcome, int]:
        """Return outcome -> number of the steps that had it."""
        return Counter(edge.outcome for edge in same)

    def leads(self, same: Sequence[Edge]) -> list[str]:
        """Return the screens to which the steps of one action led."""
        return list(dict.fromkeys(str(edge.after) for edge in same if edge.outcome == "moved"))

    def whole_picture(self, screen: Screen) -> Markup:
        """Return the screenshot of a screen with boxes around its elements."""
        edges = [edge for same in self.tried_on(screen) for edge in same]
        return self.picture(screen, screen.screenshot, element_marks(screen, edges))

    def before(self, edge: Edge) -> Markup:
        """Return the screenshot before a step, with a mark where it acted."""
        return self.picture(self.screens[edge.before], edge.shot_before, step_mark(edge))

    def after(self, edge: Edge) -> Markup:
        """Return the screenshot after a step; empty if it led to no screen."""
        if not (edge.after and edge.shot_after):
            return Markup("")
        return self.picture(self.screens[edge.after], edge.shot_after)

    def picture(self, screen: Screen, key: str, over: Markup | str = "") -> Markup:
        """Return a screenshot of the size of a screen, with marks over it."""
        size = screen.width, screen.height
        return screenshot(self.site.picture(key, *size), *size, over)


def _page(view: GraphView, query: Query, *, reload: bool = True) -> Values:
    """Return the values that all pages share; the browser reloads a page of a live exploration."""
    silent_s = time.time() - written_at(view.folder / DATABASE)
    page = page_values(
        view.site,
        query,
        view.folder,
        silent_s=silent_s if silent_s < LIVE_S else None,
        reload=reload,
    )
    return page | {"view": view, "spoken": spoken, "anchor_of": anchor_of}


def _growth(screens: dict[str, list[Screen]], last: int) -> Markup:
    """Return a chart of the number of distinct screens after each step, a line for each application."""
    lines = []
    for index, (name, own_screens) in enumerate(screens.items()):
        first_steps = sorted(screen.first_step for screen in own_screens)
        stairs = [(step, count + up) for count, step in enumerate(first_steps) for up in (0, 1)]
        points = [*stairs[1:], (last, len(own_screens))]
        lines.append(Series(name=name, points=points, kind=f"t{index % TASK_COLOURS}"))
    chart = line_chart(lines, x="step", y="distinct screens", low=0.0)
    return chart and chart + (legend(lines) if len(lines) > 1 else Markup(""))


def _setting_text(value: object) -> str:
    """Return the value of a setting as text; a dash if it is empty."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value in (None, "") else str(value)


# --- the picture ---------------------------------------------------------------------------


def graph_picture(
    site: Site,
    screens: Sequence[Screen],
    edges: Sequence[Edge],
    labels: Mapping[str, str],
    starts: Collection[str],
) -> Markup:
    """Return a picture of the screens that are nearest to the start, with the steps between them."""
    by_depth = sorted(screens, key=lambda screen: (screen.depth, screen.first_step))
    nearest = by_depth[:MOST_DRAWN]
    tries: dict[str, list[Edge]] = defaultdict(list)
    for edge in edges:
        tries[edge.before].append(edge)
    moves = _moves(edges, {screen.id for screen in nearest})
    at, parents = places(nearest, moves)
    lines, boxes = [], []
    for screen in nearest:
        leaving = [pair for pair in moves if pair[0] == screen.id]
        in_tree = [pair for pair in leaving if parents.get(pair[1]) == screen.id]
        lines += [_line(at, pair, moves[pair], "step found") for pair in in_tree]
        others = [_line(at, pair, moves[pair], "step") for pair in leaving if pair not in in_tree]
        kind = "start" if screen.id in starts else "ended" if screen.has_ended else ""
        label, summary = labels[screen.id], _summary(screen, tries[screen.id])
        box = _box(site, screen, at[screen.id], kind=kind, label=label, summary=summary)
        boxes.append(Markup('<g class="node">{}{}</g>').format(Markup("").join(others), box))
    width = max(x for x, _ in at.values()) + WIDE + 24
    height = max(y for _, y in at.values()) + HIGH + LABEL + 8
    return Markup(
        '<svg class="graph" width="{0}" height="{1}" viewBox="0 0 {0} {1}" role="img" '
        'aria-label="screens by depth, and the steps between them"><defs><marker id="tip" '
        'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>{2}{3}</svg>'
    ).format(width, height, Markup("").join(lines), Markup("").join(boxes))


def places(
    screens: Sequence[Screen], moves: Mapping[tuple[str, str], Sequence[Edge]]
) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """Return screen -> (left, top), and screen -> the screen whose step found it.

    `screens` are sorted by depth, and each depth has a column. A screen stands no higher than the screen
    before it on its shortest path, and below the screens that are in its column already, so that lines of
    the tree do not cross.
    """
    depths = {screen.id: screen.depth for screen in screens}
    parents: dict[str, str] = {}
    below: dict[str, list[str]] = defaultdict(list)
    first = sorted(moves, key=lambda pair: moves[pair][0].step)
    for before, after in first:
        if after not in parents and depths[after] == depths[before] + 1:
            parents[after] = before
            below[before].append(after)
    at: dict[str, tuple[int, int]] = {}
    free: dict[int, int] = defaultdict(lambda: 8)  # depth -> the next free pixel of its column
    waiting = [(screen.id, 0) for screen in reversed(screens) if screen.id not in parents]
    while waiting:
        key, top = waiting.pop()
        depth = depths[key]
        y = max(top, free[depth])
        at[key] = 8 + depth * ACROSS, y
        free[depth] = y + DOWN
        waiting += [(child, y) for child in reversed(below[key])]
    return at, parents


def element_marks(screen: Screen, tries: Sequence[Edge]) -> Markup:
    """Return a box around each element, in the colour of its outcome; a click leads to its steps."""
    outcomes: dict[str, set[str]] = defaultdict(set)
    for edge in tries:
        outcomes[edge.element.place].add(edge.outcome)
    boxes = []
    # Large elements come first, so that the pointer reaches the elements within them.
    for element in sorted(screen.elements, key=lambda element: -_area(element.box)):
        element_outcomes = outcomes[element.place]
        kind = next((word for word in OUTCOMES if word in element_outcomes), "untried")
        box = _rectangle(element, f"element {kind}", element.name or element.role)
        anchor = Markup('<a href="#{}">{}</a>').format(anchor_of(screen.id, element.place), box)
        boxes.append(anchor if element_outcomes else box)
    return Markup("").join(boxes)


def step_mark(edge: Edge) -> Markup:
    """Return a mark where a step acted."""
    x, y = edge.element.centre
    left, _, right, _ = edge.element.box
    radius = max(3.0, min(9.0, (right - left) / 6))
    return _rectangle(edge.element, "halo", "") + Markup(
        '{}<circle class="dot" cx="{}" cy="{}" r="{}"/>'
    ).format(_rectangle(edge.element, "mark", spoken(edge)), x, y, f"{radius:g}")


def anchor_of(screen: str, place: str) -> str:
    """Return the anchor of an element on the page of its screen."""
    return f"{screen[:12]}-" + "".join(char if char.isalnum() else "-" for char in place)


def _rectangle(element: Element, kind: str, title: str) -> Markup:
    """Return a rectangle around an element, with a title."""
    left, top, right, bottom = element.box
    return Markup(
        '<rect class="{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>'
    ).format(kind, left, top, right - left, bottom - top, title)


def _area(box: tuple[int, int, int, int]) -> int:
    left, top, right, bottom = box
    return (right - left) * (bottom - top)


def _moves(edges: Iterable[Edge], screens: set[str]) -> dict[tuple[str, str], list[Edge]]:
    """Return (before, after) -> the steps from the one screen to the other, for the given screens."""
    moves: dict[tuple[str, str], list[Edge]] = defaultdict(list)
    for edge in edges:
        if edge.outcome == "moved" and edge.after in screens and edge.before in screens:
            moves[edge.before, str(edge.after)].append(edge)
    return dict(moves)


def _line(
    at: Mapping[str, tuple[int, int]], pair: tuple[str, str], steps: Sequence[Edge], kind: str
) -> Markup:
    """Return a line from screen to screen: forwards from the right side, backwards from the left side."""
    (x, y), (to_x, to_y) = at[pair[0]], at[pair[1]]
    y, to_y = y + HIGH // 2, to_y + HIGH // 2
    if to_x > x:
        x, out, within = x + WIDE, 34, -34
    elif to_x < x:
        to_x, y, to_y, out, within = to_x + WIDE, y + 12, to_y + 12, -34, 34
    else:
        x, to_x, out, within = x + WIDE, to_x + WIDE, 44, 44
    ways = list(dict.fromkeys(spoken(edge) for edge in steps))
    title = "; ".join(ways[:3]) + (f"; and {len(ways) - 3} more" if len(ways) > 3 else "")
    return Markup(
        '<path class="{}" d="M{} {}C{} {} {} {} {} {}" marker-end="url(#tip)"><title>{}</title></path>'
    ).format(kind, x, y, x + out, y, to_x + within, to_y, to_x, to_y, title)


def _summary(screen: Screen, tries: Sequence[Edge]) -> str:
    """Return how much was tried on a screen, in a few words."""
    if screen.has_ended:
        return "ended"
    possible = {(element.place, way) for element in screen.elements for way in element.actions}
    tried = {(edge.element.place, edge.action) for edge in tries}
    parts = [f"{len(tried)}/{len(possible | tried)} tried"]
    for outcome, word in (("none", "no-op"), ("error", "error")):
        if number := sum(edge.outcome == outcome for edge in tries):
            parts.append(f"{number} {word}{'s' if number > 1 else ''}")
    return " · ".join(parts)


def _box(
    site: Site, screen: Screen, at: tuple[int, int], *, kind: str, label: str, summary: str
) -> Markup:
    """Return a screen with its label and its summary, as a link to its page."""
    x, y = at
    scale = min(WIDE / screen.width, HIGH / screen.height)
    wide, high = round(screen.width * scale), round(screen.height * scale)
    left, top, middle = x + (WIDE - wide) // 2, y + (HIGH - high) // 2, x + WIDE // 2
    name = label if len(label) <= _CHARS else f"{label[: _CHARS - 1]}…"
    return Markup(
        '<a href="{}">{}<rect class="edge {}" x="{}" y="{}" width="{}" height="{}" rx="3"/>'
        '<text x="{}" y="{}">{}</text><text class="small" x="{}" y="{}">{}</text>'
        "<title>{}</title></a>"
    ).format(
        site.page("screens", screen.id),
        site.picture(screen.screenshot, wide, high, x=left, y=top, of=("small",)),
        kind,
        left,
        top,
        wide,
        high,
        middle,
        y + HIGH + 13,
        name,
        middle,
        y + HIGH + 27,
        summary,
        label,
    )
