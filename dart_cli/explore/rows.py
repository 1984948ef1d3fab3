"""Grounding rows from an exploration: a query, a screenshot, and the box that answers the query.

    make_rows     the command `dart explore rows`: writes the rows of a graph
    rows_of       the rows of a graph, each with its split, and the reasons for what was left out
    is_held_out   True if a screen is in the test split
    KINDS         the kinds of queries
    row_of        one row in ScreenSpot's layout
    clear         the targets of a screen that an instruction can name alone

OUT/train and OUT/test are sets in ScreenSpot's layout with additional keys, such as `query`. OUT/set.json
has the numbers of rows.

A screen is in one split with all its rows. The split follows from the screen's id alone, so that a longer
exploration never moves a screen to the other split.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bus.errors import UserError
from dart_cli.config.rules.machine import refuse_filled
from dart_cli.explore.graph import Edge, GraphReader, Screen
from dart_cli.explore.options import RowOptions
from dart_cli.explore.phrasing import descriptive, has_own_text, names_of, outcome
from envs.contract.elements import Element

Kind = Literal["descriptive", "outcome"]
KINDS: Mapping[Kind, str] = {
    "descriptive": "names the element",
    "outcome": "names what follows, not the element",
}
Split = Literal["train", "test"]


@dataclass(frozen=True)
class Row:
    """One query and its answer."""

    kind: Kind
    split: Split
    screen: Screen
    screenshot: str  # a picture of the screen
    element: Element
    query: str


@dataclass
class Rows:
    """The rows of a graph, and what was left out."""

    rows: list[Row] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)  # reason -> queries


def make_rows(graph: GraphReader, out: Path, options: RowOptions) -> dict[str, Any]:
    """Write the rows of a graph, and return the numbers of rows.

    Raises UserError if the folder is not empty or the graph gives no rows.
    """
    refuse_filled(out)
    result = rows_of(graph, options)
    if not result.rows:
        why = "; ".join(f"{count} {reason}" for reason, count in result.left_out.most_common(3))
        raise UserError(
            f"{graph.folder} gives no rows: {why or 'it has no steps'}; explore further"
        )
    suite = str(graph.settings().get("suite", ""))
    report: dict[str, Any] = {
        "exploration": graph.folder.resolve().name,
        "suite": suite,
        "splits": {},
    }
    for split in ("train", "test"):
        split_rows = [row for row in result.rows if row.split == split]
        _write(graph, out / split, suite, split_rows)
        report["splits"][split] = {
            "rows": len(split_rows),
            "screens": len({row.screen.id for row in split_rows}),
            "queries": dict(Counter(row.kind for row in split_rows)),
            "applications": dict(Counter(row.screen.application for row in split_rows)),
        }
    report["left_out"] = dict(result.left_out)
    (out / "set.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def kinds_of(text: str) -> tuple[Kind, ...]:
    """Return the kinds of queries in a text of their names with commas. Raises UserError."""
    kinds = [kind for kind in KINDS if kind in text.split(",")]
    if not kinds or len(kinds) != len(text.split(",")):
        raise UserError(f"--kinds {text}: want some of {', '.join(KINDS)}, with commas")
    return tuple(kinds)


def rows_of(graph: GraphReader, options: RowOptions) -> Rows:
    """Return the rows of a graph. The same graph and options always give the same rows."""
    result, kinds = Rows(), kinds_of(options.kinds)
    screens = {screen.id: screen for screen in graph.screens()}
    edges: dict[str, list[Edge]] = defaultdict(list)
    for edge in graph.edges():
        edges[edge.before].append(edge)
    names = _Names(screens.values(), edges)
    candidates: list[Row] = []
    for screen in screens.values():
        split: Split = "test" if is_held_out(screen.id, options.test_share) else "train"
        here = edges[screen.id]
        if "descriptive" in kinds:
            candidates += _descriptive(screen, split, here, options, result.left_out)
        if "outcome" in kinds:
            candidates += _outcomes(screen, split, here, screens, names, result.left_out)
    # In this order, caps and limit keep some rows of all screens, and mostly the same ones in a longer
    # exploration.
    candidates.sort(key=lambda row: _digest(f"{options.seed}/{row.screen.id}/{row.query}"))
    result.rows = list(
        _within_caps(_without_overlap(candidates, result.left_out), options, result.left_out)
    )
    return result


def is_held_out(screen: str, share: float) -> bool:
    """Return True if a screen is in the test split, which has `share` of all screens."""
    return _digest(f"held out/{screen}") < share * 2**64


# --- queries ----------------------------------------------------------------------------------


def _descriptive(
    screen: Screen, split: Split, edges: Sequence[Edge], options: RowOptions, left_out: Counter[str]
) -> Iterator[Row]:
    """Yield a row for each element that has a phrase which names no other element of its screen."""
    ways = {element.place: descriptive(element) for element in screen.elements}
    count = Counter(phrase for phrases in ways.values() for phrase in phrases)
    outcomes: dict[str, set[str]] = defaultdict(set)
    for edge in edges:
        outcomes[edge.element.place].add(edge.outcome)
    for element in screen.elements:
        own_outcomes = outcomes[element.place]
        if set(element.actions) == {"scroll"}:
            continue
        if not ways[element.place]:
            left_out["without a name"] += 1
        elif own_outcomes and "moved" not in own_outcomes:
            left_out["nothing happened"] += 1
        elif options.tried_only and not own_outcomes:
            left_out["not tried"] += 1
        else:
            alone = [phrase for phrase in ways[element.place] if count[phrase] == 1]
            if not alone:
                left_out["named like another element"] += 1
                continue
            query = alone[_digest(f"{screen.id}/{element.place}") % len(alone)]
            yield from _if_visible(
                Row("descriptive", split, screen, screen.screenshot, element, query), left_out
            )


def _outcomes(
    screen: Screen,
    split: Split,
    edges: Sequence[Edge],
    screens: Mapping[str, Screen],
    names: _Names,
    left_out: Counter[str],
) -> Iterator[Row]:
    """Yield a row for each click that always led to the same other screen.

    It is left out if its query fits another element too.
    """
    tries: dict[tuple[str, str], list[Edge]] = defaultdict(list)
    for edge in edges:
        if edge.action in ("click", "double_click"):
            tries[edge.element.place, edge.action].append(edge)
    leading: dict[str, set[str]] = defaultdict(set)  # query, or screen after -> places
    drafts: list[tuple[Row, str]] = []
    for (place, _), same in tries.items():
        moved = [edge for edge in same if edge.outcome == "moved"]
        if not moved:
            left_out["nothing happened"] += 1
            continue
        if len({edge.after for edge in same}) > 1:
            left_out["leads to several screens"] += 1
            continue
        after = screens[str(moved[0].after)]
        # Take the try with the same two pictures as the first visits of the screens, if there is one.
        best = min(moved, key=lambda edge: (_differing_pictures(edge, screen, after), edge.step))
        whole = not _differing_pictures(best, screen, after)
        query = outcome(
            screen,
            after,
            best.element,
            shows=names_of(after.elements) if whole else names.on(str(best.shot_after)),
            had=names_of(screen.elements) if whole else names.ever(screen.id),
            whole=whole,
        )
        if not query:
            left_out["what follows has no name but the element's"] += 1
            continue
        leading[query].add(place)
        leading[after.id].add(place)
        row = Row("outcome", split, screen, best.shot_before, best.element, query)
        drafts.append((row, after.id))
    for row, after_id in drafts:
        if len(leading[row.query] | leading[after_id]) > 1:
            left_out["another element does the same"] += 1
        else:
            yield from _if_visible(row, left_out)


class _Names:
    """The known names of elements, by picture and by screen.

    Of a screen's first visit all names are known, of other pictures only the names of tried elements.
    """

    def __init__(self, screens: Iterable[Screen], edges: Mapping[str, Sequence[Edge]]) -> None:
        self._on: dict[str, dict[str, None]] = defaultdict(dict)
        self._ever: dict[str, dict[str, None]] = defaultdict(dict)
        for screen in screens:
            pairs = [(screen.screenshot, name) for name in names_of(screen.elements)]
            tried = [(edge.shot_before, edge.element) for edge in edges.get(screen.id, ())]
            pairs += [(shot, name) for shot, element in tried for name in names_of([element])]
            for shot, name in pairs:
                self._on[shot][name] = self._ever[screen.id][name] = None

    def on(self, screenshot: str) -> list[str]:
        """Return the names that are known to be on a picture."""
        return list(self._on[screenshot])

    def ever(self, screen: str) -> list[str]:
        """Return the names that the screen had on some visit."""
        return list(self._ever[screen])


def _differing_pictures(edge: Edge, before: Screen, after: Screen) -> int:
    """Return how many of the two pictures of a step differ from the pictures of the screens' first visits."""
    return (edge.shot_before != before.screenshot) + (edge.shot_after != after.screenshot)


