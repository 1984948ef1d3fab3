"""The page of an evaluation: its scores, and the misses as pictures, in one HTML file without scripts.

misses_page  returns the page
picture_of   draws a screenshot with the region that was meant, and the model's candidates
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape

from PIL import Image, ImageDraw

from dart_cli.grounding.items import Answer, Box, Item, Point, bounds_of
from dart_cli.grounding.scores import Report, Score
from dart_cli.runtime.tables import fraction
from envs.contract.screenshots import as_seen

WIDTH = 440
"""Largest width of a picture, pixels."""

LONG = 12
"""Rows of a table; a longer one is folded."""

DETAIL_FROM = 1000
"""Screens of this width or more, pixels, are shown a second time, cropped to the surroundings of the
region."""

_MEANT, _FIRST, _OTHER = "#1a7f37", "#ff1493", "#0969da"
_STYLE = f"""
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1400px; padding: 0 1em;
  color: #1f2328; background: #fff; }}
table {{ border-collapse: collapse; margin: 1em 0; }}
caption {{ text-align: left; font-weight: 600; padding: .3em 0; }}
summary {{ font-weight: 600; padding: .3em 0; }}
td, th {{ padding: .2em .8em; border-bottom: 1px solid #d0d7de; text-align: left; }}
td + td, th + th {{ text-align: right; }}
.settings td {{ text-align: left; white-space: pre-wrap; overflow-wrap: anywhere; }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax({WIDTH}px, 1fr)); gap: 1.6em; }}
figure {{ margin: 0; overflow-wrap: anywhere; }}
img {{ max-width: 100%; border: 1px solid #d0d7de; display: block; margin-bottom: .4em; }}
figcaption b {{ display: block; }}
small {{ color: #59636e; display: block; }}
.meant {{ color: {_MEANT}; }} .first {{ color: {_FIRST}; }} .other {{ color: {_OTHER}; }}
"""


def misses_page(
    title: str,
    labels: Mapping[str, str],
    report: Report,
    misses: Sequence[tuple[Item, Answer | None]],
    total: int,
) -> str:
    """Return a page with `misses`, some of `total`; `labels` are the settings behind the figures."""
    digest = base64.b64encode(sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'"
    rows = "".join(f"<tr><td>{escape(k)}<td>{escape(v)}" for k, v in labels.items())
    scores = [_scores("all items", [report.overall])]
    scores += [_by(trait, some) for trait, some in report.by.items() if len(some) > 1]
    count = f"{len(misses)} of {total}" if len(misses) < total else str(total)
    return "".join(
        [
            "<!doctype html><html lang=en><meta charset=utf-8>",
            f'<meta http-equiv=Content-Security-Policy content="{policy}">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>",
            f"<table class=settings><caption>settings</caption>{rows}</table>",
            *scores,
            f"<h2>{count} misses</h2><p><span class=meant>what was meant</span>, ",
            "<span class=first>where the model pointed</span>, ",
            "<span class=other>its other candidates</span>. Rings of the same place cover each other.",
            f"<main>{''.join(_figure(item, answer) for item, answer in misses)}</main></html>\n",
        ]
    )


def _by(trait: str, scores: Sequence[Score]) -> str:
    """Return the table of a trait, folded if it is long."""
    table = _scores(f"by {trait}", scores)
    if len(scores) <= LONG:
        return table
    return f"<details><summary>by {escape(trait)}: {len(scores)}</summary>{table}</details>"


def _scores(caption: str, scores: Sequence[Score]) -> str:
    """Return a table of scores as HTML."""
    head = "".join(f"<th>{name}" for name in ("", "hit@1", "95 %", "hit@3", "overlap@1", "n"))
    rows = [
        f"<tr><td>{escape(row.name)}<td>{fraction(row.hit)}"
        f"<td>{row.interval[0]:.2f} - {row.interval[1]:.2f}"
        f"<td>{'n/a' if row.hit_of_three is None else fraction(row.hit_of_three)}"
        f"<td>{fraction(row.overlap)}<td>{row.n}"
        for row in scores
    ]
    return f"<table><caption>{escape(caption)}</caption><tr>{head}{''.join(rows)}</table>"


def _figure(item: Item, answer: Answer | None) -> str:
    """Return a miss as HTML: its pictures, its instruction, and what the model answered."""
    points = answer.points if answer is not None else []
    text = "no answer" if answer is None else " | ".join(answer.texts)
    problem = answer.problem if answer is not None else ""
    traits = ", ".join(f"{t} {'/'.join(of)}" for t, of in item.traits.items() if "," not in t)
    images = [picture_of(item, points)]
    if item.size[0] >= DETAIL_FROM and item.region is not None:
        images.append(picture_of(item, points, around=bounds_of(item.region)))
    tags = "".join(
        f'<img alt="" src="data:image/jpeg;base64,{_encoded(image)}">' for image in images
    )
    return (
        f"<figure>{tags}<figcaption><b>{escape(item.instruction)}</b>{escape(text[:400])}"
        f"<small>{escape(problem)}</small><small>{escape(item.id)}: {escape(traits)}</small>"
        "</figcaption></figure>"
    )


def picture_of(
    item: Item, points: Sequence[Point | None], around: Box | None = None
) -> Image.Image:
    """Return the item's screenshot, at most WIDTH pixels wide, with its region and the candidates.

    With `around`, it is cropped to that box and its surroundings.
    """
    with Image.open(io.BytesIO(item.image.read_bytes())) as opened:
        shot = as_seen(opened)
    left, top = 0, 0
    if around is not None:
        reach = max(120.0, 1.5 * (around.x1 - around.x0), 1.5 * (around.y1 - around.y0))
        left, top = max(0, int(around.x0 - reach)), max(0, int(around.y0 - reach))
        right = min(shot.width, int(around.x1 + reach) + 1)
        shot = shot.crop((left, top, right, min(shot.height, int(around.y1 + reach) + 1)))
    scale = min(1.0, WIDTH / shot.width)
    if scale == 1.0 and 2 * shot.width <= WIDTH:
        scale = WIDTH // shot.width
    picture = shot.resize(
        (max(1, round(shot.width * scale)), max(1, round(shot.height * scale))),
        Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS,
    )
    draw = ImageDraw.Draw(picture)

    def at(point: Point) -> Point:
        return (point[0] - left) * scale, (point[1] - top) * scale

    if item.region is not None:
        corners = [at(corner) for corner in item.region.corners]
        for colour, width in (("white", 5), (_MEANT, 3)):
            draw.line([*corners, corners[0]], colour, width, joint="curve")
    for nth, point in reversed(list(enumerate(points))):
        if point is not None:
            x, y = at((point[0] + 0.5, point[1] + 0.5))
            for extra, colour in ((1, "white"), (0, _OTHER if nth else _FIRST)):
                radius = 8 + extra
                draw.ellipse((x - radius, y - radius, x + radius, y + radius), None, colour, 3)
            draw.line((x - 2, y, x + 2, y), _OTHER if nth else _FIRST, 2)
    return picture


def _encoded(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=80)
    return base64.b64encode(buffer.getvalue()).decode()
