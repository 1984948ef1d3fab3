"""How rendered pages look: MiniWoB++'s own looks, or fonts, colours and grounds drawn at random.

Look            what is held out of looks, and so drawn alone in tests
miniwob_theme   the CSS of a page that looks as MiniWoB++'s do
free_theme      the CSS of a page that looks otherwise
"""

from __future__ import annotations

from random import Random
from typing import Literal

HeldOut = Literal["", "words", "font", "size"]
"""What a screen is a test of: words, the font or the size that no other screen has; "" for training."""

FAMILIES = (
    "Nimbus Sans",
    "DejaVu Sans",
    "DejaVu Serif",
    "DejaVu Sans Mono",
    "DejaVu Sans Condensed",
    "Nimbus Roman",
    "Nimbus Mono PS",
    "Nimbus Sans Narrow",
    "C059",
    "P052",
    "URW Bookman",
)
TEST_FAMILY = "URW Gothic"
SIZES = (9, 10, 11, 13, 14, 15, 16)
TEST_SIZE = 12

_UI = """
.ui-widget { font-size: 1em !important; font-family: inherit !important; }
.ui-tabs { padding: 1px !important; }
.ui-tabs .ui-tabs-nav .ui-tabs-anchor { padding: 3px 5px !important; }
.ui-tabs .ui-tabs-panel { padding: 2px 4px !important; }
.ui-accordion .ui-accordion-header { padding: 1px 2px 1px 14px !important; margin: 2px !important; }
.ui-accordion .ui-accordion-content { padding: 1px 3px !important; }
.ui-menu-item-wrapper { padding: 2px 4px !important; }
.ui-made-slider { width: 110px; margin: 6px 8px; display: inline-block; }
.ui-dialog .ui-dialog-titlebar { padding: 2px 3px !important; }
.ui-dialog .ui-dialog-content { padding: 1px 4px !important; height: auto !important; }
.ui-dialog .ui-dialog-buttonpane { padding: 1px 4px !important; margin: 0 !important; }
.ui-dialog .ui-button { padding: 1px 5px; margin: 1px 2px !important; }
"""

_FIXED = """
body { margin: 0; }
#wrap { width: 160px; height: 210px; overflow: hidden; position: relative; }
#ground { position: absolute; left: 0; top: 0; width: 160px; height: 210px; z-index: -1; }
#area { position: relative; box-sizing: border-box; }
.own-piece { position: relative; }
.own-right { float: right; }
.own-small { font-size: 0.9em; }
.own-link { cursor: pointer; text-decoration: underline; }
.own-row { cursor: pointer; overflow: hidden; }
.own-icon { font-style: normal; padding: 0 2px; cursor: pointer; }
.own-tile { display: inline-block; margin: 2px; border: 1px solid #333; cursor: pointer; }
.own-button, .own-tab, .own-item, .own-sign, .own-close { cursor: pointer; }
.own-button, .own-tab, .own-sign { display: inline-block; }
.own-item { padding: 1px 4px; }
.own-bar .own-item { display: inline-block; }
.own-column .own-item { display: block; }
.own-sign { min-width: 1em; text-align: center; padding: 0 2px; margin: 1px; }
.own-dialog { position: absolute; box-sizing: border-box; padding: 3px 5px; z-index: 9; }
.own-key { min-width: 20px; margin: 1px; }
input[type=range] { width: 100px; vertical-align: middle; }
"""


