"""Numbers as SVG, without scripts or style attributes; classes of view.css give the colours.

line_chart   series over common axes with titles; the values under the pointer appear beside it
legend       the names of series, each with its colour
sparkline    one series of shares, small
token_bars   a value for each token, coloured by the weights that sampled it

A chart is as wide as the page lets it be: across it places are per cent, and its texts keep their size.
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
"""Classes t0 to t11 of view.css: six colours, whole and dashed."""

VERSION_COLOURS = 6
"""Classes v0 to v5 of view.css, assigned in turn to the weight versions of a trajectory."""

WHOLE: Interval = (-inf, inf)
"""The part of the x axis that is shown where no other is asked for."""

_LEAST_TOKENS = 24  # a chart is at least so many bars wide, so that a few bars do not become blocks
_NOTHING = 1e-12  # smaller differences, relative to 1 and to the values, are rounding
_MOST_READINGS = 48  # places across a chart at which its values can be read
_TALL = 200  # pixels of a chart
_THIN = "thin"  # class of lines without a colour of their own
_ABOVE, _BELOW = 22, 38  # pixels for the title of y, and for the numbers and the title of x
_SCALE = 54  # pixels for the numbers of y
_WIDE = 1000  # units across the picture of the lines, which is stretched


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
    """Return lines over a common axis; empty where no point is in `part` of the x axis.

    `x` and `y` are the titles with their units; that of y is not drawn where the chart is not titled, because it
    stands above it. `low` and `high` bound y; None: the data does.
    """
    lines = [each for each in (_within(each, part) for each in series) if each.points]
    if not lines:
        return Markup("")
    points = [point for each in lines for point in each.points]
    xs, ys = [place for place, _ in points], [value for _, value in points]
    bounds = _padded(min(ys) if low is None else low, max(ys) if high is None else high)
    area = _PlotArea((min(xs), max(xs)), bounds, height, above=_ABOVE if is_titled else 8)
    drawn = [*(_band(area, each) for each in lines if each.band), *(_line(area, e) for e in lines)]
    picture = Markup(
        '<svg viewBox="0 0 {} {}" width="100%" height="{}" preserveAspectRatio="none">{}</svg>'
    ).format(_WIDE, height, height, Markup("").join(drawn))
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
    """Return the names of lines, each with its colour."""
    row = Markup(
        '<li><svg class="key" viewBox="0 0 24 8"><path class="{}" d="M0 4H24"/></svg>{}</li>'
    )
    rows = Markup("").join(row.format(each.kind, each.name) for each in series)
    return Markup('<ul class="legend">{}</ul>').format(rows)


def sparkline(points: Sequence[Interval], label: str) -> Markup:
    """Return one line of shares in [0, 1] without axes; empty where there are no points."""
    line = _within(Series(label, points), WHOLE)
    if not line.points:
        return Markup("")
    xs, height = [place for place, _ in line.points], 24
    area = _PlotArea((min(xs), max(xs)), (0.0, 1.0), height, above=2, below=2, width=120)
    drawn = [_line(area, line), *_dots(area, [line])]
    return Markup(
        '<svg class="spark" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    ).format(area.width, height, label, Markup("").join(drawn))


def token_bars(
    values: Sequence[float], classes: Sequence[str], *, label: str, height: int = 40
) -> Markup:
    """Return a bar for each token: `values` [A] from 0, and each token's class of view.css [A].

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


def number(value: float, digits: int = 3) -> str:
    """Return a value in so many digits, or a whole number where it has more; short enough for an axis."""
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
    """Return the finite points of a line in a part of the x axis, with its values at the part's ends."""
    low, high = part
    bands = series.band or [(0.0, 0.0)] * len(series.points)
    finite = [
        (place, value, *bounds)
        for (place, value), bounds in zip(series.points, bands, strict=True)
        if isfinite(place) and isfinite(value)
    ]
    kept: list[tuple[float, ...]] = [each for each in finite if low <= each[0] <= high]
    cuts = [end for end in part if finite and finite[0][0] < end < finite[-1][0]]
    kept += [(end, *(_at(finite, end, column) for column in (1, 2, 3))) for end in cuts]
    kept.sort(key=lambda row: row[0])  # points over one place keep their order
    return replace(
        series,
        points=[(place, value) for place, value, *_ in kept],
        band=[(least, most) for *_, least, most in kept] if series.band else (),
    )


