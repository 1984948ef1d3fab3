"""Writes scenes of Chromium to a folder, in shards; goes on where it was ended.

    .venv/bin/python -m scripts.small_base.corpus --out runs/corpus --rendered 12000 --pages 60

`--rendered` is the number of pages made for it (rendered.py). With `--held-out`, they are of what
training never shows: words, the font, the size. `store.load(folder)` reads all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from scripts.small_base.rendered import Canvas, rendered_scenes
from scripts.small_base.scene import Scene
from scripts.small_base.store import write_shards
from scripts.small_base.themes import HeldOut

SHARD = 200
"""Scenes of a shard of rendered pages."""

TESTS: tuple[HeldOut, ...] = ("words", "font", "size")

Shard = tuple[str, Callable[[], Iterable[Scene]]]


def rendered_shards(canvas: Canvas, seed: str, count: int, held_out: HeldOut) -> Iterator[Shard]:
    """The shards of `count` rendered scenes."""
    for first in range(0, count, SHARD):
        many = min(SHARD, count - first)
        name = f"{held_out or 'train'}-{canvas.scale:g}-{seed}-{first:06d}-{many}"
        yield name, partial(rendered_scenes, canvas, seed, many, held_out, first)


def main() -> None:
    """Write what is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--rendered", type=int, default=0, help="scenes made for it")
    parser.add_argument("--scale", type=float, default=1.0, help="pixels of a CSS pixel")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--held-out", action="store_true", help="scenes of tests")
    arguments = parser.parse_args()
    started = time.monotonic()
    total = 0
    if arguments.rendered:
        canvas = Canvas(arguments.scale)
        for held_out in TESTS if arguments.held_out else ("",):
            shards = rendered_shards(canvas, arguments.seed, arguments.rendered, held_out)
            for name, count in write_shards(arguments.out / "rendered", shards):
                total += count
                print(f"{name}: {total} scenes, {time.monotonic() - started:.0f} s", flush=True)
        canvas.close()


if __name__ == "__main__":
    main()