def _if_visible(row: Row, left_out: Counter[str]) -> Iterator[Row]:
    """Yield the row if its box is large enough and completely on the screen."""
    if clear([_target(row)], row.screen.width, row.screen.height):
        yield row
    else:
        left_out["too small, or not wholly on the screen"] += 1


def _without_overlap(rows: Sequence[Row], left_out: Counter[str]) -> Iterator[Row]:
    """Yield the rows without repeats, and without training rows on a picture of the test split."""
    held_out = {row.screenshot for row in rows if row.split == "test"}
    queries: set[tuple[str, str]] = set()
    for row in rows:
        if row.split == "train" and row.screenshot in held_out:
            left_out["its picture is held out"] += 1
        elif (row.screenshot, row.query) in queries:
            left_out["asked before"] += 1
        else:
            queries.add((row.screenshot, row.query))
            yield row


def _within_caps(rows: Iterator[Row], options: RowOptions, left_out: Counter[str]) -> Iterator[Row]:
    """Yield the rows within the caps of their element and screen, and within the limit."""
    elements: Counter[tuple[str, ...]] = Counter()
    screens: Counter[tuple[str, str]] = Counter()
    train = 0
    for row in rows:
        what = (row.split, row.kind, row.screen.application, row.element.role, row.element.name)
        if options.per_element and elements[what] >= options.per_element:
            left_out["cap of its element"] += 1
        elif options.per_screen and screens[row.kind, row.screen.id] >= options.per_screen:
            left_out["cap of its screen"] += 1
        elif row.split == "train" and options.limit and train >= options.limit:
            left_out["limit"] += 1
        else:
            elements[what] += 1
            screens[row.kind, row.screen.id] += 1
            train += row.split == "train"
            yield row