def _at(rows: Sequence[Sequence[float]], place: float, column: int) -> float:
    """Return what a line through rows (x, value, ...) has in a column at `place`, which they surround."""
    after = bisect_left(rows, place, key=lambda row: row[0])
    if rows[after][0] == place or after == 0:
        return rows[after][column]
    one, other = rows[after - 1], rows[after]
    share = (place - one[0]) / (other[0] - one[0])
    return one[column] + share * (other[column] - one[column])


# --- drawing --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PlotArea:
    """Maps data to shares of the width, and to pixels from the top."""

    x_range: Interval
    y_range: Interval
    height: int
    above: int = _ABOVE
    below: int = _BELOW
    width: int = _WIDE  # of the picture of the lines, in its own units

    @property
    def is_tall(self) -> bool:
        """Whether it is wide, too, and has room for more."""
        return self.height >= _TALL

    @property
    def levels(self) -> list[float]:
        """Round values of y, which have lines."""
        return _ticks(*self.y_range, most=5 if self.is_tall else 4)

    @property
    def bottom(self) -> int:
        """The pixel at which the lines end."""
        return self.height - self.below

    def x(self, value: float) -> str:
        """Return a place across the stretched picture of the lines."""
        return f"{_share(value, self.x_range) * self.width:.1f}"

    def percent(self, value: float) -> str:
        """Return a place across the chart."""
        return f"{_share(value, self.x_range) * 100:.2f}%"

    def y(self, value: float) -> str:
        """Return pixels from the top."""
        share = _share(value, self.y_range)
        return f"{self.bottom - share * (self.bottom - self.above):.1f}"


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
    places = "L".join(f"{area.x(place)} {area.y(value)}" for place, value in series.points)
    return Markup('<path class="{}" d="M{}"><title>{}</title></path>').format(
        series.kind, places, series.name
    )


def _dots(area: _PlotArea, lines: Sequence[Series]) -> Iterator[Markup]:
    """Yield a dot for each line of one point, which has no length; not stretched as lines are."""
    for each in lines:
        if len(each.points) == 1:
            yield Markup(_dot(area, each, *each.points[0]))  # noqa: S704 - numbers, and a class of ours


def _dot(area: _PlotArea, series: Series, place: float, value: float) -> str:
    return f'<circle class="{series.kind}" cx="{area.percent(place)}" cy="{area.y(value)}" r="3"/>'


def _band(area: _PlotArea, series: Series) -> Markup:
    """Return the area between the bounds; a line from bound to bound where there is one point."""
    xs = [area.x(place) for place, _ in series.points]
    low = [f"{x} {area.y(bound)}" for x, (bound, _) in zip(xs, series.band, strict=True)]
    high = [f"{x} {area.y(bound)}" for x, (_, bound) in zip(xs, series.band, strict=True)]
    path = Markup('<path class="band {}" d="M{}Z"/>')
    return path.format(series.kind, "L".join([*low, *reversed(high)]))


def _scale(area: _PlotArea, title: str) -> Iterator[Markup]:
    """Yield the title of y, and its round values."""
    yield Markup('<text class="tick title" x="0" y="12">{}</text>').format(title)
    for value in area.levels:
        yield Markup('<text class="tick y" x="{}" y="{}">{}</text>').format(
            *(_SCALE - 6, area.y(value), number(value, 4))
        )


