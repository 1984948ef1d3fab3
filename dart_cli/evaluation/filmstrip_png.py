"""Episodes as pictures: each screen with its action drawn on it, the last with the verdict.

film_strip    an episode from left to right, as one picture
animation     the same as frames, one after the other; save_animation, as a GIF in slow motion
heated        a screenshot with what its pointers looked at
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from bus.errors import RunDirectoryError, cure_of
from bus.messages import PointerMap
from dart_cli.evaluation.films import Film, FilmFrame
from dart_cli.evaluation.marks import MOST_OPAQUE, Line, heat_of, marks_of, outline
from envs.contract.screenshots import BROKEN, as_seen

MAX_FRAMES = 7
"""Screens of a strip, unless `most` is given."""

FRAME_MS, LAST_MS = 1200, 3000
"""How long a GIF shows a screen, and the last one."""

_THUMB = 220  # pixels, width of a frame in a filmstrip
_GAP = 12
_CAPTION = 34
_LETTER = 6.4  # pixels, mean width of a letter of a caption
_LEAST_WIDTH = 320  # pixels of a frame of an animation
_INK = "#ff1493"  # of actions
_HEAT, _EDGE = (42, 90, 255), (20, 30, 120)
_COLOURS = {"pass": "#1a7f37", "fail": "#cf222e", "invalid": "#9a6700"}


def film_strip(
    folder: Path,
    film: Film,
    name: str,
    heading: str,
    *,
    most: int = MAX_FRAMES,
    columns: int = 0,
    width: int = _THUMB,
) -> Image.Image:
    """One episode from left to right: each screen with its action, the last with the verdict.

    The film's screenshots are files of `folder`. `columns` is how many screens are in a row, 0 for
    all; `width` is that of a screen, pixels. Raises RunDirectoryError for a missing screenshot.
    """
    shown = film.frames[:most]
    shots = [_scaled(_drawn(folder, f), width) for f in shown]
    shots.append(_scaled(_open(folder / film.last), width))
    height = shots[-1].height
    in_row = min(columns or len(shots), len(shots))
    rows = -(-len(shots) // in_row)
    top = 28 if heading else 0
    size = (_GAP + in_row * (width + _GAP), top + 20 + rows * (height + _CAPTION))
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    if heading:
        draw.text((_GAP, 8), heading, "black", ImageFont.load_default(15))
    skipped = len(film.frames) - len(shown)
    label = f"{name}: {film.outcome}" + (
        f" (first {len(shown)} of {len(film.frames)} steps)" if skipped else ""
    )
    colour = _COLOURS[film.outcome]
    draw.text((_GAP, top), label, colour, ImageFont.load_default(14))
    places = [
        (_GAP + i % in_row * (width + _GAP), top + 20 + i // in_row * (height + _CAPTION))
        for i in range(len(shots))
    ]
    for place, shot, frame in zip(places, shots, [*shown, None], strict=True):
        sheet.paste(shot, place)
        text, ink = (
            (film.reason or film.outcome, colour) if frame is None else (frame.text, "black")
        )
        _caption(draw, (place[0], place[1] + 2 + height), text, ink, width)
    left, upper = places[-1]
    box = (left - 2, upper - 2, left + width + 1, upper + height + 1)
    draw.rectangle(box, outline=colour, width=3)
    return sheet


def animation(folder: Path, film: Film) -> list[Image.Image]:
    """Pictures of one size: each screen with its action below, the last with the verdict.

    Raises RunDirectoryError for a missing screenshot.
    """
    shots = [_drawn(folder, frame) for frame in film.frames]
    shots.append(_open(folder / film.last))
    texts = [f"{i}. {frame.text}" for i, frame in enumerate(film.frames, start=1)]
    texts.append(f"{film.outcome}: {film.reason}" if film.reason else film.outcome)
    width = max(_LEAST_WIDTH, shots[-1].width)
    pictures = []
    for shot, text in zip(shots, texts, strict=True):
        screen = _scaled(shot, width)
        picture = Image.new("RGB", (width, screen.height + 2 * _CAPTION), "white")
        picture.paste(screen, (0, _CAPTION))
        draw = ImageDraw.Draw(picture)
        _caption(draw, (4, 3), film.instruction, "black", width)
        ink = _COLOURS[film.outcome] if text is texts[-1] else "black"
        _caption(draw, (4, _CAPTION + 3 + screen.height), text, ink, width)
        pictures.append(picture)
    return pictures


def save_animation(path: Path, folder: Path, film: Film) -> None:
    """Write an episode as a GIF. Raises RunDirectoryError for a missing screenshot, OSError."""
    first, *others = animation(folder, film)
    lasts = [FRAME_MS] * len(others) + [LAST_MS]
    first.save(path, "GIF", save_all=True, append_images=others, duration=lasts, loop=0)


def _open(path: Path) -> Image.Image:
    try:
        return as_seen(Image.open(io.BytesIO(path.read_bytes())))
    except FileNotFoundError:
        raise RunDirectoryError(f"{path}: a film's screenshot is missing; evaluate again") from None
    except BROKEN as error:
        cure = cure_of(error, "evaluate again")
        raise RunDirectoryError(
            f"{path}: a film's screenshot cannot be read: {error}; {cure}"
        ) from None


def _scaled(shot: Image.Image, width: int) -> Image.Image:
    height = round(shot.height * width / shot.width)
    small = shot.width < width
    return shot.resize(
        (width, height), Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
    )


def _drawn(folder: Path, frame: FilmFrame) -> Image.Image:
    """Return the screenshot with the marks of its action, over where its pointers looked."""
    shot = heated(_open(folder / frame.screenshot), frame.pointed)
    draw, thick = ImageDraw.Draw(shot), max(2, shot.width // 100)
    for mark in marks_of(frame.action, shot.width):
        if isinstance(mark, Line):
            draw.line(mark.points, _INK, thick)
            continue
        for radius, colour in ((mark.radius + 1, "white"), (mark.radius, _INK)):
            draw.circle((mark.x, mark.y), radius, outline=colour, width=thick)
        draw.point((mark.x, mark.y), _INK)
    return shot


def heated(shot: Image.Image, maps: Sequence[PointerMap]) -> Image.Image:
    """Return the screenshot with the heat, the regions and the candidates of its pointers: an own picture, RGB."""
    picture = shot.convert("RGB")
    heats = [heat_of(each) for each in maps]
    for heat in heats:
        opacity = Image.fromarray((MOST_OPAQUE * heat).astype(np.uint8))
        colour = Image.new("RGB", shot.size, _HEAT)
        picture.paste(colour, mask=opacity.resize(shot.size, Image.Resampling.NEAREST))
    draw = ImageDraw.Draw(picture)
    thick = max(1, shot.width // 300)
    for each, heat in zip(maps, heats, strict=True):
        wide, high = shot.width / each.columns, shot.height / each.rows
        for x0, y0, x1, y1 in outline(heat):
            draw.line((x0 * wide, y0 * high, x1 * wide, y1 * high), _EDGE, thick)
        font = ImageFont.load_default(max(10, shot.width // 22))
        for nth, region in reversed(list(enumerate(each.candidates, start=1))):
            at = region.x * shot.width, region.y * shot.height
            draw.text(at, str(nth), "white", font, "mm", stroke_width=2 * thick, stroke_fill=_EDGE)
    return picture


def _caption(
    draw: ImageDraw.ImageDraw, at: tuple[int, int], text: str, colour: str, width: int
) -> None:
    """Two lines at most, in `width` pixels."""
    lines = textwrap.wrap(" ".join(text.split()), int(width / _LETTER))[:2]
    draw.multiline_text(at, "\n".join(lines), colour, ImageFont.load_default(12), spacing=2)
