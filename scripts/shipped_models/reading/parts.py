"""Parts of pages as HTML: buttons, links, fields, lists, tables, shapes, dialogs, with random words.

    PARTS   name -> how often, and what writes one

What elements cannot tell themselves stands in data-r, data-n, ... (look.js). Classes that begin with
`own-` get their looks from the page's theme (themes.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from html import escape
from random import Random

from scripts.shipped_models.reading import words

COLOURS: Mapping[str, str] = {
    name: name
    for name in """
    black aqua blue gray green lime maroon navy olive purple red teal yellow pink magenta gold orange
    brown
    """.split()
}
"""Names of colours, as pages of MiniWoB++ have them, and what CSS calls them."""


class Writer:
    """A writer of parts; with `held_out`, words are of the tenth that is for tests."""

    def __init__(self, rng: Random, held_out: bool) -> None:
        self.rng = rng
        self.held_out = held_out
        self._serial = 0

    def number(self) -> int:
        """Return a number that no other part of the page has."""
        self._serial += 1
        return self._serial

    def chance(self, share: float) -> bool:
        """Return True with the probability `share`."""
        return self.rng.random() < share

    def word(self) -> str:
        """Return a word in random case."""
        return escape(words.cased(self.rng, words.word(self.rng, self.held_out)))

    def label(self) -> str:
        """Return one to three words, or a number."""
        return escape(words.label(self.rng, self.held_out))

    def value(self) -> str:
        """Return what a field holds."""
        return escape(words.value(self.rng, self.held_out), quote=True)

    def sentence(self, most: int = 12) -> str:
        """Return running text of at most `most` words."""
        return escape(words.sentence(self.rng, self.held_out, most))


def buttons(w: Writer) -> str:
    """Return one to five buttons, native or as the theme has them."""
    kinds = ["<button{0}>{1}</button>", '<input type="button"{0} value="{1}">']
    kinds.append('<span class="own-button" data-r="button">{1}</span>')
    kind = w.rng.choices(kinds, (6, 1, 3))[0]
    style = ' class="own-styled"' if w.chance(0.35) else ""
    gap = w.rng.choice(("", " ", "&nbsp; ", "<br>"))
    return gap.join(kind.format(style, w.label()) for _ in range(w.rng.randint(1, 5)))


def running_text(w: Writer) -> str:
    """Return a paragraph in which some words are links."""
    link = w.rng.choice(('<a href="#">{}</a>', '<span class="own-link" data-r="link">{}</span>'))
    text = []
    for _ in range(w.rng.randint(6, 26)):
        one = w.word() if w.chance(0.3) else escape(words.word(w.rng, w.held_out))
        one += w.rng.choices(("", ",", "."), (8, 1, 1))[0]
        text.append(link.format(one.strip(",.")) if w.chance(0.2) else one)
    return f"<p>{' '.join(text)}</p>"


def paragraph(w: Writer) -> str:
    """Return a heading and running text, or one of them."""
    level = w.rng.randint(2, 4)
    head = f'<h{level} class="own-head">{w.label()}</h{level}>' if w.chance(0.6) else ""
    text = f"<p>{w.sentence(18)}</p>" if w.chance(0.8) or not head else ""
    return head + text


def _field(w: Writer, name: str, width: int, placeholder: str = "") -> str:
    attributes = f'data-n="{name}" style="width:{width}px"'
    filled = w.chance(0.5)
    hint = f' placeholder="{placeholder}"' if placeholder else ""
    if w.chance(0.12):
        return f'<textarea {attributes} rows="2"{hint}>{w.sentence(8) if filled else ""}</textarea>'
    kind = "password" if w.chance(0.12) else "text"
    value = f' value="{w.value()}"' if filled else ""
    return f'<input type="{kind}" class="own-field" {attributes}{hint}{value}>'


def fields(w: Writer) -> str:
    """Return one to three fields whose labels are beside, above or in them."""
    place = w.rng.choice(("beside", "above", "inside", "beside"))
    width = w.rng.choice((55, 70, 80, 100, 120))
    colon = w.rng.choice(("", ":"))
    parts = []
    for _ in range(w.rng.randint(1, 3)):
        name = w.rng.choice((w.word, w.word, w.label))()
        if w.chance(0.3) and not w.held_out:
            name = words.ui_word(w.rng)
        if place == "inside":
            parts.append(f"<div>{_field(w, name, width, name)}</div>")
            continue
        bold = w.rng.choice(("<b>{}</b>", "{}", "<span>{}</span>")).format(f"{name}{colon}")
        label = f'<label data-r="-">{bold}</label>'
        narrow = min(width, 80) if place == "beside" else width
        between = " " if place == "beside" else "<br>"
        parts.append(f"<div>{label}{between}{_field(w, name, narrow)}</div>")
    return "".join(parts)


def checks(w: Writer) -> str:
    """Return check boxes or radio buttons with their labels on one side, below one another or in rows."""
    kind = w.rng.choice(("checkbox", "checkbox", "radio"))
    group, before = w.number(), w.chance(0.2)
    inline = w.chance(0.2)
    parts = []
    for _ in range(w.rng.randint(2, 6)):
        name = w.rng.choice((w.word, w.label))()
        checked = " checked" if w.chance(0.35) else ""
        box = f'<input type="{kind}" name="g{group}" data-n="{name}"{checked}>'
        both = f"{name} {box}" if before else f"{box} {name}"
        parts.append(f'<label data-r="-">{both}</label>')
    return (" " if inline else "<br>").join(parts)


def tabs(w: Writer) -> str:
    """Return tabs of jQuery UI or the theme, with the text of the open one below."""
    group, count = w.number(), w.rng.randint(2, 4)
    names = [
        f"Tab #{at + 1}" if w.chance(0.3) else w.word()[: 12 if count < 3 else 7]
        for at in range(count)
    ]
    body = running_text(w) if w.chance(0.6) else f"<p>{w.sentence(12)}</p>"
    if w.chance(0.65):
        heads = "".join(
            f'<li><a href="#t{group}-{at}">{name}</a></li>' for at, name in enumerate(names)
        )
        panels = "".join(
            f'<div id="t{group}-{at}">{body if at == 0 else ""}</div>' for at in range(count)
        )
        return f'<div class="ui-made-tabs"><ul>{heads}</ul>{panels}</div>'
    selected = w.rng.randrange(count)
    heads = "".join(
        f'<span class="own-tab{" own-chosen" if at == selected else ""}" data-r="tab">{name}</span>'
        for at, name in enumerate(names)
    )
    return f'<div class="own-tabs">{heads}</div>{body}'


def rows(w: Writer) -> str:
    """Return a list: bullets, numbers, or rows with lines between them."""
    count = w.rng.randint(2, 6)
    if w.chance(0.4):
        kind = w.rng.choice(("ul", "ol"))
        return f"<{kind}>{''.join(f'<li>{w.label()}</li>' for _ in range(count))}</{kind}>"
    parts = []
    for _ in range(count):
        name = w.label()
        extra = f'<div class="own-small" data-r="-">{w.sentence(5)}</div>' if w.chance(0.4) else ""
        right = words.date(w.rng) if w.chance(0.3) else ""
        signs = "".join(
            f'<i class="own-icon" data-r="icon" data-n="{escape(each)}">{escape(each)}</i>'
            for each in w.rng.sample(("x", "*", "+", "!", ">", "?"), w.rng.choice((0, 0, 1, 2)))
        )
        right = f'<span class="own-right" data-r="-">{right or signs}</span>'
        bold = w.rng.choice((f'<b data-r="-">{name}</b>', f'<span data-r="-">{name}</span>'))
        parts.append(
            f'<div class="own-row" data-r="row" data-n="{name}">{right}{bold}{extra}</div>'
        )
    return f'<div class="own-rows">{"".join(parts)}</div>'


def table(w: Writer) -> str:
    """Return a table of words and numbers, with or without heads and lines."""
    columns = w.rng.randint(2, 3)
    heads = "".join(f"<th>{w.word()[:9]}</th>" for _ in range(columns))
    parts = [f"<tr>{heads}</tr>"] if w.chance(0.6) else []
    for _ in range(w.rng.randint(2, 6)):
        cells = [w.word()[:10]]
        cells += [
            w.value()[:10] if w.chance(0.5) else escape(words.number(w.rng))
            for _ in range(columns - 1)
        ]
        parts.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f'<table class="own-table">{"".join(parts)}</table>'


def choice(w: Writer) -> str:
    """Return a select box: closed, or as a list of several lines. One of a page may be opened by a click."""
    options = [w.label() for _ in range(w.rng.randint(2, 8))]
    selected = w.rng.randrange(len(options))
    entries = "".join(
        f"<option{' selected' if at == selected else ''}>{option}</option>"
        for at, option in enumerate(options)
    )
    name = w.word()
    size = f' size="{min(len(options), 5)}"' if w.chance(0.3) else ""
    label = f'<label data-r="-">{name}:</label> ' if w.chance(0.5) else ""
    return f'{label}<select class="own-select" data-n="{name if label else ""}"{size}>{entries}</select>'


def menu(w: Writer) -> str:
    """Return a menu: of jQuery UI, or a bar, or a column."""
    names = [
        w.word()[:9] if w.chance(0.6) or w.held_out else words.ui_word(w.rng)
        for _ in range(w.rng.randint(2, 5))
    ]
    kind = w.rng.random()
    if kind < 0.4:
        inner = "".join(f"<li><div>{name}</div></li>" for name in names)
        return f'<ul class="ui-made-menu" style="width:{w.rng.randint(60, 110)}px">{inner}</ul>'
    name = "own-bar" if kind < 0.7 else "own-column"
    inner = "".join(f'<span class="own-item" data-r="item">{name}</span>' for name in names)
    return f'<div class="{name}">{inner}</div>'


def _sign_or_shape(w: Writer, x: float, y: float, radius: float) -> str:
    """Return one shape, digit or letter around a point of an SVG."""
    colour = w.rng.choice([*COLOURS])
    size = "small" if radius <= 8 else "large" if radius >= 13 else ""
    paint = f'fill="{colour}" data-c="{colour}" data-z="{size}"'
    kind = w.rng.choice(("circle", "square", "triangle", "sign", "rectangle"))
    if kind == "circle":
        return f'<circle cx="{x}" cy="{y}" r="{radius}" {paint}/>'
    if kind == "square":
        left, top, side = x - radius, y - radius, 2 * radius
        return f'<rect x="{left}" y="{top}" width="{side}" height="{side}" {paint}/>'
    if kind == "rectangle":
        left, top = x - radius, y - radius / 2
        return f'<rect x="{left}" y="{top}" width="{2 * radius}" height="{radius}" {paint}/>'
    if kind == "triangle":
        corners = [
            (x + radius * math.sin(turn), y - radius * math.cos(turn))
            for turn in (0, 2 * math.pi / 3, 4 * math.pi / 3)
        ]
        points = " ".join(f"{across:.1f},{down:.1f}" for across, down in corners)
        return f'<polygon points="{points}" data-s="triangle" {paint}/>'
    sign = w.rng.choice("0123456789abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ")
    at = f'x="{x}" y="{y}" text-anchor="middle" dominant-baseline="central"'
    return f'<text {at} font-size="{radius * 1.7:.1f}" {paint}>{sign}</text>'


def shapes(w: Writer) -> str:
    """Return shapes, digits and letters in colours, on a lattice so that none covers another."""
    wide, high = 150, w.rng.randint(50, 130)
    cell = w.rng.choice((24, 30, 38))
    places = [
        (column * cell + cell / 2, row * cell + cell / 2)
        for row in range(high // cell)
        for column in range(wide // cell)
    ]
    elements = []
    for x, y in w.rng.sample(places, min(len(places), w.rng.randint(2, 10))):
        radius = w.rng.uniform(5, cell / 2 - 1)
        slack = max(0.0, cell / 2 - radius - 1)
        across, down = (w.rng.uniform(-slack, slack) for _ in range(2))
        elements.append(
            _sign_or_shape(w, round(x + across, 1), round(y + down, 1), round(radius, 1))
        )
        if w.chance(0.08) and radius > 9:
            sign = w.rng.randrange(10)
            at = f'x="{x + across:.1f}" y="{y + down:.1f}" text-anchor="middle"'
            elements[-1] = (
                f'<circle cx="{x + across:.1f}" cy="{y + down:.1f}" r="{radius:.1f}" fill="none" '
                f'stroke="black" data-r="-"/><text {at} dominant-baseline="central" '
                f'font-size="{radius:.1f}" data-c="black">{sign}</text>'
            )
    border = w.rng.choice(("", "border:1px solid #888"))
    return f'<svg width="{wide}" height="{high}" style="{border}">{"".join(elements)}</svg>'


def tiles(w: Writer) -> str:
    """Return coloured squares in a row or a grid."""
    side = w.rng.choice((14, 18, 24, 30, 44))
    count = w.rng.randint(2, min(10, 2 * (150 // (side + 6))))
    parts = []
    for _ in range(count):
        colour = w.rng.choice([*COLOURS])
        style = f"width:{side}px;height:{side}px;background:{colour}"
        parts.append(
            f'<div class="own-tile" style="{style}" data-r="shape" data-c="{colour}" data-n=""></div>'
        )
    return "".join(parts)


def icons(w: Writer) -> str:
    """Return signs in little boxes that can be pressed."""
    parts = []
    for _ in range(w.rng.randint(2, 6)):
        sign = escape(words.sign(w.rng)[:3], quote=True)
        parts.append(f'<span class="own-sign" data-r="button" data-n="{sign}">{sign}</span>')
    return " ".join(parts)


def keypad(w: Writer) -> str:
    """Return buttons with one digit, letter or sign each, in rows."""
    signs = w.rng.choice(("0123456789", "123456789*0#", "abcdefghi", "ABCDEFGHI", "+-*/=%"))
    columns = w.rng.choice((3, 4, 5))
    parts = []
    for at, sign in enumerate(signs):
        parts.append(f'<button class="own-key">{escape(sign)}</button>')
        if at % columns == columns - 1:
            parts.append("<br>")
    return "".join(parts)


def slider(w: Writer) -> str:
    """Return a slider, with or without the number at which it stands."""
    most = w.rng.choice((5, 10, 20, 100))
    value = w.rng.randint(0, most)
    readout = f'<span data-r="text">{value}</span>' if w.chance(0.6) else ""
    if w.chance(0.6):
        control = (
            f'<div class="ui-made-slider" data-v="{value}" data-most="{most}" data-n=""></div>'
        )
    else:
        control = f'<input type="range" min="0" max="{most}" value="{value}" data-n="">'
    return f"<div>{control}{readout}</div>"


def sections(w: Writer) -> str:
    """Return heads of which one is open, as jQuery UI's accordion has them."""
    parts = "".join(
        f"<h3>{w.label()}</h3><div><p>{w.sentence(8)}</p></div>" for _ in range(w.rng.randint(2, 4))
    )
    return f'<div class="ui-made-accordion">{parts}</div>'


