"""The texts that mean one action, and a way to write one of them in tokens that all differ.

    Spellings        texts of one action as a graph: each way from its first place to its last is a text
    spellings_of     yields them: as the action parser writes the action, with other whitespace, without lines
    Step             one token between two places of such a graph
    distinct_steps   finds a way in tokens of which none occurs twice

The language model of a smoke test decides by its last token what follows, so no token may occur twice in a
text. An XML call has the word `parameter` four times, which can be written as `parameter`, `param` `eter`,
`para` `meter` and `par` `ame` `ter`, and the > behind it as `>`, `><`, or `>` and one or two line ends. The
search takes the cheapest way over the places, and makes the tokens that it has twice dearer until it has none
twice. It does not prove that there is no way.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from bus.errors import ActionError
from dart_cli.language.coordinates import CoordinateMap
from dart_cli.language.parsers.base import ActionParser, PointParser
from envs.contract.actions import Action

LONGEST = 16
"""Most characters of a token in the search."""
BLANKS = ("\n", "\n\n", " ", "")
"""What may stand in the place of whitespace."""
ROUNDS = 20
"""Most rounds of the search from one place. The vocabulary of Qwen needs two."""
REPEATED = 10.0
"""What a token costs beside its price if the way has it already, in tokens."""
DEARER = 1.0
"""What a round adds to the price of a token for each time that its way repeats it, in tokens."""

Symbol = str | int
"""What stands between two places: a character, "" where whitespace is left out, or a certain token."""
_WHITESPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class Step:
    """A token that leads to `place`. `text` is empty for the tokens of a pointer."""

    place: int
    token: int
    text: str


@dataclass(frozen=True)
class Spellings:
    """Texts of one action. Each way from place 0 to the last place is a text; places only lead to later ones."""

    action: Action  # as the action parser reads the texts
    symbols: list[list[tuple[Symbol, int]]]
    """For each place the symbols that follow, each with the place behind it."""

    def steps(self, single: Callable[[str], int | None]) -> list[list[Step]]:
        """Return for each place the tokens that may follow, long ones first.

        `single` returns the token for exactly a text, or None.
        """
        return [
            sorted(self._from(start, single), key=lambda step: -len(step.text))
            for start in range(len(self.symbols))
        ]

    def _from(self, start: int, single: Callable[[str], int | None]) -> Iterator[Step]:
        """Yield the tokens that may follow one place. None contains more than one place that has choices."""
        reached = [(start, "", 0)]
        visited = {(start, "")}
        while reached:
            place, text, choices = reached.pop()
            choices += len(self.symbols[place]) > 1
            if choices > 1:
                continue
            for symbol, following in self.symbols[place]:
                if isinstance(symbol, int):
                    if not text:
                        yield Step(following, symbol, "")
                    continue
                if (here := (following, text + symbol)) in visited:
                    continue
                visited.add(here)
                if symbol and (token := single(text + symbol)) is not None:
                    yield Step(following, token, text + symbol)
                if len(text + symbol) < LONGEST:
                    reached.append((*here, choices))


def spellings_of(
    action_parser: ActionParser,
    action: Action,
    coordinates: CoordinateMap,
    pointer: Sequence[int] = (),
) -> Iterator[Spellings]:
    """Yield texts that mean `action`; first those that are most like what the parser writes.

    `pointer` has the tokens that replace each point of a text; without them a point is written in numbers.
    """
    try:
        text = action_parser.format(action, coordinates)
        parsed = action_parser.parse(text, coordinates)
    except ActionError:
        return
    for shorter in dict.fromkeys([text, *_without_lines(text.strip())]):
        if read(action_parser, shorter, coordinates) != parsed:
            continue
        points = []
        if pointer and isinstance(action_parser, PointParser):
            points = [(point.start, point.end) for point in action_parser.find_points(shorter)]
        blanks = {}
        for match in _WHITESPACE.finditer(shorter):
            before, after = shorter[: match.start()], shorter[match.end() :]
            blanks[match.span()] = [match[0]] + [
                blank
                for blank in BLANKS
                if blank != match[0]
                and read(action_parser, before + blank + after, coordinates) == parsed
            ]
        for choices in ({}, blanks):
            parts = _parts(shorter, points, pointer, choices)
            yield Spellings(parsed, _graph(parts))


def read(action_parser: ActionParser, text: str, coordinates: CoordinateMap) -> Action | None:
    """Return the action that a text means; None if it is none."""
    try:
        return action_parser.parse(text, coordinates)
    except ActionError:
        return None


def _without_lines(text: str) -> Iterator[str]:
    """Yield the text, then variants without some lines that follow each other, the fewest first."""
    lines = text.split("\n")
    runs = combinations(range(len(lines) + 1), 2)
    yield text
    for first, last in sorted(runs, key=lambda run: run[1] - run[0]):
        yield "\n".join(lines[:first] + lines[last:])


def _parts(
    text: str,
    points: Sequence[tuple[int, int]],
    pointer: Sequence[int],
    blanks: dict[tuple[int, int], list[str]],
) -> Iterator[Sequence[Sequence[Symbol]]]:
    """Yield the parts of a text in order, each as its alternatives."""
    place = 0
    ends = dict((*blanks, *points))
    while place < len(text):
        end = ends.get(place, place + 1)
        if (place, end) in points:
            yield [pointer]
        else:
            yield blanks.get((place, end), [text[place:end]])
        place = end


def _graph(parts: Iterator[Sequence[Sequence[Symbol]]]) -> list[list[tuple[Symbol, int]]]:
    """Return the symbols that follow each place, for parts that have alternatives."""
    symbols: list[list[tuple[Symbol, int]]] = [[]]
    for alternatives in parts:
        first = len(symbols) - 1
        last: list[tuple[int, Symbol]] = []
        for alternative in alternatives:
            place = first
            for symbol in alternative[:-1]:
                symbols.append([])
                symbols[place].append((symbol, len(symbols) - 1))
                place = len(symbols) - 1
            last.append((place, alternative[-1] if alternative else ""))
        symbols.append([])
        for place, symbol in last:
            symbols[place].append((symbol, len(symbols) - 1))
    return symbols


def distinct_steps(
    steps: Sequence[Sequence[Step]], earlier: Sequence[Step], barred: Collection[int]
) -> list[Step] | None:
    """Return a way from place 0 to the last place in tokens that all differ; None if none is found.

    It may begin and end like the way `earlier` of another action, as long as possible at its beginning; its
    other tokens are neither among those of `earlier` nor in `barred`.
    """
    # 1. Places that the first tokens of `earlier` lead to, and places from which its last ones lead to the end.
    begins = [{0}]
    for step in earlier:
        begins.append(
            {after.place for place in begins[-1] for after in steps[place] if _same(after, step)}
        )
    ends = {len(steps) - 1: len(earlier)}
    places = set(ends)
    for index in range(len(earlier) - 1, -1, -1):
        places = {
            place
            for place, following in enumerate(steps)
            if any(step.place in places and _same(step, earlier[index]) for step in following)
        }
        ends |= dict.fromkeys(places, index)
    # 2. The tokens between.
    excluded = {*barred, *(step.token for step in earlier)}
    for shared in range(len(earlier), -1, -1):
        joins = {place: index for place, index in ends.items() if index >= shared}
        for begin in sorted(begins[shared]):
            between = _between(steps, begin, joins, excluded)
            if between is not None:
                last = between[-1].place if between else begin
                return [*earlier[:shared], *between, *earlier[joins[last] :]]
    return None


def _same(step: Step, other: Step) -> bool:
    """Return True if two steps of different graphs have the same token and text."""
    return (step.token, step.text) == (other.token, other.text)


def _between(
    steps: Sequence[Sequence[Step]], begin: int, ends: Collection[int], excluded: Collection[int]
) -> list[Step] | None:
    """Return a way from `begin` to one of `ends` in tokens that all differ; None if none is found."""
    prices: Counter[int] = Counter()
    for _ in range(ROUNDS):
        way = _cheapest(steps, begin, ends, excluded, prices)
        if way is None:
            return None
        counts = Counter(step.token for step in way)
        if len(counts) == len(way):
            return way
        prices.update({token: count - 1 for token, count in counts.items() if count > 1})
    return None


def _cheapest(
    steps: Sequence[Sequence[Step]],
    begin: int,
    ends: Collection[int],
    excluded: Collection[int],
    prices: Counter[int],
) -> list[Step] | None:
    """Return the cheapest of the ways that go on from the cheapest way to each place.

    A token costs 1 and its price, and REPEATED more if the way has it already.
    """
    ways: dict[int, tuple[float, list[Step]]] = {begin: (0.0, [])}
    for place in range(begin, len(steps)):
        if place not in ways:
            continue
        cost, way = ways[place]
        tokens = {step.token for step in way}
        for step in steps[place]:
            if step.token in excluded:
                continue
            more = 1 + DEARER * prices[step.token] + REPEATED * (step.token in tokens)
            if step.place not in ways or cost + more < ways[step.place][0]:
                ways[step.place] = (cost + more, [*way, step])
    reached = [ways[place] for place in ends if place in ways]
    return min(reached, key=lambda costs: costs[0])[1] if reached else None
