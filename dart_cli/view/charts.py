"""Charts as SVG, without scripts or style attributes; classes of view.css give the colours.

line_chart   lines over common axes; the values at the pointer appear beside it
legend       the names of lines, each with its colour
sparkline    a small line of shares
token_bars   a bar for each token, coloured by the weights that sampled it
number       a value as a short text

A chart is as wide as the page allows: horizontal places are per cent, and its texts keep their size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor, inf, isfinite, log10
from operator import itemgetter

from markupsafe import Markup, escape

from dart_cli.inspection.curves import Series

Interval = tuple[float, float]

TASK_COLOURS = 12
"""Number of the classes t0 to t11 of view.css: six colours, solid and dashed."""

VERSION_COLOURS = 6
"""Number of the classes v0 to v5 of view.css, which the weight versions of a trajectory get in turn."""

WHOLE: Interval = (-inf, inf)
"""The whole x axis, which is shown by default."""

# The width of a chart is divided into at least so many bars, so that a few bars do not become blocks.
_LEAST_TOKENS = 24
_ROUNDING = 1e-12  # smaller differences, relative to 1 and to the values, are rounding
_MAX_READINGS = 48  # places across a chart at which its values can be read
_TALL = 200  # pixels from which on a chart is tall
_THIN = "thin"  # class of the lines that share one colour
_ABOVE, _BELOW = 22, 38  # pixels for the title of y, and for the numbers and the title of x
_SCALE = 54  # pixels for the numbers of y
_WIDE = 1000  # units across the picture of the lines, which is stretched to the chart


def line_chart(
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    height: int = 220,
    low: float | None = None,
    high: float | None = None,
    part: Interval = WHOLE,
    is_titled: bool = True,
) -> Markup:
    """Return a chart of lines over common axes; empty if no point is in `part` of the x axis.

    `x` and `y` are titles with units. The title of y is drawn if the chart `is_titled`; else it must stand
    above the chart. `low` and `high` are the bounds of y; None takes the bound from the data.
    """
    lines = [line for line in (_within(line, part) for line in series) if line.points]
    if not lines:
        return Markup("")
    points = [point for line in lines for point in line.points]
    xs, ys = [place for place, _ in points], [value for _, value in points]
    bounds = _padded(min(ys) if low is None else low, max(ys) if high is None else high)
    area = _PlotArea((min(xs), max(xs)), bounds, height, above=_ABOVE if is_titled else 8)
    bands = [_band(area, line) for line in lines if line.band]
    paths = [_line(area, line) for line in lines]
    picture = Markup(
        '<svg viewBox="0 0 {} {}" width="100%" height="{}" preserveAspectRatio="none">{}</svg>'
    ).format(_WIDE, height, height, Markup("").join([*bands, *paths]))
    parts = [*_grid(area, x), picture, *_dots(area, lines), *_readings(area, lines, x)]
    return Markup(
        '<div class="chart" role="img" aria-label="{} by {}">'
        '<svg class="scale" width="{}" height="{}">{}</svg>'
        '<svg class="area" width="100%" height="{}">{}</svg></div>'
    ).format(
        y,
        x,
        _SCALE,
        height,
        Markup("").join(_scale(area, y if is_titled else "")),
        height,
        Markup("").join(parts),
    )


def legend(series: Sequence[Series]) -> Markup:
    """Return a list of the names of lines, each with its colour."""
    row = Markup(
        '<li><svg class="key" viewBox="0 0 24 8"><path class="{}" d="M0 4H24"/></svg>{}</li>'
    )
    rows = Markup("").join(row.format(line.kind, line.name) for line in series)
    return Markup('<ul class="legend">{}</ul>').format(rows)


def sparkline(points: Sequence[Interval], label: str) -> Markup:
    """Return a small line of shares in [0, 1] without axes; empty if there are no points."""
    line = _within(Series(label, points), WHOLE)
    if not line.points:
        return Markup("")
    xs, height = [place for place, _ in line.points], 24
    area = _PlotArea((min(xs), max(xs)), (0.0, 1.0), height, above=2, below=2, width=120)
    parts = [_line(area, line), *_dots(area, [line])]
    return Markup(
        '<svg class="spark" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    ).format(area.width, height, label, Markup("").join(parts))


def token_bars(
    values: Sequence[float], classes: Sequence[str], *, label: str, height: int = 40
) -> Markup:
    """Return a bar for each token: its length is the token's value [A], its colour the token's class [A].

    If a value is negative, bars hang down from the top. A value that is not finite has no bar.
    """
    sizes = [abs(value) for value in values if isfinite(value)]
    if not sizes:
        return Markup("")
    top = max(sizes) or 1.0
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


def number(value: float, digits: int = 3) -> str:
    """Return a value with `digits` digits, short enough for an axis; a large value is a whole number."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:,.4g}M"
    if size >= 999.5:
        return f"{value:,.0f}"
    if 0 < size < 1e-3:
        mantissa, power = f"{value:.{digits - 1}e}".split("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:.{digits}g}"


# --- values ---------------------------------------------------------------------------------


def _within(series: Series, part: Interval) -> Series:
    """Return the finite points of a line in a part of the x axis, and its values at both ends of the part."""
    low, high = part
    bands = series.band or [(0.0, 0.0)] * len(series.points)
    finite = [
        (place, value, *bounds)
        for (place, value), bounds in zip(series.points, bands, strict=True)
        if isfinite(place) and isfinite(value)
    ]
    rows: list[tuple[float, ...]] = [row for row in finite if low <= row[0] <= high]
    cuts = [end for end in part if finite and finite[0][0] < end < finite[-1][0]]
    rows += [(end, *(_value_at(finite, end, column) for column in (1, 2, 3))) for end in cuts]
    rows.sort(key=lambda row: row[0])  # points at one place keep their order
    return replace(
        series,
        points=[(place, value) for place, value, *_ in rows],
        band=[(least, most) for *_, least, most in rows] if series.band else (),
    )


def _value_at(rows: Sequence[Sequence[float]], place: float, column: int) -> float:
    """Return the value of a column at `place`, by linear interpolation between rows (x, value, ...).

    The rows must surround the place.
    """
    after = bisect_left(rows, place, key=lambda row: row[0])
    if rows[after][0] == place or after == 0:
        return rows[after][column]
    one, other = rows[after - 1], rows[after]
    share = (place - one[0]) / (other[0] - one[0])
    return one[column] + share * (other[column] - one[column])


# --- drawing --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PlotArea:
    """The area of a chart, which maps data to places across it and to pixels from its top."""

    x_range: Interval
    y_range: Interval
    height: int
    above: int = _ABOVE
    below: int = _BELOW
    width: int = _WIDE  # width of the picture of the lines, in its own units

    @property
    def is_tall(self) -> bool:
        """Whether the chart is tall; such a chart is wide, too, and has room for more numbers."""
        return self.height >= _TALL

    @property
    def levels(self) -> list[float]:
        """The round values of y that get a line."""
        return _ticks(*self.y_range, most=5 if self.is_tall else 4)

    @property
    def bottom(self) -> int:
        """The pixel, from the top, at which the lines end."""
        return self.height - self.below

    def x(self, value: float) -> str:
        """Return where a value of x lies across the picture of the lines, in its units."""
        return f"{_share(value, self.x_range) * self.width:.1f}"

    def percent(self, value: float) -> str:
        """Return where a value of x lies across the chart, in per cent."""
        return f"{_share(value, self.x_range) * 100:.2f}%"

    def y(self, value: float) -> str:
        """Return where a value of y lies, in pixels from the top."""
        share = _share(value, self.y_range)
        return f"{self.bottom - share * (self.bottom - self.above):.1f}"


def _share(value: float, bounds: Interval) -> float:
    """Return where a value lies between two bounds, from 0 to 1; the middle if they are equal."""
    low, high = bounds
    return (value - low) / (high - low) if high > low else 0.5


def _padded(low: float, high: float) -> Interval:
    """Return bounds that differ, so that a constant is drawn as a line in the middle."""
    size = max(abs(low), abs(high))
    if high - low > _ROUNDING * max(1.0, size):
        return low, high
    margin = size * 0.1 if size > _ROUNDING else 1.0
    return low - margin, high + margin


def _line(area: _PlotArea, series: Series) -> Markup:
    """Return the path of a line."""
    places = "L".join(f"{area.x(place)} {area.y(value)}" for place, value in series.points)
    return Markup('<path class="{}" d="M{}"><title>{}</title></path>').format(
        series.kind, places, series.name
    )


def _dots(area: _PlotArea, lines: Sequence[Series]) -> Iterator[Markup]:
    """Yield a dot for each line of one point, because such a line has no length."""
    for line in lines:
        if len(line.points) == 1:
            [(place, value)] = line.points
            yield Markup(_dot(area, line, place, value))  # noqa: S704 - numbers, and our own class


def _dot(area: _PlotArea, series: Series, place: float, value: float) -> str:
    """Return a dot on a line."""
    return f'<circle class="{series.kind}" cx="{area.percent(place)}" cy="{area.y(value)}" r="3"/>'


def _band(area: _PlotArea, series: Series) -> Markup:
    """Return the area between the bounds; for a single point, a line from bound to bound."""
    xs = [area.x(place) for place, _ in series.points]
    low = [f"{x} {area.y(bound)}" for x, (bound, _) in zip(xs, series.band, strict=True)]
    high = [f"{x} {area.y(bound)}" for x, (_, bound) in zip(xs, series.band, strict=True)]
    path = Markup('<path class="band {}" d="M{}Z"/>')
    return path.format(series.kind, "L".join([*low, *reversed(high)]))


def _scale(area: _PlotArea, title: str) -> Iterator[Markup]:
    """Yield the title of y, and the numbers of its round values."""
    yield Markup('<text class="tick title" x="0" y="12">{}</text>').format(title)
    for value in area.levels:
        yield Markup('<text class="tick y" x="{}" y="{}">{}</text>').format(
            _SCALE - 6, area.y(value), number(value, 4)
        )


def _grid(area: _PlotArea, title: str) -> Iterator[Markup]:
    """Yield a line at each round value of y, the numbers of the round values of x, and the title of x."""
    for value in area.levels:
        yield Markup('<line class="grid" x1="0" x2="100%" y1="{0}" y2="{0}"/>').format(
            area.y(value)
        )
    low, high = area.x_range
    is_wide = high - low > _ROUNDING * max(1.0, abs(high))
    for value in _ticks(low, high, most=6 if area.is_tall else 4) if is_wide else [low]:
        share = _share(value, area.x_range)
        kind = "start" if share < 0.03 else "end" if share > 0.97 else "middle"
        yield Markup('<text class="tick {}" x="{}" y="{}">{}</text>').format(
            kind, area.percent(value), area.bottom + 16, number(value)
        )
    yield Markup('<text class="tick middle" x="50%" y="{}">{}</text>').format(
        area.height - 6, title
    )


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Return about `most` round values from `low` to `high`."""
    raw = (high - low) / most
    power = 10.0 ** floor(log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
    first = ceil(low / step - 1e-9)
    return [step * index for index in range(first, floor(high / step + 1e-9) + 1)]


# --- values under the pointer ---------------------------------------------------------------


def _readings(area: _PlotArea, lines: Sequence[Series], x: str) -> Iterator[Markup]:
    """Yield invisible columns, which show the values of the lines when the pointer is over them."""
    thin = [line for line in lines if line.kind == _THIN]
    lines = [line for line in lines if line.kind != _THIN]
    keys = [_key(line) if len(lines) > 1 else Markup("") for line in lines]
    places = _spread(
        sorted({place for line in lines for place, _ in line.points}),
        _MAX_READINGS if area.is_tall else _MAX_READINGS // 2,
    )
    low, high = area.x_range
    between = [(one + other) / 2 for one, other in pairwise(places)]
    for place, start, end in zip(places, [low, *between], [*between, high], strict=True):
        width = _share(end, area.x_range) - _share(start, area.x_range) if high > low else 1.0
        at, rows, dots = area.percent(place), [], []
        for key, line in zip(keys, lines, strict=True):
            if _surrounds(line, place):
                value = _value_at(line.points, place, 1)
                dots.append(_dot(area, line, place, value))
                rows.append(f"<li>{key}<b>{number(value)}</b>{_bounds(line, place)}</li>")
        rows += _extremes(thin, place)
        # A page has thousands of these, so it is built without Markup.format; all names in it are escaped.
        yield Markup(  # noqa: S704
            f'<g class="at"><rect x="{area.percent(start) if high > low else 0}" '
            f'width="{width * 100:.2f}%" height="{area.bottom}"/>'
            f'<line class="rule" x1="{at}" x2="{at}" y1="{area.above}" y2="{area.bottom}"/>{"".join(dots)}'
            f"{_card_start(area, place)}<li>{escape(x)}: {number(place)}</li>"
            f"{''.join(rows)}</ul></foreignObject></g>"
        )


def _surrounds(series: Series, place: float) -> bool:
    """Return True if a line has points on both sides of a place, or at it."""
    return series.points[0][0] <= place <= series.points[-1][0]


def _extremes(lines: Sequence[Series], place: float) -> list[str]:
    """Return rows for the highest and the lowest of many lines at a place; none if no line is there."""
    values = [(_value_at(line.points, place, 1), line) for line in lines if _surrounds(line, place)]
    if not values:
        return []
    ends = {"highest": max(values, key=itemgetter(0)), "lowest": min(values, key=itemgetter(0))}
    return [
        f"<li>{word} of the others: {escape(line.short or line.name)} <b>{number(value)}</b></li>"
        for word, (value, line) in ends.items()
    ]


def _spread(places: Sequence[float], most: int) -> Sequence[float]:
    """Return at most `most` of the places, the first and the last among them."""
    if len(places) <= most:
        return places
    step = (len(places) - 1) / (most - 1)
    return [places[round(index * step)] for index in range(most)]


def _key(series: Series) -> Markup:
    """Return the colour and the name of a line."""
    return Markup(
        '<svg class="key" viewBox="0 0 24 8"><path class="{}" d="M0 4H24"/></svg>{} '
    ).format(series.kind, series.short or series.name)


def _bounds(series: Series, place: float) -> str:
    """Return the bounds of a line's band at a place, e.g. ` (0.2 to 0.4)`; empty if it has no band."""
    if not series.band:
        return ""
    rows = [(x, *bounds) for (x, _), bounds in zip(series.points, series.band, strict=True)]
    return f" ({number(_value_at(rows, place, 1))} to {number(_value_at(rows, place, 2))})"


def _card_start(area: _PlotArea, place: float) -> str:
    """Return the opening tags of the list of values at a place, on the side with more space."""
    share, middle = _share(place, area.x_range), area.percent(place)
    if share < 0.5:
        kind, left, width = "right", middle, f"{(1 - share) * 100:.2f}%"
    else:
        kind, left, width = "left", "0", middle
    return (
        f'<foreignObject x="{left}" y="{area.above}" width="{width}" height="{area.bottom - area.above}">'
        f'<ul class="values {kind}">'
    )