def calendar(w: Writer) -> str:
    """Return a month, as jQuery UI's date picker has it."""
    day = f"{w.rng.randint(1990, 2035)}-{w.rng.randint(1, 12):02d}-{w.rng.randint(1, 28):02d}"
    return f'<div class="ui-made-calendar" data-day="{day}"></div>'


def spinner(w: Writer) -> str:
    """Return a number with two arrows."""
    return f'<input class="ui-made-spinner" data-n="" style="width:40px" value="{w.rng.randint(-9, 99)}">'


def facts(w: Writer) -> str:
    """Return names and their values: "Price: $33"."""
    parts = []
    for _ in range(w.rng.randint(1, 4)):
        fact = escape(words.number(w.rng)) if w.chance(0.6) else w.value()
        parts.append(f'<div>{w.word()}: <b data-r="text">{fact}</b></div>')
    return "".join(parts)


def post(w: Writer) -> str:
    """Return what a person says, with signs below to press."""
    person = escape(words.name(w.rng, w.held_out))
    handle = escape("@" + words.word(w.rng, w.held_out))
    signs = "".join(
        f'<span class="own-sign" data-r="icon" data-n="{each}">{each}</span> '
        for each in w.rng.sample(("+1", "x", "v", "&lt;-", "...", "!", "*"), 3)
    )
    head = f'<b data-r="text">{person}</b> <span class="own-small" data-r="link">{handle}</span>'
    return f'<div class="own-post">{head}<div>{w.sentence(7)}</div>{signs}</div>'


