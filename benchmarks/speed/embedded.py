"""How fast the embedded environment steps: events, drawing and encoding apart, per resolution.

    python benchmarks/speed/embedded.py [--seeds 4] [--out benchmarks/results/embedded.json]

Every template of suite `desk` is played by its oracle; CPU seconds of one core are counted (so that
other load on the machine does not), the oracle's own thinking is not. The baseline draws the same
screens the usual way: RGB, shapes and text rendered anew each time, Pillow's PNG. The physical
limit that a lossless environment approaches is the compression alone: as many bytes as the screen
has pixels through deflate at level 1. The last line is one JSON object.
"""

# ruff: noqa: ARG002, D102 - the baseline overrides documented methods
from __future__ import annotations

import argparse
import io
import json
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from random import Random
from typing import TypeVar

from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from envs.contract.actions import Done
from envs.contract.registry import make_env
from envs.suites.embedded.app import App
from envs.suites.embedded.draw import Canvas, Rect, encode, font
from envs.suites.embedded.suites import DeskSuite, MiniSuite
from envs.suites.embedded.theme import DESK_THEMES, Colour, blend
from envs.suites.embedded.widgets import Ui

SIZES = ("168x168", "336x252", "448x336", "896x672", "1280x720")
T = TypeVar("T")


class NaiveCanvas(Canvas):
    """The baseline: the same calls on an RGB image, nothing cached."""

    def fill(self, box: Rect, colour: Colour) -> None:
        if box.width > 0 and box.height > 0:
            self._pen().rectangle(self._at(box), colour)

    def rounded(
        self, box: Rect, radius: int, colour: Colour, *, edge: Colour | None = None
    ) -> None:
        if box.width > 0 and box.height > 0:
            self._pen().rounded_rectangle(self._at(box), radius, colour, edge)

    def icon(self, name: str, box: Rect, colour: Colour, on: Colour | None = None) -> None:
        side = min(box.width, box.height)
        if side > 0:
            self.ellipse(box.centred(side, side), colour, on)

    def ellipse(self, box: Rect, colour: Colour, on: Colour | None = None) -> None:
        self._pen().ellipse(self._at(box), colour)

    def text(
        self, x: int, y: int, text: str, size: int, colour: Colour, on: Colour | None = None
    ) -> None:
        place = (x - self.origin[0], y - self.origin[1])
        self._pen().text(place, text, font=font(size), fill=colour)

    def dim(self) -> None:
        self.image = Image.blend(self.image, Image.new("RGB", self.image.size), 0.55)

    @contextmanager
    def clip(self, box: Rect):  # type: ignore[no-untyped-def]
        ox, oy = self.origin
        part = self.image.crop((box.x0 - ox, box.y0 - oy, box.x1 - ox, box.y1 - oy))
        inner = NaiveCanvas(part, self.palette, self.ground, (box.x0, box.y0))
        yield inner
        self.image.paste(inner.image, (box.x0 - ox, box.y0 - oy))

    def _pen(self) -> ImageDraw.ImageDraw:
        return ImageDraw.Draw(self.image)

    def _at(self, box: Rect) -> tuple[int, int, int, int]:
        ox, oy = self.origin
        return box.x0 - ox, box.y0 - oy, box.x1 - ox - 1, box.y1 - oy - 1


def paint_naively(app: App) -> Image.Image:
    """Return the present screen of `app`, drawn by the baseline."""
    ui = app.ui
    image = Image.new("RGB", (ui.width, ui.height), ui.theme.wall)
    canvas = NaiveCanvas(image, ui.palette, blend(ui.theme.wall, ui.theme.wall, 1.0))
    for layer in app.layers:
        if layer.dims:
            canvas.dim()
        layer.root.paint(ui, canvas)
    return canvas.image


def pillow_png(image: Image.Image) -> bytes:
    """Return an RGB image as Pillow writes it at its fastest level."""
    out = io.BytesIO()
    image.save(out, format="PNG", compress_level=1)
    return out.getvalue()