def miniwob_theme(rng: Random, held_out: HeldOut) -> str:
    """Return the CSS of a page that looks as MiniWoB++'s: core.css is loaded, each page adds a little."""
    size = rng.choices((9, 10, 11, 13), (1, 7, 1, 1))[0]
    family = rng.choices(("Arial", "Nimbus Sans Narrow", "DejaVu Sans"), (10, 1, 1))[0]
    forced = _forced(held_out)
    link = rng.choice(("blue", "#0000EE", "#0000EE", "#551A8B"))
    head = rng.choice(("background:#007fff;color:#fff;border:1px solid #003eff", "", ""))
    margin = rng.choice(("", "p { margin: 0; }", "p { margin: 2px 0; }", "input { margin: 3px; }"))
    styled = _bordered(rng, "#f6f6f6", "#333")
    heavy = rng.choice(("normal", "normal", "bold"))
    return f"""
    {_FIXED} {_UI}
    #wrap, #wrap * {{ font-family: {family}; }} #area {{ font-size: {size}px; }}
    h2, h3, h4 {{ font-size: {rng.choice((10, 11, 13, 14))}px; margin: 2px 0; }}
    #area h3 {{ {head} }}
    .own-link {{ color: {link}; }} .own-small {{ color: #555; font-size: 9px; }}
    .own-styled {{ padding: {rng.choice(("6px 25px", "2px 8px", "4px 10px"))}; }}
    .own-button, .own-tab {{ padding: 2px 6px; margin: 1px; {styled} }}
    .own-chosen {{ background: #007fff !important; color: #fff !important; }}
    .own-row {{ border-bottom: 1px solid #C9C9C9; padding: 2px 5px; }}
    .own-rows {{ border: 1px solid #ccc; }}
    .own-bar {{ background: {rng.choice(("#F92525", "#555", "#007fff", "#3b5998"))}; color: #fff; }}
    .own-column {{ background: #F0F0F0; width: {rng.randint(50, 90)}px; border: 1px solid #ccc; }}
    .own-table {{ border-collapse: collapse; }} td, th {{ padding: 1px 3px; {_lines(rng, "#999")} }}
    .own-post {{ border: 1px solid #E1E8ED; padding: 2px 4px; }}
    .own-sign {{ color: #666; }} .own-head {{ font-weight: {heavy}; }}
    .own-dialog {{ background: #fff; border: 1px solid #888; }}
    ul, ol {{ margin: 2px 0; padding-left: 18px; }} .ui-menu {{ padding-left: 0; }}
    button, input, select, textarea {{ font-size: {rng.choice(("13.33px", "13.33px", "10px", "11px"))}; }}
    div.ui-datepicker {{ font-size: {rng.choice((7, 8, 9))}px !important; }}
    {margin} {forced}
    """


def free_theme(rng: Random, held_out: HeldOut) -> str:
    """Return the CSS of a page of another look: any family, size, weight, contrast and ground."""
    family, size = rng.choice(FAMILIES), rng.choice(SIZES)
    second = rng.choice(FAMILIES) if rng.random() < 0.25 else family
    dark = rng.random() < 0.22
    ink, ground = _contrast(rng, dark)
    accent, on_accent = _contrast(rng, rng.random() < 0.6)[::-1]
    panel, line = _shade(rng, ground, 12), _shade(rng, ground, 70)
    weight = rng.choices(("normal", "bold"), (4, 1))[0]
    slant = "italic" if rng.random() < 0.06 else "normal"
    radius = rng.choice((0, 0, 2, 4, 8))
    controls = rng.random() < 0.5
    field = (
        f"background:{panel};color:{ink};border:1px solid {line};border-radius:{min(radius, 4)}px"
    )
    native = "" if controls else f"input[type=text],input[type=password],textarea {{ {field} }}"
    button = _bordered(rng, accent, on_accent, radius)
    pressed = "" if controls else f"button,input[type=button] {{ {button}; padding: 2px 6px; }}"
    head = rng.choice([each for each in (*SIZES, 18) if each >= size] or [size])
    return f"""
    {_FIXED} {_UI}
    #wrap, #wrap * , .ui-dialog, .ui-dialog * {{ font-family: "{family}"; letter-spacing: normal; }}
    #wrap {{ background: {ground}; color: {ink}; }}
    #area {{ font-size: {size}px; font-weight: {weight}; font-style: {slant}; padding: {rng.randint(1, 6)}px; }}
    #query {{ {rng.choice(("color: #000", "color: #000", f"color: {ink}; background: {panel}", f"color: {on_accent}; background: {accent}"))}; }}
    #query, #query * {{ font-size: {rng.choice((10, 10, 11, 9))}px; }}
    h2, h3, h4 {{ font-size: {head}px; font-family: "{second}" !important; margin: 2px 0; }}
    p {{ margin: {rng.randint(0, 4)}px 0; line-height: {rng.choice((1.1, 1.2, 1.4, 1.6))}; }}
    button, input, select, textarea {{ font-size: {rng.choice((size, size, 10, 11, 13))}px; }}
    a, .own-link {{ color: {_link(rng, dark)}; text-decoration: {rng.choice(("underline", "none", "underline"))}; }}
    .own-styled, .own-button {{ {button}; padding: {rng.randint(1, 5)}px {rng.randint(3, 12)}px; margin: 1px; }}
    .own-tab {{ padding: 2px 6px; border: 1px solid {line}; background: {panel}; border-radius: {radius}px {radius}px 0 0; }}
    .own-chosen {{ background: {accent}; color: {on_accent}; }}
    .own-tabs {{ border-bottom: 1px solid {line}; }}
    .own-row {{ padding: {rng.randint(1, 4)}px 4px; border-bottom: 1px solid {line}; }}
    .own-rows, .own-post {{ background: {panel}; border: 1px solid {line}; border-radius: {radius}px; padding: 1px 3px; }}
    .own-bar {{ background: {accent}; color: {on_accent}; }}
    .own-column {{ background: {panel}; border: 1px solid {line}; width: {rng.randint(50, 110)}px; }}
    .own-table {{ border-collapse: collapse; background: {panel}; }} td, th {{ padding: 1px 3px; {_lines(rng, line)} }}
    .own-sign {{ border: 1px solid {line}; background: {panel}; border-radius: {radius}px; }}
    .own-dialog {{ background: {panel}; border: 1px solid {line}; border-radius: {radius}px; box-shadow: 0 1px 5px #0008; }}
    ul, ol {{ margin: 2px 0; padding-left: 20px; }} .ui-menu {{ padding-left: 0; }}
    select {{ color: {ink}; background: {panel}; }} {native} {pressed}
    div.ui-datepicker {{ font-size: {rng.choice((8, 9, 10))}px !important; }}
    .ui-widget-content {{ color: #222; }}
    {_forced(held_out)}
    """


