"""Numbers as SVG, without scripts or style attributes; classes of view.css give the colours.

line_chart   series over a common axis, with a grid; legend names their colours
sparkline    one series of shares, small
token_bars   a value for each token, coloured by the weights that sampled it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

from markupsafe import Markup

from dart_cli.inspection.curves import Series

Interval = tuple[float, float]

TASK_COLOURS = 12
"""Classes t0 to t11 of view.css: six colours, whole and dashed."""

VERSION_COLOURS = 6
"""Classes v0 to v5 of view.css, assigned in turn to the weight versions of a trajectory."""

_LEAST_TOKENS = 24  # a chart is at least so many bars wide, so that a few bars do not become blocks
_NOTHING = 1e-12  # smaller differences, relative to 1 and to the values, are rounding


def line_chart(
    series: Sequence[Series],
    *,
    width: int = 640,
    height: int = 220,
    low: float | None = None,
    high: float | None = None,
    label: str = "",
    axes: bool = True,
) -> Markup:
    """Lines over a common axis; `low` and `high` bound y, None: the data does."""
    points = [point for each in series for point in _known(each.points)]
    if not points:
        return Markup("")
    xs, ys = [x for x, _ in points], [y for _, y in points]
    bounds = _padded(min(ys) if low is None else low, max(ys) if high is None else high)
    margins = (44, 12, 8, 22) if axes else (1, 1, 2, 2)
    area = _PlotArea((min(xs), max(xs)), bounds, width, height, margins)
    bands = [_band(area, each) for each in series if each.band]
    parts = [*(_grid(area) if axes else ()), *bands, *(_line(area, each) for each in series)]
    kind = "chart" if axes else "spark"
    return Markup('<svg class="{}" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        kind, width, height, label, Markup("").join(parts)
    )


def legend(series: Sequence[Series]) -> Markup:
    """The names of lines, each with its colour."""
    row = Markup(
        '<li><svg class="key" viewBox="0 0 24 8"><path class="{}" d="M0 4H24"/></svg>{}</li>'
    )
    rows = Markup("").join(row.format(each.kind, each.name) for each in series)
    return Markup('<ul class="legend">{}</ul>').format(rows)


def sparkline(points: Sequence[Interval], label: str) -> Markup:
    """One line of shares in [0, 1] without axes; empty where there are no points."""
    line = Series(label, points)
    return line_chart([line], width=120, height=24, low=0.0, high=1.0, label=label, axes=False)


def token_bars(
    values: Sequence[float], classes: Sequence[str], *, label: str, height: int = 40
) -> Markup:
    """A bar for each token: `values` [A] from 0, and each token's class of view.css [A].

    Bars hang down from the top if a value is negative. Values that are not finite have none.
    """
    known = [abs(value) for value in values if isfinite(value)]
    if not known:
        return Markup("")
    top = max(known) or 1.0
    hangs = any(value < 0 for value in values)
    paths: dict[str, list[str]] = {}
    for index, (value, kind) in enumerate(zip(values, classes, strict=True)):
        if isfinite(value):
            length = max(0.5, abs(value) / top * height)
            start, end = (0.0, length) if hangs else (height - length, float(height))
            paths.setdefault(kind, []).append(f"M{index + 0.5:g} {start:.2f}V{end:.2f}")
    parts = [
        Markup('<path class="{}" d="{}"/>').format(kind, "".join(commands))
        for kind, commands in paths.items()
    ]
    return Markup(
        '<svg class="tokens" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img">'
        "<title>{}</title>{}</svg>"
    ).format(max(len(values), _LEAST_TOKENS), height, label, Markup("").join(parts))


def _known(points: Sequence[Interval]) -> list[Interval]:
    return [(x, y) for x, y in points if isfinite(x) and isfinite(y)]


# --- drawing --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PlotArea:
    """Maps data to pixels of the picture."""

    x_range: Interval
    y_range: Interval
    width: int
    height: int
    margins: tuple[int, int, int, int]  # left, right, top, bottom: for labels

    def x(self, value: float) -> float:
        """Pixels from the left."""
        left, right, *_ = self.margins
        return left + _share(value, self.x_range) * (self.width - left - right)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        *_, top, bottom = self.margins
        return self.height - bottom - _share(value, self.y_range) * (self.height - top - bottom)


def _share(value: float, bounds: Interval) -> float:
    low, high = bounds
    return (value - low) / (high - low) if high > low else 0.5


def _padded(low: float, high: float) -> Interval:
    """Bounds that differ, so that a constant is drawn as a line in the middle."""
    size = max(abs(low), abs(high))
    if high - low > _NOTHING * max(1.0, size):
        return low, high
    room = size * 0.1 if size > _NOTHING else 1.0
    return low - room, high + room


def _line(area: _PlotArea, series: Series) -> Markup:
    places = [f"{area.x(x):.1f} {area.y(y):.1f}" for x, y in _known(series.points)]
    title = Markup("<title>{}</title>").format(series.name)
    if len(places) == 1:
        return Markup('<circle class="{}" cx="{}" cy="{}" r="2">{}</circle>').format(
            series.kind, *places[0].split(), title
        )
    path = Markup('<path class="{}" d="M{}">{}</path>')
    return path.format(series.kind, "L".join(places), title) if places else Markup("")


def _band(area: _PlotArea, series: Series) -> Markup:
    """The area between the bounds; a line from bound to bound where there is one point."""
    xs = [area.x(x) for x, _ in series.points]
    low = [f"{x:.1f} {area.y(bound):.1f}" for x, (bound, _) in zip(xs, series.band, strict=True)]
    high = [f"{x:.1f} {area.y(bound):.1f}" for x, (_, bound) in zip(xs, series.band, strict=True)]
    return Markup('<path class="band" d="M{}Z"/>').format("L".join([*low, *reversed(high)]))


def _grid(area: _PlotArea) -> list[Markup]:
    """Horizontal lines at round values, and the ends of the x axis."""
    left, right, *_ = area.margins
    line = Markup(
        '<path class="grid" d="M{0} {1}H{2}"/><text class="tick y" x="{3}" y="{1}">{4}</text>'
    )
    parts = [
        line.format(left, f"{area.y(value):.1f}", area.width - right, left - 6, f"{value:.4g}")
        for value in _ticks(*area.y_range)
    ]
    ends = sorted({*area.x_range})
    text = Markup('<text class="tick {}" x="{}" y="{}">{}</text>')
    for value, kind in zip(ends, ("start", "end") if len(ends) == 2 else ("middle",), strict=True):
        parts.append(text.format(kind, f"{area.x(value):.1f}", area.height - 6, f"{value:.4g}"))
    return parts


def _ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values from `low` to `high`, about `most` of them."""
    raw = (high - low) / most
    power = 10.0 ** floor(log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first = ceil(low / step - 1e-9)
    return [step * index for index in range(first, floor(high / step + 1e-9) + 1)]
