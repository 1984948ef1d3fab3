"""Films of episodes as pictures: each screen with its action drawn on it, the last one with the verdict.

film_strip       an episode as one picture, from left to right
animation        an episode as a list of pictures, one after the other
save_animation   writes an episode as a GIF in slow motion
heated           a screenshot with the marks of where its pointers looked
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
"""Steps in a strip by default."""

FRAME_MS, LAST_MS = 1200, 3000
"""Milliseconds for which a GIF shows a screen, and the last screen."""

_THUMB = 220  # pixels, width of a screen in a filmstrip
_GAP = 12
_CAPTION = 34
_LETTER = 6.4  # pixels, mean width of a letter in a caption
_LEAST_WIDTH = 320  # pixels, width of an animation at least
_INK = "#ff1493"  # colour of the marks of actions
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
    """Return one episode as a picture: each screen with its action, the last one with the verdict.

    The screenshots of the film are files in `folder`. `most` is the number of steps at most, `columns`
    the number of screens in a row (0: all), `width` the pixels of a screen. Raises RunDirectoryError for a
    missing screenshot.
    """
    # 1. Draw the actions on the screens.
    frames = film.frames[:most]
    shots = [_scaled(_with_marks(folder, frame), width) for frame in frames]
    shots.append(_scaled(_open(folder / film.last), width))
    height = shots[-1].height
    # 2. Draw the heading and the verdict.
    in_row = min(columns or len(shots), len(shots))
    rows = -(-len(shots) // in_row)
    top = 28 if heading else 0
    size = (_GAP + in_row * (width + _GAP), top + 20 + rows * (height + _CAPTION))
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    if heading:
        draw.text((_GAP, 8), heading, "black", ImageFont.load_default(15))
    is_cut = len(frames) < len(film.frames)
    label = f"{name}: {film.outcome}" + (
        f" (first {len(frames)} of {len(film.frames)} steps)" if is_cut else ""
    )
    colour = _COLOURS[film.outcome]
    draw.text((_GAP, top), label, colour, ImageFont.load_default(14))
    # 3. Place the screens in rows, with their texts below them, and a frame around the last one.
    places = [
        (_GAP + i % in_row * (width + _GAP), top + 20 + i // in_row * (height + _CAPTION))
        for i in range(len(shots))
    ]
    for place, shot, frame in zip(places, shots, [*frames, None], strict=True):
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
    """Return pictures of one size: each screen with its text below it, the last one with the verdict.

    Raises RunDirectoryError for a missing screenshot.
    """
    shots = [_with_marks(folder, frame) for frame in film.frames]
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
    """Write an episode as a GIF. Raises RunDirectoryError for a missing screenshot, and OSError."""
    first, *others = animation(folder, film)
    durations = [FRAME_MS] * len(others) + [LAST_MS]
    first.save(path, "GIF", save_all=True, append_images=others, duration=durations, loop=0)


def _open(path: Path) -> Image.Image:
    """Return a stored screenshot, decoded. Raises RunDirectoryError if it is missing or broken."""
    try:
        return as_seen(Image.open(io.BytesIO(path.read_bytes())))
    except FileNotFoundError:
        raise RunDirectoryError(f"{path}: a film's screenshot is missing; evaluate again") from None
    except BROKEN as error:
        fix = cure_of(error, "evaluate again")
        raise RunDirectoryError(
            f"{path}: a film's screenshot cannot be read: {error}; {fix}"
        ) from None


def _scaled(shot: Image.Image, width: int) -> Image.Image:
    """Return a screenshot scaled to a width; the pixels of an enlarged one stay sharp."""
    height = round(shot.height * width / shot.width)
    small = shot.width < width
    return shot.resize(
        (width, height), Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
    )


def _with_marks(folder: Path, frame: FilmFrame) -> Image.Image:
    """Return the screenshot of a step with the marks of its pointers and of its action."""
    shot = heated(_open(folder / frame.screenshot), frame.pointed)
    draw, thick = ImageDraw.Draw(shot), max(2, shot.width // 100)
    for mark in marks_of(frame.actions, shot.width):
        if isinstance(mark, Line):
            draw.line(mark.points, _INK, thick)
            continue
        for radius, colour in ((mark.radius + 1, "white"), (mark.radius, _INK)):
            draw.circle((mark.x, mark.y), radius, outline=colour, width=thick)
        draw.point((mark.x, mark.y), _INK)
    return shot


def heated(shot: Image.Image, maps: Sequence[PointerMap]) -> Image.Image:
    """Return a copy of a screenshot, RGB, with the heat, the regions and the candidates of its pointers."""
    picture = shot.convert("RGB")
    heats = [heat_of(pointer_map) for pointer_map in maps]
    for heat in heats:
        opacity = Image.fromarray((MOST_OPAQUE * heat).astype(np.uint8))
        colour = Image.new("RGB", shot.size, _HEAT)
        picture.paste(colour, mask=opacity.resize(shot.size, Image.Resampling.NEAREST))
    draw = ImageDraw.Draw(picture)
    thick = max(1, shot.width // 300)
    for pointer_map, heat in zip(maps, heats, strict=True):
        wide, high = shot.width / pointer_map.columns, shot.height / pointer_map.rows
        for x0, y0, x1, y1 in outline(heat):
            draw.line((x0 * wide, y0 * high, x1 * wide, y1 * high), _EDGE, thick)
        font = ImageFont.load_default(max(10, shot.width // 22))
        for number, region in reversed(list(enumerate(pointer_map.candidates, start=1))):
            at = region.x * shot.width, region.y * shot.height
            draw.text(
                at, str(number), "white", font, "mm", stroke_width=2 * thick, stroke_fill=_EDGE
            )
    return picture


def _caption(
    draw: ImageDraw.ImageDraw, at: tuple[int, int], text: str, colour: str, width: int
) -> None:
    """Draw a text as at most two lines within `width` pixels."""
    lines = textwrap.wrap(" ".join(text.split()), int(width / _LETTER))[:2]
    draw.multiline_text(at, "\n".join(lines), colour, ImageFont.load_default(12), spacing=2)
