"""Draw where a model that points looks: heat map, regions and click over screenshots of a grounding set.

    .venv/bin/python scripts/draw_pointing.py MODEL SET_FOLDER --items 0,5,9 --out docs/images/pointing.png

MODEL is a folder with a pointer head, SET_FOLDER what `dart eval grounding` reads. Green is what was meant.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bus.errors import DartError, UserError
from bus.messages import PointerMap
from dart_cli.config.schema import Config
from dart_cli.engines.responder import PolicyResponder
from dart_cli.evaluation.filmstrip_png import heated
from dart_cli.grounding.formats import grounding_config, opening_of
from dart_cli.grounding.items import Item, Point, bounds_of
from dart_cli.grounding.reader import read_set
from dart_cli.grounding.scorers import PointerScorer
from dart_cli.player.chosen_model import loaded_model
from envs.contract.screenshots import as_seen

WIDTH, GAP, CAPTION = 420, 16, 64  # pixels
TARGET, CLICKED = "#1a7f37", "#ff1493"


def main() -> int:
    """Read the options, ask the model, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="a folder with a pointer head")
    parser.add_argument("set", type=Path, help="a grounding set")
    parser.add_argument("--items", default="0,1,2", help="their places in the set, from 0")
    parser.add_argument("--action-parser", default="", help="as of dart eval grounding")
    parser.add_argument("--out", type=Path, required=True, help="a PNG file")
    options = parser.parse_args()
    try:
        items = _pick(read_set(options.set, "").items, options.items)
        pointing = ["policy.pointing=pointer"]
        config, answers = grounding_config(
            options.model, options.action_parser, pointing, refusals=False
        )
        pointings = asyncio.run(_point_at(config, opening_of(answers), items))
        _sheet(
            [
                _draw_item(item, *pointing_of_item)
                for item, pointing_of_item in zip(items, pointings, strict=True)
            ]
        ).save(options.out, optimize=True)
    except DartError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _pick(items: Sequence[Item], places: str) -> list[Item]:
    try:
        return [items[int(text)] for text in places.split(",")]
    except (ValueError, IndexError):
        raise UserError(f"--items {places}: must be places in 0 to {len(items) - 1}") from None


async def _point_at(
    config: Config, opening: str, items: Sequence[Item]
) -> list[tuple[PointerMap, Point]]:
    """Return the map and the click of each item."""
    async with loaded_model(config, None, -1) as model:
        scorer = PointerScorer(cast("PolicyResponder", model.responder), opening, 1)
        return [await scorer.point_at(item) for item in items]


def _draw_item(item: Item, pointed: PointerMap, click: Point) -> Image.Image:
    with Image.open(io.BytesIO(item.image.read_bytes())) as opened:
        picture = as_seen(opened)
    scale = WIDTH / picture.width
    sharp = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    shot = picture.resize((WIDTH, round(picture.height * scale)), sharp)
    shot = heated(shot, [pointed])
    draw = ImageDraw.Draw(shot)
    if item.region is not None:
        box = bounds_of(item.region)
        corners = (box.x0 * scale, box.y0 * scale, (box.x1 + 1) * scale, (box.y1 + 1) * scale)
        draw.rectangle(corners, outline=TARGET, width=3)
    x, y = ((number + 0.5) * scale for number in click)
    for radius, colour, thick in ((17, "white", 6), (16, CLICKED, 4)):
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=colour, width=thick)
    sheet = Image.new("RGB", (WIDTH, shot.height + CAPTION), "white")
    sheet.paste(shot)
    scores = ", ".join(
        f"{nth}: {candidate.score:.3f}" for nth, candidate in enumerate(pointed.candidates, start=1)
    )
    lines = [*textwrap.wrap(item.instruction, 52)[:2], f"regions {scores}"]
    ImageDraw.Draw(sheet).multiline_text(
        (2, shot.height + 4), "\n".join(lines), "black", ImageFont.load_default(15), spacing=3
    )
    return sheet


def _sheet(pictures: Sequence[Image.Image]) -> Image.Image:
    """Return the pictures beside one another."""
    height = max(picture.height for picture in pictures)
    sheet = Image.new("RGB", (GAP + len(pictures) * (WIDTH + GAP), height + GAP), "white")
    for nth, picture in enumerate(pictures):
        sheet.paste(picture, (GAP + nth * (WIDTH + GAP), GAP))
    return sheet


if __name__ == "__main__":
    sys.exit(main())
