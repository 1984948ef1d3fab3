"""Writes scenes of Chromium to a folder, in shards; goes on where it was ended.

    .venv/bin/python -m scripts.shipped_models.reading.corpus --out runs/corpus --rendered 12000 --pages 60

`--rendered` is the number of pages made for it (rendered.py), `--pages` the number of seeds of each page of
MiniWoB++, `--demonstrations` the number of the oracle's episodes of each page that has one (played.py).
With `--held-out`, they are of what training never shows: words, the font, the size; seeds of tests.
Those are in folders that end in `-test`. `store.load(folder)` reads a folder.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random

from envs.contract.registry import make_env
from envs.suites.miniwob.env import MiniwobEnv
from envs.suites.miniwob.tasks import FIRST_TEST_SEED
from scripts.shipped_models.reading.browser_screens import Canvas, rendered_scenes
from scripts.shipped_models.reading.episode_screens import (
    PAGES,
    SOLVED,
    demonstrations,
    page_scenes,
)
from scripts.shipped_models.reading.scene import Scene
from scripts.shipped_models.reading.store import write_shards
from scripts.shipped_models.reading.themes import HeldOut

SHARD = 200
"""Scenes of a shard of rendered pages."""

TESTS: tuple[HeldOut, ...] = ("words", "font", "size")

Shard = tuple[str, Callable[[], Iterable[Scene]]]


def rendered_shards(canvas: Canvas, seed: str, count: int, held_out: HeldOut) -> Iterator[Shard]:
    """Yield the shards of `count` rendered scenes."""
    for first in range(0, count, SHARD):
        many = min(SHARD, count - first)
        name = f"{held_out or 'train'}-{canvas.scale:g}-{seed}-{first:06d}-{many}"
        yield name, partial(rendered_scenes, canvas, seed, many, held_out, first)


def page_shards(
    env: MiniwobEnv, scale: float, seed: str, first: int, count: int, only: Sequence[str]
) -> Iterator[Shard]:
    """Yield a shard for each page: a screen for each of its seeds."""
    for page in only or PAGES:
        rng = Random(f"pages/{page}/{seed}/{first}")
        name = f"{page}-{scale:g}-{seed}-{first}-{count}"
        yield name, partial(page_scenes, env, page, range(first, first + count), rng, scale)


def demonstration_shards(
    env: MiniwobEnv, scale: float, first: int, count: int, only: Sequence[str]
) -> Iterator[Shard]:
    """Yield a shard for each page with an oracle: the steps of its episodes that pass."""
    for page in only or SOLVED:
        name = f"{page}-{scale:g}-{first}-{count}"
        yield name, partial(demonstrations, env, page, range(first, first + count), scale)


def main() -> None:
    """Write what is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--rendered", type=int, default=0, help="scenes made for it")
    parser.add_argument("--pages", type=int, default=0, help="seeds of each page")
    parser.add_argument("--demonstrations", type=int, default=0, help="episodes of each page")
    parser.add_argument("--only", nargs="*", default=(), help="pages, for all")
    parser.add_argument("--first", type=int, default=0, help="first seed of pages and episodes")
    parser.add_argument("--scale", type=float, default=1.0, help="pixels of a CSS pixel")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--held-out", action="store_true", help="scenes of tests")
    given = parser.parse_args()
    started = time.monotonic()
    first = given.first + (FIRST_TEST_SEED if given.held_out else 0)
    total = 0

    def write(kind: str, shards: Iterator[Shard]) -> None:
        nonlocal total
        for name, count in write_shards(given.out / f"{kind}{'-test' * given.held_out}", shards):
            total += count
            print(f"{kind}/{name}: {total}, {time.monotonic() - started:.0f} s", flush=True)

    if given.rendered:
        canvas = Canvas(given.scale)
        for held_out in TESTS if given.held_out else ("",):
            write("rendered", rendered_shards(canvas, given.seed, given.rendered, held_out))
        canvas.close()
    if given.pages or given.demonstrations:
        env = make_env("miniwob", scale=given.scale, browsers=1)
        assert isinstance(env, MiniwobEnv)
        many, episodes = given.pages, given.demonstrations
        if many:
            write("pages", page_shards(env, given.scale, given.seed, first, many, given.only))
        if episodes:
            shards = demonstration_shards(env, given.scale, first, episodes, given.only)
            write("demonstrations", shards)
        env.close()


if __name__ == "__main__":
    main()
