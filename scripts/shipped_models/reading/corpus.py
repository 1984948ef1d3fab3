"""Write the corpus of `build_small.py`: screens that Chromium draws, in shards; a killed run goes on where it was.

    .venv/bin/python -m scripts.shipped_models.reading.corpus --out runs/corpus --rendered 12000 --pages 60

`--rendered` is the number of pages that are made for it (browser_screens.py), `--pages` the number of seeds of
each page of MiniWoB++ (page_screens.py). With `--held-out`, they are of what training never shows: words, the
font, the size, seeds of tests; their folders end in `-test`. `store.load(folder)` reads a folder.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from envs.contract.registry import make_env
from envs.suites.miniwob.env import MiniwobEnv
from envs.suites.miniwob.tasks import FIRST_TEST_SEED
from scripts.shipped_models.reading.browser_screens import Canvas, rendered_scenes
from scripts.shipped_models.reading.page_screens import PAGES, page_scenes
from scripts.shipped_models.reading.scene import Scene
from scripts.shipped_models.reading.store import write_shards
from scripts.shipped_models.reading.themes import HeldOut

SEED = "0"

SHARD = 200
"""Scenes of a shard of rendered pages."""

TESTS: tuple[HeldOut, ...] = ("words", "font", "size")

Shard = tuple[str, Callable[[], Iterable[Scene]]]


def rendered_shards(canvas: Canvas, count: int, held_out: HeldOut) -> Iterator[Shard]:
    """Yield the shards of `count` rendered scenes."""
    for first in range(0, count, SHARD):
        many = min(SHARD, count - first)
        name = f"{held_out or 'train'}-{canvas.scale:g}-{SEED}-{first:06d}-{many}"
        yield name, partial(rendered_scenes, canvas, SEED, many, held_out, first)


def page_shards(env: MiniwobEnv, scale: float, first: int, count: int) -> Iterator[Shard]:
    """Yield a shard for each page of MiniWoB++: a screen for each of `count` seeds from `first` on."""
    for page in PAGES:
        rng = Random(f"pages/{page}/{SEED}/{first}")
        name = f"{page}-{scale:g}-{SEED}-{first}-{count}"
        yield name, partial(page_scenes, env, page, range(first, first + count), rng, scale)


def main() -> None:
    """Write the shards that are missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--rendered", type=int, default=0, help="scenes made for it")
    parser.add_argument("--pages", type=int, default=0, help="seeds of each page")
    parser.add_argument("--scale", type=float, default=1.0, help="pixels of a CSS pixel")
    parser.add_argument("--held-out", action="store_true", help="scenes of tests")
    options = parser.parse_args()
    started = time.monotonic()
    total = 0

    def write(kind: str, shards: Iterator[Shard]) -> None:
        nonlocal total
        folder = options.out / f"{kind}{'-test' * options.held_out}"
        for name, count in write_shards(folder, shards):
            total += count
            print(f"{kind}/{name}: {total}, {time.monotonic() - started:.0f} s", flush=True)

    if options.rendered:
        canvas = Canvas(options.scale)
        for held_out in TESTS if options.held_out else ("",):
            write("rendered", rendered_shards(canvas, options.rendered, held_out))
        canvas.close()
    if options.pages:
        env = make_env("miniwob", scale=options.scale, browsers=1)
        assert isinstance(env, MiniwobEnv)
        first = FIRST_TEST_SEED if options.held_out else 0
        write("pages", page_shards(env, options.scale, first, options.pages))
        env.close()


if __name__ == "__main__":
    main()
