"""The graph of an exploration as SVG: a column for each depth, and every screen a link to its page.

graph_picture  one application's screens, as a tree of the steps that found them, and all other steps
element_marks  the elements of a screen as boxes over its screenshot
step_mark      the box of one step's element
places         where each screen stands
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from markupsafe import Markup

from dart_cli.explore.graph import Edge, Screen
from dart_cli.explore.phrasing import spoken
from dart_cli.view.site import Site
from envs.elements import Element

WIDE, HIGH = 132, 100
"""Pixels of a screen's picture, at most."""
LABEL = 34  # pixels for two lines below it
ACROSS, DOWN = WIDE + 64, HIGH + LABEL + 14
MOST_DRAWN = 200
"""Screens in one picture: those nearest to the start."""
_CHARS = 21  # of a line below a screen


def graph_picture(
    site: Site,
    screens: Sequence[Screen],
    edges: Sequence[Edge],
    labels: Mapping[str, str],
    starts: Collection[str],
) -> Markup:
    """The screens that are nearest to the start, with the steps between them."""
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
        kind = "start" if screen.id in starts else "ended" if screen.ended else ""
        told = labels[screen.id], _told(screen, tries[screen.id])
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
    """A box for each element, in the colour of what came of it; a click leads to what was tried."""
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
    """The name of an element's part of its screen's page."""
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
    """The steps from one of the drawn screens to another, by both."""
    found: dict[tuple[str, str], list[Edge]] = defaultdict(list)
    for edge in edges:
        if edge.outcome == "moved" and edge.after in drawn and edge.before in drawn:
            found[edge.before, str(edge.after)].append(edge)
    return dict(found)


def _line(
    at: Mapping[str, tuple[int, int]],
    pair: tuple[str, str],
    steps: Sequence[Edge],
    kind: str,
) -> Markup:
    """A step from screen to screen: forwards from the right side, back from the left one."""
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


def _told(screen: Screen, tries: Sequence[Edge]) -> str:
    """What was tried on a screen, in short."""
    if screen.ended:
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
    """A screen with its name and what was tried there, which leads to its page."""
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