def dialog(w: Writer) -> str:
    """Return a dialog on top of the page: of jQuery UI, or the theme's own."""
    answer = w.word() if w.held_out else words.ui_word(w.rng)
    inner = f"<p>{w.sentence(9)}</p>"
    if w.chance(0.3):
        inner += fields(w)
    if w.chance(0.5):
        buttons_named = ",".join({answer, w.word()})
        return f'<div class="ui-made-dialog" title="{w.word()}" data-buttons="{buttons_named}">{inner}</div>'
    top, left, width = w.rng.randint(52, 90), w.rng.randint(2, 30), w.rng.randint(95, 128)
    close = '<span class="own-right own-close" data-r="button" data-n="x">x</span>'
    return (
        f'<div class="own-dialog" style="top:{top}px;left:{left}px;width:{width}px">{close}'
        f'<b data-r="heading">{w.word()}</b>{inner}<button>{answer}</button> '
        f"<button>{w.word()}</button></div>"
    )


PARTS: Mapping[str, tuple[float, Callable[[Writer], str]]] = {
    "buttons": (12, buttons),
    "running_text": (9, running_text),
    "paragraph": (7, paragraph),
    "fields": (12, fields),
    "checks": (9, checks),
    "tabs": (5, tabs),
    "rows": (7, rows),
    "table": (5, table),
    "choice": (6, choice),
    "menu": (4, menu),
    "shapes": (8, shapes),
    "tiles": (3, tiles),
    "icons": (4, icons),
    "keypad": (2, keypad),
    "slider": (3, slider),
    "sections": (3, sections),
    "calendar": (2, calendar),
    "spinner": (1, spinner),
    "facts": (4, facts),
    "post": (4, post),
}
"""How often each is drawn, in shares of the sum, and what writes it; a dialog comes on top by itself."""
