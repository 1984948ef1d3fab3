"""Scores of answers, by pure functions, so that stored answers can be scored again at every start.

    score          scores all items with their answers (Report)
    Score          hit@1, hit@3 and overlap@1 of some items
    Report         the scores of a set, in total and by trait; refusals separately
    report_tables  the tables that are printed
    summary        the report for `--json`

hit@1: the first candidate is in the region, edges included. hit@3: one of the first three is. overlap@1: the
square of REACH pixels around the first candidate overlaps the region. An item without an answer, or whose
answer has no point, is a miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.table import Table

from dart_cli.algo.statistics import wilson
from dart_cli.grounding.items import Answer, Box, Item, share_of
from dart_cli.runtime.tables import fraction, page_table
from dart_cli.runtime.work_folder import StoredModel

REACH = 14.0
"""Pixels of the screenshot from the point to each side of the square of overlap@1."""

FIRST = 3
"""Number of candidates of hit@3."""

MOST_ROWS = 40
"""Largest number of values of a trait that are printed; the report has all."""


class Score(StoredModel):
    """The scores of some items that name a region."""

    name: str
    n: int
    hits: int
    hits_of_three: int | None  # None with fewer than three candidates
    overlaps: int
    pointless: int  # answers without a point
    unanswered: int  # items without an answer

    @property
    def hit(self) -> float | None:
        """hit@1; None without an item."""
        return self.hits / self.n if self.n else None

    @property
    def hit_of_three(self) -> float | None:
        """hit@3; None without an item, or without three candidates."""
        return None if self.hits_of_three is None or not self.n else self.hits_of_three / self.n

    @property
    def overlap(self) -> float | None:
        """overlap@1; None without an item."""
        return self.overlaps / self.n if self.n else None

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of `hit`."""
        return wilson(self.hits, self.n)


class Refusals(StoredModel):
    """The items that name nothing on their screen, and how many were refused."""

    n: int
    refused: int  # of these items, rightly
    refused_others: int  # of the items that name a region, wrongly

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the share that was refused."""
        return wilson(self.refused, self.n)


class Report(StoredModel):
    """The scores of one set."""

    overall: Score
    chance: float  # hit@1 of random clicks: the mean share of the screen that a region has
    refusals: Refusals | None  # None if the set has no such items
    by: dict[str, list[Score]]  # trait -> its values, by name


def score(items: Sequence[Item], answers: Mapping[str, Answer], *, candidates: int) -> Report:
    """Score `answers`, which are by item id and have up to `candidates` candidates."""
    pointed = [item for item in items if item.region is not None]
    nothing = [item for item in items if item.region is None]
    groups: dict[str, dict[str, list[Item]]] = {}
    for item in pointed:
        for trait, values in item.traits.items():
            for value in values:
                groups.setdefault(trait, {}).setdefault(value, []).append(item)

    def refused(some: Iterable[Item]) -> int:
        return sum(item.id in answers and answers[item.id].refused for item in some)

    return Report(
        overall=_score("all", pointed, answers, candidates),
        chance=fmean(
            [share_of(item.region, item.size) for item in pointed if item.region] or [0.0]
        ),
        refusals=Refusals(n=len(nothing), refused=refused(nothing), refused_others=refused(pointed))
        if nothing
        else None,
        by={
            trait: [_score(value, some, answers, candidates) for value, some in sorted(of.items())]
            for trait, of in groups.items()
        },
    )


def is_hit(item: Item, answer: Answer | None, first: int = 1) -> bool:
    """Return True if one of the `first` candidates is in the item's region."""
    if answer is None or item.region is None:
        return False
    return any(point is not None and item.region.contains(point) for point in answer.points[:first])


def _overlaps(item: Item, answer: Answer | None) -> bool:
    """Return True if the square of overlap@1 around the first candidate overlaps the item's region."""
    point = answer.points[0] if answer is not None and answer.points else None
    if point is None or item.region is None:
        return False
    return item.region.overlaps(Box.around(point, REACH))


def _score(
    name: str, items: Sequence[Item], answers: Mapping[str, Answer], candidates: int
) -> Score:
    """Return the score of some items that name a region, under the name `name`."""
    pairs = [(item, answers.get(item.id)) for item in items]
    return Score(
        name=name,
        n=len(items),
        hits=sum(is_hit(*pair) for pair in pairs),
        hits_of_three=sum(is_hit(*pair, FIRST) for pair in pairs) if candidates >= FIRST else None,
        overlaps=sum(_overlaps(*pair) for pair in pairs),
        pointless=sum(a is not None and not any(a.points[:1]) for _, a in pairs),
        unanswered=sum(answer is None for _, answer in pairs),
    )


# --- printed and in JSON ---------------------------------------------------------------------


def report_tables(title: str, report: Report) -> list[Table]:
    """Return the table of the whole set, then one for each trait with more than one value."""
    tables = [_table(title, "items", [report.overall])]
    for trait, scores in report.by.items():
        if len(scores) > 1:
            more = len(scores) - MOST_ROWS
            label = f"{trait} ({more} more in report.json)" if more > 0 else trait
            tables.append(_table(f"by {trait}", label, scores[:MOST_ROWS]))
    return tables


def _table(title: str, first: str, scores: Sequence[Score]) -> Table:
    """Return a table of scores, one row for each."""
    numbers = ("hit@1", "95 % interval", "hit@3", "overlap@1", "n")
    table = page_table(title, first, *numbers, right=numbers)
    for row in scores:
        low, high = row.interval
        table.add_row(
            row.name,
            fraction(row.hit),
            f"{low:.2f} - {high:.2f}",
            "n/a" if row.hit_of_three is None else fraction(row.hit_of_three),
            fraction(row.overlap),
            str(row.n),
        )
    return table


def refusal_lines(report: Report) -> list[str]:
    """Return the lines about refusals, which are in no table; none if the set has no such items."""
    refusals = report.refusals
    if refusals is None:
        return []
    overall, (low, high) = report.overall, refusals.interval
    right, n = overall.hits + refusals.refused, overall.n + refusals.n
    below, above = wilson(right, n)
    share = fraction(right / n if n else None)
    others = f"{refusals.refused_others} of the other {overall.n}"
    return [
        f"refusals: {refusals.refused} of {refusals.n} refused [{low:.2f}, {high:.2f}], and {others}",
        f"with refusals: {share} [{below:.2f}, {above:.2f}], n {n}",
    ]


def summary(report: Report) -> dict[str, Any]:
    """Return the report for `--json`."""
    result = {**_numbers(report.overall), "chance": report.chance}
    if (refusals := report.refusals) is not None:
        right, n = report.overall.hits + refusals.refused, report.overall.n + refusals.n
        result["refusals"] = {
            "n": refusals.n,
            "refused": refusals.refused,
            "interval": list(refusals.interval),
            "refused_others": refusals.refused_others,
        }
        result["with_refusals"] = {
            "n": n,
            "score": right / n if n else None,
            "interval": list(wilson(right, n)),
        }
    result["by"] = {
        trait: {row.name: _numbers(row) for row in scores} for trait, scores in report.by.items()
    }
    return result


def _numbers(row: Score) -> dict[str, Any]:
    """Return the scores of some items as plain values."""
    return {
        "n": row.n,
        "hit_1": row.hit,
        "interval": list(row.interval),
        "hit_3": row.hit_of_three,
        "overlap_1": row.overlap,
        "no_point": row.pointless,
        "no_answer": row.unanswered,
    }
