"""Random pages that Chromium draws in the browser of suite `miniwob`.

    Canvas            a page of that browser whose document is replaced
    rendered_scenes   random scenes of it

About half of the pages look as MiniWoB++'s do; the others have other fonts, colours and grounds.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from functools import partial
from html import escape
from random import Random

from PIL import Image

from envs.contract.actions import Click
from envs.suites.miniwob.browser import BrowserHost
from envs.suites.miniwob.env import find_pages
from envs.tools.browser.process import find_chromium
from scripts.shipped_models.reading import words
from scripts.shipped_models.reading.looking import look
from scripts.shipped_models.reading.parts import PARTS, Writer, dialog
from scripts.shipped_models.reading.scene import Scene
from scripts.shipped_models.reading.themes import HeldOut, free_theme, miniwob_theme

FRAME = "click-tab-2"
"""The page whose document is replaced: it loads core.css and jQuery UI."""

PAGES_OF_ONE = 400
"""Scenes after which the browser's page is loaded again."""

DEADLINE_S = 20.0

_PREPARE = """
(() => {
  for (const each of document.querySelectorAll("style")) {
    if (!each.textContent.includes("base-select")) each.remove();
  }
  const style = document.createElement("style");
  style.id = "own";
  document.head.append(style);
})()
"""

_SHOW = """
((seed, css, html) => {
  Math.seedrandom(seed);
  for (const each of [...document.body.children]) {
    if (each.id !== "wrap" && !/sync-task-cover|reward-display|click-canvas/.test(each.id)) each.remove();
  }
  document.querySelector("#own").textContent = css;
  const wrap = document.querySelector("#wrap");
  wrap.innerHTML = html;
  scrollTo(0, 0);
  $(".ui-made-tabs").tabs();
  $(".ui-made-accordion").accordion({ heightStyle: "content" });
  $(".ui-made-menu").menu();
  $(".ui-made-spinner").spinner();
  $(".ui-made-slider").each((_, each) => {
    $(each).slider({ max: Number(each.dataset.most), value: Number(each.dataset.v) });
  });
  $(".ui-made-calendar").each((_, each) => {
    $(each).datepicker({ defaultDate: new Date(each.dataset.day + "T12:00:00") });
  });
  $(".ui-made-dialog").each((_, each) => {
    const buttons = each.dataset.buttons.split(",").map((text) => ({ text, click: () => {} }));
    $(each).dialog({ buttons: Math.random() < 0.6 ? buttons : [], width: 105 + 40 * Math.random(), resizable: false });
    const left = Math.random() * 15, top = 52 + Math.random() * 40;
    $(each).closest(".ui-dialog").css({ left, top, position: "absolute" });
  });
  document.activeElement?.blur();
  for (const each of document.querySelectorAll(".own-scrolls")) each.scrollTop = Number(each.dataset.by);
  if (Math.random() < 0.15) document.querySelector("#area input, #area button")?.focus();
  return true;
})(%s, %s, %s)
"""

_CLOSED = """
(() => {
  const list = [...document.querySelectorAll("#area select:not([size])")].find((each) => {
    const box = each.getBoundingClientRect();
    return box.bottom < 150 && box.top > 2 && !document.querySelector(".own-dialog, .ui-dialog");
  });
  if (!list) return null;
  const box = list.getBoundingClientRect();
  return [box.left + Math.min(box.width, 150) / 2, (box.top + box.bottom) / 2];
})()
"""


class Canvas:
    """A page of the browser that shows HTML; `scale` is the pixels of a CSS pixel."""

    def __init__(self, scale: float = 1.0, chromium: str = "") -> None:
        self.scale = scale
        binary = partial(find_chromium, chromium)
        self._host = BrowserHost(binary, find_pages, scale, "png", DEADLINE_S)
        self._host.join()
        self._scenes = 0
        self._page = self._host.take(FRAME)
        self._begin()

    def show(self, seed: str, css: str, html: str) -> None:
        """Replace what is shown; the page's own chance begins with `seed`. Raises EnvError."""
        if self._scenes >= PAGES_OF_ONE:
            self._begin()
        self._scenes += 1
        self._page.rest()
        self._page.evaluate(_SHOW % tuple(json.dumps(each) for each in (seed, css, html)))
        self._page.pass_time(50)

    def open_list(self) -> None:
        """Open a select box, if one is there with room below it."""
        place = self._page.evaluate(_CLOSED)
        if place:
            x, y = (round(number * self.scale) for number in place)
            self._page.act(Click(x=x, y=y))
            self._page.pass_time(50)

    def scene(self, key: str) -> Scene:
        """Return what is shown now."""
        looked = look(self._page.evaluate, self.scale)
        return Scene(key, self._page.look(), looked.glyphs, looked.things, unread=looked.unread)

    def close(self) -> None:
        """Close the page and its browser."""
        self._page.close()
        self._host.leave()

    def _begin(self) -> None:
        self._scenes = 0
        self._page.load(FRAME)
        self._page.start(0, "train")
        self._page.evaluate(_PREPARE)


