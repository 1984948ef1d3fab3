"""Charts of one run or of several: success and train metrics, over the x axis that a query names.

Scope          the x axis, and the part of it that is shown; scope_of reads both from a query
RunCurves      the curves of a run; read_curves reads them
success_chart  a chart of success with its legend
metric_cards   a chart for each train metric, with a line for each run
titled         the name of a metric with its unit
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf

from markupsafe import Markup

from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import CurvePoint
from dart_cli.inspection import curves
from dart_cli.inspection.axes import AXES, TITLES, Axis, Places
from dart_cli.status.run_sections import METRICS
from dart_cli.view import charts
from dart_cli.view.site import Query, QueryError, Values

SUCCESS = "success, share of episodes"
_MAX_POINTS = 240  # of a metric; more cannot be distinguished on a screen
_UNIT_BY_PREFIX = {  # beginning of a name -> unit; the first match counts
    "parity_tokens": "",
    **dict.fromkeys(("entropy", "parity_", "mismatch_", "reference_kl", "teacher_gap"), "nats"),
    "staleness_": "versions",
    "samples": "steps",
}
_UNIT_BY_SUFFIX = {"_s": "s", "_mb": "MiB", "_gb": "GiB"}


@dataclass(frozen=True)
class Scope:
    """The x axis of a page's charts, and the part of it that they show."""

    axis: Axis
    part: charts.Interval

    @property
    def ends(self) -> tuple[str, str]:
        """The ends of the part as the query names them; an end is empty if the part is open there."""
        low, high = (f"{end:g}" if abs(end) < inf else "" for end in self.part)
        return low, high

    @property
    def is_part(self) -> bool:
        """Whether the query names a part of the axis."""
        return self.part != charts.WHOLE

    @property
    def titles(self) -> dict[Axis, str]:
        """The titles of all axes that a query may name."""
        return TITLES

    def chart(
        self,
        lines: Sequence[curves.Series],
        y: str,
        height: int,
        low: float | None = None,
        high: float | None = None,
        *,
        is_titled: bool = True,
    ) -> Markup:
        """Return a chart of lines over this axis; empty if no point is in the part."""
        return charts.line_chart(
            lines,
            x=TITLES[self.axis],
            y=y,
            height=height,
            low=low,
            high=high,
            part=self.part,
            is_titled=is_titled,
        )


def scope_of(query: Query) -> Scope:
    """Return the scope that `x`, `from` and `to` of a query name. Raises QueryError."""
    low, high = query.number("from"), query.number("to")
    if low is not None and high is not None and low >= high:
        raise QueryError(f"from={low:g}, to={high:g}: want from < to")
    part = (-inf if low is None else low, inf if high is None else high)
    return Scope(query.one_of("x", AXES) or "version", part)


@dataclass(frozen=True)
class RunCurves:
    """The curves of a run."""

    places: Places
    success: list[CurvePoint]
    metrics: Mapping[str, list[tuple[float, float]]]  # name -> places on the axis with values


def read_curves(reader: Reader, axis: Axis) -> RunCurves:
    """Read the success and the train metrics of a run, placed on an axis."""
    places = Places(axis, reader.batches())
    metrics: dict[str, list[tuple[float, float]]] = {}
    for point in reader.metric_curves(_MAX_POINTS):
        place = places.of_batch(point.step)
        if place is not None:
            metrics.setdefault(point.name, []).append((place, point.value))
    return RunCurves(places, curves.read_curve(reader), metrics)


def success_chart(
    scope: Scope, lines: Sequence[curves.Series], in_legend: Sequence[curves.Series], height: int
) -> Markup:
    """Return a chart of success with a legend of the lines `in_legend`; empty if it has no point."""
    chart = scope.chart(lines, SUCCESS, height, 0.0, 1.0)
    return chart and chart + charts.legend(in_legend)


def metric_cards(scope: Scope, runs: Sequence[tuple[str, str, RunCurves]]) -> list[Values]:
    """Return a chart for each metric, first the METRICS. `runs` are (name, class of its lines, curves)."""
    names = {name for _, _, run in runs for name in run.metrics}
    first = [name for name in METRICS if name in names]
    return [
        _metric_card(scope, runs, name, is_first=name in first)
        for name in [*first, *sorted(names - set(first))]
    ]


def _metric_card(
    scope: Scope, runs: Sequence[tuple[str, str, RunCurves]], name: str, *, is_first: bool
) -> Values:
    """Return the values of the card of one metric: its name, newest value and chart."""
    lines = [
        curves.Series(name=run or name, points=run_curves.metrics[name], kind=kind)
        for run, kind, run_curves in runs
        if name in run_curves.metrics
    ]
    newest = lines[0].points[-1][1] if len(lines) == 1 else None
    chart = scope.chart(lines, titled(name), 140, is_titled=False)
    return {"name": titled(name), "newest": newest, "first": is_first, "chart": chart}


def titled(metric: str) -> str:
    """Return the name of a metric with its unit, if it has one."""
    by_prefix = (unit for word, unit in _UNIT_BY_PREFIX.items() if metric.startswith(word))
    by_suffix = (unit for word, unit in _UNIT_BY_SUFFIX.items() if metric.endswith(word))
    unit = next(chain(by_prefix, by_suffix), "")
    return f"{metric}, {unit}" if unit else metric
