"""Pages of an exploration: the graph, one screen, the steps, the pictures that counted as known screens.

overview   the graph as a picture, with its numbers
screen     one screen: what was tried there, and where each step led
steps      all steps, by outcome
merges     all pictures that counted as known screens, and why
whole      the graph and every screen, for one file
GraphView  what all pages know of a graph, and how they draw it
graph_picture  one application's screens, a column for each depth, as a tree of the steps that found them
places     where each screen stands there
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
from dart_cli.inspection.find import written_at
from dart_cli.view.charts import TASK_COLOURS, legend, line_chart
from dart_cli.view.screens import screenshot
from dart_cli.view.site import LIVE_S, ROWS, Query, Site, Values, page_of, page_values
from envs.contract.elements import Element

OUTCOMES: tuple[Outcome, ...] = ("moved", "none", "error")
WIDE, HIGH = 132, 100
"""Pixels of a screen's picture, at most."""
LABEL = 34  # pixels for two lines below it
ACROSS, DOWN = WIDE + 64, HIGH + LABEL + 14
MOST_DRAWN = 200
"""Screens in one picture: those nearest to the start."""
_CHARS = 21  # of a line below a screen
MOST_EXPORTED = 100
"""Screens with a part of their own in an exported file: those nearest to the start."""


def overview(graph: GraphReader, site: Site, query: Query) -> Values:
    """Return the graph of each application, and its numbers."""
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
    """Return the graph, and a part for each of its first screens."""
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
        """Return the steps of each thing that was tried there, in the order of its elements."""
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
        """Return the screens with steps to it -> these steps in words."""
        ways: dict[str, dict[str, None]] = defaultdict(dict)
        for edge in self.edges:
            if edge.after == screen.id and edge.outcome == "moved":
                ways[edge.before][spoken(edge)] = None
        return {before: "; ".join(found) for before, found in ways.items()}

    def merged(self, screen: Screen) -> list[Merge]:
        """Return the pictures that counted as this screen."""
        return [each for each in self.merges if each.screen == screen.id]

    def telling(self, same: Sequence[Edge]) -> Edge:
        """Of the steps of one thing the one that is shown: the last that moved."""
        return next((edge for edge in reversed(same) if edge.outcome == "moved"), same[-1])

    def outcomes(self, same: Sequence[Edge]) -> dict[Outcome, int]:
        """How often each came of it."""
        return Counter(edge.outcome for edge in same)

    def leads(self, same: Sequence[Edge]) -> list[str]:
        """Return the screens that it led to."""
        return list(dict.fromkeys(str(edge.after) for edge in same if edge.outcome == "moved"))

    def whole_picture(self, screen: Screen) -> Markup:
        """Return the screen with its elements."""
        edges = [edge for same in self.tried_on(screen) for edge in same]
        return self.picture(screen, screen.screenshot, element_marks(screen, edges))

    def before(self, edge: Edge) -> Markup:
        """Return the screen that a step left, with where it acted."""
        return self.picture(self.screens[edge.before], edge.shot_before, step_mark(edge))

    def after(self, edge: Edge) -> Markup:
        """Return the screen that it led to; empty for none."""
        if not (edge.after and edge.shot_after):
            return Markup("")
        return self.picture(self.screens[edge.after], edge.shot_after)

    def picture(self, screen: Screen, key: str, over: Markup | str = "") -> Markup:
        """Return a screenshot of a screen's size, with what is drawn over it."""
        size = screen.width, screen.height
        return screenshot(self.site.picture(key, *size), *size, over)


def _page(known: GraphView, query: Query, *, reload: bool = True) -> Values:
    """Return what all pages show; a page of a live exploration is loaded again from time to time."""
    silent_s = time.time() - written_at(known.folder / DATABASE)
    heard = silent_s if silent_s < LIVE_S else None
    page = page_values(known.site, query, known.folder, silent_s=heard, reload=reload)
    return page | {"known": known, "spoken": spoken, "anchor_of": anchor_of}


def _growth(screens: dict[str, list[Screen]], last: int) -> Markup:
    """Distinct screens against steps, by application."""
    lines = []
    for at, (name, own) in enumerate(screens.items()):
        found = sorted(each.first_step for each in own)
        stairs = [(step, count + up) for count, step in enumerate(found) for up in (0, 1)]
        lines.append(Series(name, [*stairs[1:], (last, len(own))], f"t{at % TASK_COLOURS}"))
    chart = line_chart(lines, x="step", y="distinct screens", low=0.0)
    return chart and chart + (legend(lines) if len(lines) > 1 else Markup(""))