def _forced(held_out: HeldOut) -> str:
    """Return what makes all text of one font or one size, whatever else is said."""
    every = "html body *, html body #wrap *, html body #wrap #area *"
    if held_out == "font":
        return f'{every} {{ font-family: "{TEST_FAMILY}" !important; }}'
    if held_out == "size":
        return f"{every}, html body #wrap #area {{ font-size: {TEST_SIZE}px !important; }}"
    return ""


def _grey(rng: Random, low: int, high: int) -> tuple[int, int, int]:
    middle, tint = rng.randint(low, high), rng.choice((0, 0, 8, 25))
    red, green, blue = (min(255, max(0, middle + rng.randint(-tint, tint))) for _ in range(3))
    return red, green, blue


def _css(colour: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _contrast(rng: Random, dark: bool) -> tuple[str, str]:
    """Return ink and ground: seldom as far apart as black and white, never close."""
    ground = _grey(rng, 0, 70) if dark else rng.choice(((255, 255, 255), _grey(rng, 200, 255)))
    if dark and rng.random() < 0.4:  # a full colour that white stands on
        ground = rng.choice(
            ((0, 80, 170), (150, 20, 30), (20, 110, 50), (90, 40, 130), (0, 90, 100))
        )
    ink = _grey(rng, 175, 255) if dark else _grey(rng, 0, 95)
    return _css(ink), _css(ground)


def _shade(rng: Random, colour: str, by: int) -> str:
    """Return a colour a little off, towards the middle."""
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    sign = -1 if sum(parts) > 380 else 1
    off = rng.randint(0, by)
    red, green, blue = (min(255, max(0, part + sign * off)) for part in parts)
    return _css((red, green, blue))


def _bordered(rng: Random, ground: str, ink: str, radius: int = 3) -> str:
    border = rng.choice(("1px solid #888", "1px solid #c5c5c5", "none", "2px outset #ccc"))
    fade = f"linear-gradient({ground}, {_shade(rng, ground, 60)})"
    background = fade if rng.random() < 0.25 else ground
    return f"background: {background}; color: {ink}; border: {border}; border-radius: {radius}px"


def _lines(rng: Random, line: str) -> str:
    return rng.choice((f"border: 1px solid {line}", f"border-bottom: 1px solid {line}", ""))


def _link(rng: Random, dark: bool) -> str:
    return (
        rng.choice(("#8cf", "#fc6", "#9f9"))
        if dark
        else rng.choice(("blue", "#06c", "#a00", "#070"))
    )
