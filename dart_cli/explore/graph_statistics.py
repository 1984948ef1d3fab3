"""What an exploration has found: numbers, and ways through its graph.

summary      the JSON line of `dart explore`: screens, depth, no-op rate, by application
curve        distinct screens after each step
tried        all steps of one screen, by what was done
steady       the steps that always led to the same other screen
paths_from   the shortest paths from a screen
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dart_cli.explore.choosing import DenyList
from dart_cli.explore.graph import Edge, GraphReader, Screen


def summary(graph: GraphReader) -> dict[str, Any]:
    """Of the whole exploration, over all starts. Screens where an episode ended are counted apart."""
    screens, edges, settings = graph.screens(), graph.edges(), graph.settings()
    told = _numbers(screens, edges)
    by_id = {screen.id: screen.application for screen in screens}
    applications = {
        name: _numbers(
            [screen for screen in screens if screen.application == name],
            [edge for edge in edges if by_id[edge.before] == name],
        )
        for name in dict.fromkeys(screen.application for screen in screens)
    }
    return {
        **told,
        "episodes": len(graph.starts()),
        "merges": len(graph.merges()),
        "left_alone": _left_alone(screens, DenyList(settings.get("deny", []))),
        "applications": applications,
    }


def _numbers(screens: Sequence[Screen], edges: Sequence[Edge]) -> dict[str, Any]:
    outcomes = Counter(edge.outcome for edge in edges)
    shown = [screen for screen in screens if not screen.ended]
    return {
        "screens": len(shown),
        "ends": len(screens) - len(shown),
        "routes": len({(screen.application, screen.route) for screen in shown}),
        "depth": max((screen.depth for screen in shown), default=0),
        "steps": len(edges),
        "tried": len({edge.key for edge in edges}),
        "no_op_rate": round(outcomes["none"] / len(edges), 4) if edges else 0.0,
        "errors": outcomes["error"],
    }


def _left_alone(screens: Sequence[Screen], deny: DenyList) -> dict[str, int]:
    """Word of the deny list -> elements of found screens that it kept from being tried."""
    words = (deny.word_of(element) for screen in screens for element in screen.elements)
    return dict(Counter(word for word in words if word).most_common())


def curve(screens: Sequence[Screen], steps: int) -> list[int]:
    """Distinct screens after 0, 1, ..., `steps` steps; ends are none."""
    found = Counter(screen.first_step for screen in screens if not screen.ended)
    counted, curve = 0, []
    for step in range(steps + 1):
        counted += found[step]
        curve.append(counted)
    return curve


def tried(edges: Iterable[Edge]) -> dict[tuple[str, str, str], list[Edge]]:
    """Return the steps of each key (screen, place, action), in their order."""
    found: dict[tuple[str, str, str], list[Edge]] = defaultdict(list)
    for edge in edges:
        found[edge.key].append(edge)
    return dict(found)


def steady(edges: Iterable[Edge]) -> dict[str, list[Edge]]:
    """Of each key whose steps all led to the same other screen, the first one; by screen."""
    found: dict[str, list[Edge]] = defaultdict(list)
    for same in tried(edges).values():
        if same[0].outcome == "moved" and len({edge.after for edge in same}) == 1:
            found[same[0].before].append(same[0])
    return dict(found)


def paths_from(start: str, steps: Mapping[str, Sequence[Edge]]) -> dict[str, list[Edge]]:
    """Return the shortest path to each screen but the start; of several the one that was found first."""
    found: dict[str, list[Edge]] = {start: []}
    waiting = deque([start])
    while waiting:
        here = waiting.popleft()
        for edge in sorted(steps.get(here, ()), key=lambda edge: edge.step):
            if edge.after is not None and edge.after not in found:
                found[edge.after] = [*found[here], edge]
                waiting.append(edge.after)
    del found[start]
    return found
