"""The numbers of an exploration: how many screens it found, by how many steps, and how many did nothing.

summary   the JSON line of `dart explore`: screens, depth, no-op rate, also by application
curve     the number of distinct screens after each step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dart_cli.explore.choosing import DenyList
from dart_cli.explore.graph import Edge, GraphReader, Screen


def summary(graph: GraphReader) -> dict[str, Any]:
    """Return the numbers of the whole exploration. Screens where an episode ended are counted separately."""
    screens, edges, settings = graph.screens(), graph.edges(), graph.settings()
    totals = _numbers(screens, edges)
    by_id = {screen.id: screen.application for screen in screens}
    applications = {
        name: _numbers(
            [screen for screen in screens if screen.application == name],
            [edge for edge in edges if by_id[edge.before] == name],
        )
        for name in dict.fromkeys(screen.application for screen in screens)
    }
    return {
        **totals,
        "episodes": len(graph.starts()),
        "merges": len(graph.merges()),
        "left_alone": _left_alone(screens, DenyList(settings.get("deny", []))),
        "applications": applications,
    }


def _numbers(screens: Sequence[Screen], edges: Sequence[Edge]) -> dict[str, Any]:
    outcomes = Counter(edge.outcome for edge in edges)
    live = [screen for screen in screens if not screen.has_ended]
    return {
        "screens": len(live),
        "ends": len(screens) - len(live),
        "routes": len({(screen.application, screen.route) for screen in live}),
        "depth": max((screen.depth for screen in live), default=0),
        "steps": len(edges),
        "tried": len({edge.key for edge in edges}),
        "no_op_rate": round(outcomes["none"] / len(edges), 4) if edges else 0.0,
        "errors": outcomes["error"],
    }


def _left_alone(screens: Sequence[Screen], deny: DenyList) -> dict[str, int]:
    """Return for each word of the deny list the number of elements that were left alone because of it."""
    words = (deny.word_of(element) for screen in screens for element in screen.elements)
    return dict(Counter(word for word in words if word).most_common())


def curve(screens: Sequence[Screen], steps: int) -> list[int]:
    """Return the number of distinct screens after 0, 1, ..., `steps` steps, without ends of episodes."""
    first_visits = Counter(screen.first_step for screen in screens if not screen.has_ended)
    count, counts = 0, []
    for step in range(steps + 1):
        count += first_visits[step]
        counts.append(count)
    return counts