def _digest(text: str) -> int:
    """Return a digest of a text as a number of 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


# --- rows in ScreenSpot's layout --------------------------------------------------------------

LEAST_SIDE = 5.0
"""Least width and height of a target, in pixels."""


@dataclass(frozen=True)
class Target:
    """A widget with the instruction that names it."""

    instruction: str
    box: tuple[float, float, float, float]  # left, top, right, bottom; pixels of the screenshot
    has_text: bool  # whether it shows a text


def row_of(
    target: Target,
    image: str,
    environment: str,
    application: str,
    size: tuple[int, int],
    screen_id: str,
) -> dict[str, Any]:
    """Return a row of ScreenSpot's layout with additional keys; `image` is a file in screenspot_imgs."""
    left, top, right, bottom = target.box
    return {
        "img_filename": image,
        "instruction": target.instruction,
        "bbox": [round(number, 2) for number in (left, top, right - left, bottom - top)],
        "data_type": "text" if target.has_text else "icon",
        "data_source": environment,
        "environment": environment,
        "application": application,
        "size": f"{size[0]}x{size[1]}",
        "screen_id": screen_id,
    }


def clear(targets: Sequence[Target], width: int, height: int) -> list[Target]:
    """Return the targets with a unique instruction that are large enough and completely on the screen."""
    count = Counter(target.instruction for target in targets)

    def fits(box: tuple[float, float, float, float]) -> bool:
        left, top, right, bottom = box
        large = right - left >= LEAST_SIDE and bottom - top >= LEAST_SIDE
        return large and left >= 0 and top >= 0 and right <= width and bottom <= height

    return [target for target in targets if count[target.instruction] == 1 and fits(target.box)]


# --- files ------------------------------------------------------------------------------------


def _target(row: Row) -> Target:
    return Target(row.query, row.element.box, has_text=has_own_text(row.element))


def _write(graph: GraphReader, folder: Path, suite: str, rows: Sequence[Row]) -> None:
    """Write the rows and their screenshots as a set in ScreenSpot's layout."""
    images = folder / "screenspot_imgs"
    images.mkdir(parents=True)
    entries = []
    for row in rows:
        path = graph.screenshot_path(row.screenshot)
        if not (images / path.name).exists():
            (images / path.name).write_bytes(path.read_bytes())
        screen = row.screen
        size = screen.width, screen.height
        entry = row_of(_target(row), path.name, suite, screen.application, size, screen.id)
        entries.append(entry | {"query": row.kind})
    group = _GROUPS.get(suite, "desktop")
    path = folder / f"screenspot_{group}.json"
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


_GROUPS = {"android": "mobile", "miniwob": "web"}
"""Suite -> ScreenSpot's group of its screens; all others are `desktop`."""