def _grid(area: _PlotArea, title: str) -> Iterator[Markup]:
    """Yield a line at each round value of y, the round values of x, and the title of x."""
    for value in area.levels:
        yield Markup('<line class="grid" x1="0" x2="100%" y1="{0}" y2="{0}"/>').format(
            area.y(value)
        )
    low, high = area.x_range
    is_wide = high - low > _NOTHING * max(1.0, abs(high))
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
    """Round values from `low` to `high`, about `most` of them."""
    raw = (high - low) / most
    power = 10.0 ** floor(log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
    first = ceil(low / step - 1e-9)
    return [step * index for index in range(first, floor(high / step + 1e-9) + 1)]


# --- values under the pointer ---------------------------------------------------------------


def _readings(area: _PlotArea, lines: Sequence[Series], x: str) -> Iterator[Markup]:
    """Yield an invisible column around each of some places; under the pointer it shows what the lines have there."""
    thin = [each for each in lines if each.kind == _THIN]
    lines = [each for each in lines if each.kind != _THIN]
    keys = [_key(each) if len(lines) > 1 else Markup("") for each in lines]
    places = _spread(
        sorted({place for each in lines for place, _ in each.points}),
        _MOST_READINGS if area.is_tall else _MOST_READINGS // 2,
    )
    low, high = area.x_range
    between = [(one + other) / 2 for one, other in pairwise(places)]
    for place, start, end in zip(places, [low, *between], [*between, high], strict=True):
        width = _share(end, area.x_range) - _share(start, area.x_range) if high > low else 1.0
        at, rows, dots = area.percent(place), [], []
        for key, each in zip(keys, lines, strict=True):
            if _surrounds(each, place):
                value = _at(each.points, place, 1)
                dots.append(_dot(area, each, place, value))
                rows.append(f"<li>{key}<b>{number(value)}</b>{_bounds(each, place)}</li>")
        rows += _extremes(thin, place)
        # Written without Markup.format, which escapes: a page has thousands of these, of numbers and escaped names.
        yield Markup(  # noqa: S704
            f'<g class="at"><rect x="{area.percent(start) if high > low else 0}" '
            f'width="{width * 100:.2f}%" height="{area.bottom}"/>'
            f'<line class="rule" x1="{at}" x2="{at}" y1="{area.above}" y2="{area.bottom}"/>{"".join(dots)}'
            f"{_card_start(area, place)}<li>{escape(x)}: {number(place)}</li>{''.join(rows)}</ul></foreignObject></g>"
        )


def _surrounds(series: Series, place: float) -> bool:
    return series.points[0][0] <= place <= series.points[-1][0]


def _extremes(lines: Sequence[Series], place: float) -> list[str]:
    """Return rows for the highest and the lowest of many lines; none without a line there."""
    values = [(_at(each.points, place, 1), each) for each in lines if _surrounds(each, place)]
    if not values:
        return []
    ends = {"highest": max(values, key=itemgetter(0)), "lowest": min(values, key=itemgetter(0))}
    return [
        f"<li>{word} of the others: {escape(each.short or each.name)} <b>{number(value)}</b></li>"
        for word, (value, each) in ends.items()
    ]


def _spread(places: Sequence[float], most: int) -> Sequence[float]:
    """Return at most so many of the places, the first and the last among them."""
    if len(places) <= most:
        return places
    step = (len(places) - 1) / (most - 1)
    return [places[round(index * step)] for index in range(most)]


def _key(series: Series) -> Markup:
    """Return a line's colour and name."""
    return Markup(
        '<svg class="key" viewBox="0 0 24 8"><path class="{}" d="M0 4H24"/></svg>{} '
    ).format(series.kind, series.short or series.name)


def _bounds(series: Series, place: float) -> str:
    """Return the bounds of a line's band at a place in words; empty without a band."""
    if not series.band:
        return ""
    rows = [(at, *each) for (at, _), each in zip(series.points, series.band, strict=True)]
    return f" ({number(_at(rows, place, 1))} to {number(_at(rows, place, 2))})"


def _card_start(area: _PlotArea, place: float) -> str:
    """Return the beginning of the values beside a place, on the side with more room."""
    share, at = _share(place, area.x_range), area.percent(place)
    side = ("right", at, f"{(1 - share) * 100:.2f}%") if share < 0.5 else ("left", "0", at)
    kind, left, width = side
    return (
        f'<foreignObject x="{left}" y="{area.above}" width="{width}" height="{area.bottom - area.above}">'
        f'<ul class="values {kind}">'
    )