class CpuTimer:
    """CPU seconds by stage."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def run(self, stage: str, work: Callable[[], T]) -> T:
        """Do the work and count its time."""
        started = time.process_time()
        result = work()
        self.spent[stage] += time.process_time() - started
        return result


def stages_of_ours(book: CpuTimer, app: App) -> None:
    """Measure the cost of one step after the event, and of the compression alone."""
    canvas = book.run("paint", app.paint)
    book.run("png", lambda: encode(canvas, "png"))
    pixels = canvas.image.tobytes()
    book.run("deflate", lambda: zlib.compress(pixels, 1))


def stages_of_baseline(book: CpuTimer, app: App) -> None:
    """Measure the cost of the same screen as `stages_of_ours`, drawn and encoded the usual way."""
    image = book.run("paint", lambda: paint_naively(app))
    book.run("png", lambda: pillow_png(image))


def measure_stages(
    size: str, seeds: int, stages: Callable[[CpuTimer, App], None]
) -> dict[str, float]:
    """CPU milliseconds of each stage of a step at one resolution, averaged over the templates."""
    suite = DeskSuite()
    width, height = (int(side) for side in size.split("x"))
    scale = min(width / suite.size[0], height / suite.size[1], 1.6)
    clock, steps = CpuTimer(), 0
    for task_id, scene_of in suite.scenes.items():
        for warm, seed in product((False, True), range(seeds)):  # once to fill the caches
            rng = Random(f"{task_id}/{seed}")
            ui = Ui(width, height, DESK_THEMES[seed % 3], scale)
            scene = scene_of(rng, ui)
            app = App(ui, scene.layers)
            book = clock if warm else CpuTimer()
            while not scene.over and not (
                scene.ends_at_goal and scene.evaluate().outcome == "pass"
            ):
                action = scene.solve(app)
                if isinstance(action, Done):
                    break
                book.run("event", lambda a=action, p=app: p.dispatch(a))
                stages(book, app)
                steps += warm
    return {stage: 1000 * spent / steps for stage, spent in clock.spent.items()}


def measure_env(suite: str, size: str, seeds: int, encoding: str = "png") -> dict[str, float]:
    """Return the steps and the resets in a CPU second through the public `GuiEnv` calls."""
    env = make_env(suite, size=size, encoding=encoding)
    known = DeskSuite() if suite == "desk" else MiniSuite()
    clock, steps, resets = CpuTimer(), 0, 0
    for task_id in known.tasks:
        for warm, seed in product((False, True), range(seeds)):
            book = clock if warm else CpuTimer()
            options = {"task": task_id}
            book.run("reset", lambda s=seed, o=options: env.reset(seed=s, options=o))
            ended = False
            while not ended:
                action = env.oracle_action()  # type: ignore[attr-defined]
                _, _, ended, _, _ = book.run("step", lambda a=action: env.step(a))
                steps += warm
            resets += warm
    return {
        "steps_per_s": round(steps / clock.spent["step"]),
        "resets_per_s": round(resets / clock.spent["reset"]),
    }


def main() -> None:
    """Measure, print a table, and end in one JSON line."""
    parser = argparse.ArgumentParser(description="Benchmark of the embedded environment.")
    parser.add_argument("--seeds", type=int, default=4, help="episodes a template")
    parser.add_argument("--out", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    seeds = arguments.seeds
    sizes: dict[str, dict[str, float]] = {}
    print(
        "CPU ms   event  paint    png | limit: deflate | baseline: paint  png | steps/s: png  jpeg"
    )
    for size in SIZES:
        ours = measure_stages(size, seeds, stages_of_ours)
        base = measure_stages(size, seeds, stages_of_baseline)
        png, jpeg = (measure_env("desk", size, seeds, encoding) for encoding in ("png", "jpeg"))
        print(
            f"{size:>8}  {ours['event']:5.2f}  {ours['paint']:5.2f}  {ours['png']:5.2f} | "
            f"         {ours['deflate']:5.2f} |           {base['paint']:5.2f} {base['png']:5.2f} | "
            f"       {png['steps_per_s']:5} {jpeg['steps_per_s']:5}"
        )
        sizes[size] = {
            "raw_steps_per_s": round(1000 / (ours["event"] + ours["paint"])),
            "png_steps_per_s": png["steps_per_s"],
            "jpeg_steps_per_s": jpeg["steps_per_s"],
            "resets_per_s": png["resets_per_s"],
            "baseline_steps_per_s": round(1000 / sum(base.values())),
            "limit_steps_per_s": round(1000 / ours["deflate"]),
        }
    result = {
        "benchmark": "embedded",
        "unit": "per CPU second of one core",
        "limit": "deflate level 1 of one byte a pixel",
        "baseline": "RGB, nothing cached, Pillow PNG level 1",
        "desk": sizes,
        "mini": {"168x168": measure_env("mini", "168x168", arguments.seeds)},
    }
    line = json.dumps(result)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(line)


if __name__ == "__main__":
    main()
