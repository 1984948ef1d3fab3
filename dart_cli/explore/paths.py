"""The steps of a graph by what was tried, and the shortest paths through it.

tried        the steps of each key (screen, place, action)
steady       the steps that always led to the same other screen
paths_from   the shortest path from one screen to each other screen
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

from dart_cli.explore.graph import Edge


def tried(edges: Iterable[Edge]) -> dict[tuple[str, str, str], list[Edge]]:
    """Return the steps by key (screen, place, action), each list in their order."""
    steps_of: dict[tuple[str, str, str], list[Edge]] = defaultdict(list)
    for edge in edges:
        steps_of[edge.key].append(edge)
    return dict(steps_of)


def steady(edges: Iterable[Edge]) -> dict[str, list[Edge]]:
    """Return, by screen, the first step of each key whose steps all led to the same other screen."""
    first_steps: dict[str, list[Edge]] = defaultdict(list)
    for same in tried(edges).values():
        if same[0].outcome == "moved" and len({edge.after for edge in same}) == 1:
            first_steps[same[0].before].append(same[0])
    return dict(first_steps)


def paths_from(start: str, steps: Mapping[str, Sequence[Edge]]) -> dict[str, list[Edge]]:
    """Return the shortest path from `start` to each other screen; of several the one found first."""
    paths: dict[str, list[Edge]] = {start: []}
    waiting = deque([start])
    while waiting:
        here = waiting.popleft()
        for edge in sorted(steps.get(here, ()), key=lambda edge: edge.step):
            if edge.after is not None and edge.after not in paths:
                paths[edge.after] = [*paths[here], edge]
                waiting.append(edge.after)
    del paths[start]
    return paths