def rendered_scenes(
    canvas: Canvas, seed: str, count: int, held_out: HeldOut = "", first: int = 0
) -> Iterator[Scene]:
    """Yield `count` random scenes from number `first` on; each depends on its seed and number alone."""
    for number in range(first, first + count):
        rng = Random(f"{seed}/{held_out}/{number}")
        css, html, opens = random_page(rng, held_out)
        canvas.show(str(number), css, html)
        if opens:
            canvas.open_list()
        yield canvas.scene(f"rendered/{seed}/{held_out}/{canvas.scale:g}/{number}")


def random_page(rng: Random, held_out: HeldOut = "") -> tuple[str, str, bool]:
    """Return CSS and HTML of a page, and whether a select box is to be opened in it."""
    writer = Writer(rng, held_out == "words")
    is_miniwob = rng.random() < 0.5
    css = (miniwob_theme if is_miniwob else free_theme)(rng, held_out)
    names = rng.choices([*PARTS], [share for share, _ in PARTS.values()], k=rng.randint(2, 6))
    pieces = [PARTS[name][1](writer) for name in names]
    top = _strip(rng, writer) if rng.random() < (0.85 if is_miniwob else 0.35) else ""
    area = _laid_out(rng, pieces)
    over = dialog(writer) if rng.random() < 0.08 else ""
    return css, _ground(rng, is_miniwob) + top + area + over, rng.random() < 0.6


def _strip(rng: Random, writer: Writer) -> str:
    """Return the yellow strip with an instruction above every page of MiniWoB++."""
    first, second = writer.label(), writer.label()
    instruction = rng.choice(
        (
            f'Click on the "{first}" button.',
            f"Select {first}, {second} and click Submit.",
            f'Enter "<span class="bold">{first}</span>" into the text field and press Submit.',
            f"Find the {first} by <b>{second}</b> and click the {rng.choice(words.UI_WORDS)} button.",
            f'Expand the section below, find "{first}" and click on it.',
            f"What is the {first} of <span class='bold'>{second}</span>? Type it and press Submit.",
            f"Drag {first} to {second}, then press {rng.choice(words.UI_WORDS)}.",
            escape(words.sentence(rng, writer.held_out, 14)),
        )
    )
    return f'<div id="query">{instruction}</div>'


def _laid_out(rng: Random, pieces: list[str]) -> str:
    """Return the parts below one another, apart by chance, now and then scrolled or moved to the side."""
    blocks = []
    for piece in pieces:
        space = rng.choice((0, 1, 2, 4, 8, 14))
        side = rng.choice((0, 0, 0, 2, 6, 15, 30))
        centred = "text-align:center;" if rng.random() < 0.08 else ""
        blocks.append(
            f'<div class="own-piece" style="{centred}margin:{space}px 0 0 {side}px">{piece}</div>'
        )
    inner = "".join(blocks)
    if rng.random() < 0.15:
        high, by = rng.randint(80, 155), rng.choice((0, 0, 20, 45, 90))
        inner = (
            f'<div class="own-scrolls" data-by="{by}" style="height:{high}px;overflow-y:scroll">'
            f"{inner}</div>"
        )
    return f'<div id="area">{inner}</div>'


def _ground(rng: Random, is_miniwob: bool) -> str:
    """Return the ground of the page: nothing, a little noise or a gradient."""
    if rng.random() < (0.96 if is_miniwob else 0.6):
        return ""
    if rng.random() < 0.5:
        deep = rng.uniform(0.05, 0.25)
        turn = rng.randrange(360)
        return f'<div id="ground" style="z-index:0;background:linear-gradient({turn}deg,rgba(128,128,128,0),rgba(128,128,128,{deep:.2f}))"></div>'
    opacity = rng.uniform(0.06, 0.2)
    return (
        f'<img id="ground" data-r="-" style="z-index:0;opacity:{opacity:.2f}" src="{_noise(rng)}">'
    )


def _noise(rng: Random) -> str:
    """Return a picture of grey noise, as an address."""
    grain = rng.choice((1, 2, 3))
    small = Image.frombytes(
        "L", (160 // grain, 210 // grain), rng.randbytes((160 // grain) * (210 // grain))
    )
    buffer = io.BytesIO()
    small.resize(
        (160, 210), Image.Resampling.NEAREST if grain > 1 else Image.Resampling.BILINEAR
    ).save(buffer, "png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