def _told(value: object) -> str:
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
    """Return the screens that are nearest to the start, with the steps between them."""
    drawn = sorted(screens, key=lambda each: (each.depth, each.first_step))[:MOST_DRAWN]
    tries: dict[str, list[Edge]] = defaultdict(list)
    for edge in edges:
        tries[edge.before].append(edge)
    moves = _moves(edges, {each.id for each in drawn})
    at, parents = places(drawn, moves)
    lines, boxes = [], []
    for screen in drawn:
        out = [pair for pair in moves if pair[0] == screen.id]
        found = [pair for pair in out if parents.get(pair[1]) == screen.id]
        lines += [_line(at, pair, moves[pair], "step found") for pair in found]
        others = [_line(at, pair, moves[pair], "step") for pair in out if pair not in found]
        kind = "start" if screen.id in starts else "ended" if screen.has_ended else ""
        told = labels[screen.id], _in_short(screen, tries[screen.id])
        box = _box(site, screen, kind, told, at[screen.id])
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
    """Left and top of each screen, and the screen whose step found it; `screens` by depth.

    A column for each depth. A screen stands no higher than the one before it on its shortest way, and
    below those of its column that stand there already: lines of the tree do not cross.
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
    free: dict[int, int] = defaultdict(lambda: 8)  # the next free row of each column
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
    """Return a box for each element, in the colour of what came of it; a click leads to what was tried."""
    outcomes: dict[str, set[str]] = defaultdict(set)
    for edge in tries:
        outcomes[edge.element.place].add(edge.outcome)
    boxes = []
    # The large ones first, so that what is within them can be pointed at.
    for element in sorted(screen.elements, key=lambda each: -_area(each.box)):
        came = outcomes[element.place]
        kind = next((each for each in ("moved", "none", "error") if each in came), "untried")
        box = _rectangle(element, f"element {kind}", element.name or element.role)
        anchor = Markup('<a href="#{}">{}</a>').format(anchor_of(screen.id, element.place), box)
        boxes.append(anchor if came else box)
    return Markup("").join(boxes)


def step_mark(edge: Edge) -> Markup:
    """Where a step acted."""
    x, y = edge.element.centre
    left, _, right, _ = edge.element.box
    radius = max(3.0, min(9.0, (right - left) / 6))
    return _rectangle(edge.element, "halo", "") + Markup(
        '{}<circle class="dot" cx="{}" cy="{}" r="{}"/>'
    ).format(_rectangle(edge.element, "mark", spoken(edge)), x, y, f"{radius:g}")


def anchor_of(screen: str, place: str) -> str:
    """Return the name of an element's part of its screen's page."""
    return f"{screen[:12]}-" + "".join(each if each.isalnum() else "-" for each in place)


def _rectangle(element: Element, kind: str, title: str) -> Markup:
    left, top, right, bottom = element.box
    return Markup(
        '<rect class="{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>'
    ).format(kind, left, top, right - left, bottom - top, title)


def _area(box: tuple[int, int, int, int]) -> int:
    left, top, right, bottom = box
    return (right - left) * (bottom - top)


def _moves(edges: Iterable[Edge], drawn: set[str]) -> dict[tuple[str, str], list[Edge]]:
    """Return the steps from one of the drawn screens to another, by both."""
    found: dict[tuple[str, str], list[Edge]] = defaultdict(list)
    for edge in edges:
        if edge.outcome == "moved" and edge.after in drawn and edge.before in drawn:
            found[edge.before, str(edge.after)].append(edge)
    return dict(found)


def _line(
    at: Mapping[str, tuple[int, int]], pair: tuple[str, str], steps: Sequence[Edge], kind: str
) -> Markup:
    """Return a step from screen to screen: forwards from the right side, back from the left one."""
    (x, y), (to_x, to_y) = at[pair[0]], at[pair[1]]
    y, to_y = y + HIGH // 2, to_y + HIGH // 2
    if to_x > x:
        x, out, within = x + WIDE, 34, -34
    elif to_x < x:
        to_x, y, to_y, out, within = to_x + WIDE, y + 12, to_y + 12, -34, 34
    else:
        x, to_x, out, within = x + WIDE, to_x + WIDE, 44, 44
    ways = list(dict.fromkeys(spoken(edge) for edge in steps))
    told = "; ".join(ways[:3]) + (f"; and {len(ways) - 3} more" if len(ways) > 3 else "")
    return Markup(
        '<path class="{}" d="M{} {}C{} {} {} {} {} {}" marker-end="url(#tip)"><title>{}</title></path>'
    ).format(kind, x, y, x + out, y, to_x + within, to_y, to_x, to_y, told)


def _in_short(screen: Screen, tries: Sequence[Edge]) -> str:
    """Return what was tried on a screen, in short."""
    if screen.has_ended:
        return "ended"
    known = {(each.place, way) for each in screen.elements for way in each.actions}
    tried = {(edge.element.place, edge.action) for edge in tries}
    parts = [f"{len(tried)}/{len(known | tried)} tried"]
    for outcome, word in (("none", "no-op"), ("error", "error")):
        if found := sum(edge.outcome == outcome for edge in tries):
            parts.append(f"{found} {word}{'s' if found > 1 else ''}")
    return " · ".join(parts)


def _box(
    site: Site, screen: Screen, kind: str, told: tuple[str, str], at: tuple[int, int]
) -> Markup:
    """Return a screen with its name and what was tried there, which leads to its page."""
    x, y = at
    scale = min(WIDE / screen.width, HIGH / screen.height)
    wide, high = round(screen.width * scale), round(screen.height * scale)
    left, top, middle = x + (WIDE - wide) // 2, y + (HIGH - high) // 2, x + WIDE // 2
    name = told[0] if len(told[0]) <= _CHARS else f"{told[0][: _CHARS - 1]}…"
    return Markup(
        '<a href="{}">{}<rect class="edge {}" x="{}" y="{}" width="{}" height="{}" rx="3"/>'
        '<text x="{}" y="{}">{}</text><text class="small" x="{}" y="{}">{}</text>'
        "<title>{}</title></a>"
    ).format(
        site.page("screens", screen.id),
        site.picture(screen.screenshot, wide, high, x=left, y=top, of=("small",)),
        *(kind, left, top, wide, high),
        *(middle, y + HIGH + 13, name),
        *(middle, y + HIGH + 27, told[1]),
        told[0],
    )
