"""What drawn screens are made of: each function draws one part of a screen into an area.

LAYOUTS     name -> how often it is drawn, the least height that it needs, the function
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from scripts.shipped_models.reading import words
from scripts.shipped_models.reading.faces import Face
from scripts.shipped_models.reading.pen import COLOURS, SAME_LOOK, SHAPES, Area, Pen, contrast
from scripts.shipped_models.reading.scene import Box, Thing

GAP = 3
"""Pixels that stay free between things."""

SIGNS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"

Layout = Callable[[Pen, Area], None]


def look_alikes(rng: Random, text: str, held_out: bool) -> list[str]:
    """Return words that look like `text`: a letter changed, two exchanged, a letter less or more."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    alike: list[str] = []
    for _ in range(12):
        at = rng.randrange(len(text))
        kind = rng.random()
        if kind < 0.5:
            other = text[:at] + rng.choice(letters) + text[at + 1 :]
        elif kind < 0.75 and at:
            other = text[: at - 1] + text[at] + text[at - 1] + text[at + 1 :]
        elif kind < 0.9 and len(text) > 3:
            other = text[:-1]
        else:
            other = text + rng.choice(letters)
        if words.is_held_out(other) == held_out and other not in (text, *alike):
            alike.append(other)
    return alike


def free_place(
    rng: Random, area: Area, width: int, height: int, occupied: list[Area]
) -> Area | None:
    """Return a place of this size in the area that is clear of what is `occupied`, or None."""
    left, top, right, bottom = area
    if right - left < width or bottom - top < height:
        return None
    for _ in range(12):
        x, y = rng.randint(left, right - width), rng.randint(top, bottom - height)
        if all(
            x + width + GAP <= a or c + GAP <= x or y + height + GAP <= b or d + GAP <= y
            for a, b, c, d in occupied
        ):
            return x, y, x + width, y + height
    return None


def paragraph(pen: Pen, area: Area, *, dense: bool = False) -> None:
    """Draw lines of running text; `dense` mixes all characters. Some words are links, if not dense."""
    left, top, right, bottom = area
    face = pen.face()
    step = face.height + (0 if dense else pen.rng.randint(0, 3))
    links = 0 if dense or pen.rng.random() < 0.3 else pen.rng.randint(1, 4)
    space = face.width(" ")
    lines = max(1, int(bottom - top - face.height) // step + 1)
    for number in range(lines):
        if top + number * step + face.height > bottom:
            break
        middle = top + number * step + face.height / 2
        x = float(left) if not dense else left + pen.rng.randint(0, 6)
        started = x
        texts: list[str] = []
        linked = links > 0 and pen.rng.random() < links / (lines - number)
        place = pen.rng.randrange(3) if linked else -1
        while True:
            text = _dense_token(pen) if dense else _running_token(pen)
            wide = face.width(text)
            if x + wide > right:
                break
            if len(texts) == place and text[-1].isalnum():
                _line(pen, started, middle, texts, face)
                text = text.strip(".,")
                box = pen.text(x, middle, text, face, pen.theme.link)
                if pen.rng.random() < 0.9:
                    pen.line([(x, box[3] - 2), (box[2] - 1, box[3] - 2)], pen.theme.link)
                pen.add(Thing("link", text, box, colour="blue"))
                x, links = box[2] + space, links - 1
                started, texts, place = x, [], -1
                continue
            texts.append(text)
            x += wide + space
        _line(pen, started, middle, texts, face)


def _line(pen: Pen, left: float, middle: float, texts: list[str], face: Face) -> None:
    """Draw words of one colour in a line; each that has letters is a thing."""
    if not texts:
        return
    whole = pen.text(left, middle, " ".join(texts), face, pen.theme.ink)
    x = whole[0]
    for text in texts:
        wide = face.width(text)
        if len(text) > 2 and text.isalpha():
            pen.add(Thing("word", text, (x, whole[1], x + wide, whole[3])))
        x += wide + face.width(" ")


def _running_token(pen: Pen) -> str:
    text = words.word(pen.rng, pen.held_out)
    kind = pen.rng.random()
    if kind < 0.15:
        return text.capitalize()
    if kind < 0.2:
        return words.number(pen.rng)
    return text + (pen.rng.choice(".,") if kind > 0.9 else "")


def _dense_token(pen: Pen) -> str:
    """Return a word, digits, signs, or all of them mixed: every printable character is drawn often."""
    kind = pen.rng.random()
    if kind < 0.35:
        return words.word(pen.rng, pen.held_out)
    if kind < 0.55:
        return pen.word()
    if kind < 0.7:
        return "".join(pen.rng.choices("0123456789", k=pen.rng.randint(1, 6)))
    if kind < 0.8:
        return "".join(pen.rng.choices(SIGNS, k=pen.rng.randint(1, 4)))
    return "".join(chr(pen.rng.randint(33, 126)) for _ in range(pen.rng.randint(1, 6)))


def buttons(pen: Pen, area: Area) -> None:
    """Draw buttons in random places, often with look-alikes, sometimes in colours that have names."""
    rng = pen.rng
    occupied: list[Area] = []
    most = max(2, min(9, (area[2] - area[0]) * (area[3] - area[1]) // 2000))
    names: list[str] = []
    alike = rng.random() < 0.5
    colours = _colours(rng) if rng.random() < 0.3 else []
    radius = rng.choice((0, 0, 2, 4))
    for _ in range(rng.randint(2, most) if most > 2 else 2):
        face = pen.face()
        text = pen.label(face, area[2] - area[0] - 14)
        if alike and names and names[0].islower() and names[0].isalpha() and rng.random() < 0.7:
            text = next(iter(look_alikes(rng, names[0], pen.held_out)), text)
        elif names and rng.random() < 0.06:
            text = rng.choice(names)
        elif alike and not names:
            text = words.word(rng, pen.held_out)
        wide = int(face.width(text)) + rng.randint(6, 20)
        place = free_place(rng, area, wide, face.height + rng.randint(2, 12), occupied)
        if place is None or not text:
            continue
        occupied.append(place)
        names.append(text)
        button(pen, place, text, face, rng.choice(colours) if colours else "", radius)


def button(pen: Pen, box: Area, text: str, face: Face, colour: str = "", radius: int = 0) -> None:
    """Draw one button."""
    theme = pen.theme
    fill, ink = theme.control, theme.control_ink
    if colour:
        fill = pen.colour(colour)
        ink = _on(fill)
    pen.box(box, fill, theme.edge if pen.rng.random() < 0.8 or not colour else fill, radius)
    pen.centred(box, text, face, ink)
    pen.add(Thing("button", text, _of(box), colour=colour))


def grid(pen: Pen, area: Area) -> None:
    """Draw a grid of numbers, letters or short words: a calendar, a keypad."""
    rng = pen.rng
    left, top, right, bottom = area
    face = pen.face()
    kind = rng.choice(("number", "number", "letter", "word"))
    columns = rng.randint(3, 7) if kind != "word" else rng.randint(2, 3)
    wide = (right - left) // columns
    high = max(face.height + 2, min(wide, rng.randint(face.height + 2, face.height + 12)))
    rows = min(6, (bottom - top) // high)
    if wide < face.width("88") + 4 or rows < 1:
        return
    first = rng.choice((0, 1, 1, 1, rng.randint(2, 60)))
    letters = rng.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 26)
    joined = rng.random() < 0.5
    for at in range(min(rows * columns, 26)):
        row, column = divmod(at, columns)
        x, y = left + column * wide, top + row * high
        box = (x, y, x + wide + 1, y + high + 1) if joined else (x, y, x + wide - 2, y + high - 2)
        text = {"number": str(first + at), "letter": letters[at]}.get(kind) or pen.value(
            face, wide - 6
        )
        if text and box[2] <= right + 1 and box[3] <= bottom + 1:
            button(pen, box, text, face)


def form(pen: Pen, area: Area) -> None:
    """Draw fields with a label beside or above, filled in or empty, and perhaps a button."""
    rng = pen.rng
    left, top, right, bottom = area
    face, inner = pen.face(), pen.face()
    beside = rng.random() < 0.6
    high = max(inner.height + rng.randint(2, 8), face.height + 2)
    gap = rng.randint(3, 10)
    share = rng.uniform(0.3, 0.5)
    field_left = left + int((right - left) * share) if beside else left
    field_right = right - (rng.randint(0, (right - left) // 4) if beside else rng.randint(0, 40))
    labels: set[str] = set()
    y = top
    for _ in range(rng.randint(1, 6)):
        label = pen.label(face, field_left - left - 8 if beside else right - left - 8)
        start = y if beside else y + face.height + 1
        if start + high > bottom or not label or label.lower() in labels:
            break
        labels.add(label.lower())
        box = (field_left, start, field_right, start + high)
        colon = ":" if rng.random() < 0.4 else ""
        middle = (start + start + high) / 2 if beside else y + face.height / 2
        at = field_left - 4 - face.width(label + colon) if beside and share > 0.4 else left
        pen.text(at, middle, label + colon, face, pen.theme.ink)
        pen.box(box, pen.theme.field, pen.theme.edge)
        value = pen.value(inner, box[2] - box[0] - 8) if rng.random() < 0.6 else ""
        if value:
            pen.text(box[0] + 3, (box[1] + box[3]) / 2, value, inner, pen.theme.field_ink)
        pen.add(Thing("field", label, _of(box), value=value))
        y = start + high + gap
    text = pen.label(face, (right - left) / 2)
    wide = int(face.width(text)) + rng.randint(8, 20)
    if text and rng.random() < 0.7 and y + face.height + 6 <= bottom and wide <= right - left:
        x = rng.choice((left, field_left, right - wide))
        x = max(left, min(x, right - wide))
        button(pen, (x, y, x + wide, y + face.height + 6), text, face)


def checks(pen: Pen, area: Area) -> None:
    """Draw check boxes or radio buttons with labels, in one column or two."""
    rng = pen.rng
    left, top, right, bottom = area
    face = pen.face()
    role = rng.choice(("checkbox", "checkbox", "radio"))
    side = rng.randint(9, 14)
    step = max(side, face.height) + rng.randint(1, 8)
    columns = 2 if right - left > 140 and rng.random() < 0.4 else 1
    wide = (right - left) // columns
    rows = min((bottom - top) // step, rng.randint(2, 8))
    ticked_share = rng.choice((0.0, 0.3, 0.5))
    selected = rng.randrange(rows * columns + 1) if rows else 0
    before = rng.random() < 0.9
    for at in range(rows * columns):
        column, row = divmod(at, rows)
        x, middle = left + column * wide, top + row * step + step / 2
        label = pen.label(face, wide - side - 8)
        if not label:
            continue
        ticked = at == selected if role == "radio" else rng.random() < ticked_share
        mark_left = x if before else int(x + face.width(label) + 5)
        y = round(middle - side / 2)
        box = (mark_left, y, mark_left + side, y + side)
        _mark(pen, role, box, ticked)
        pen.text(x + side + 4 if before else x, middle, label, face, pen.theme.ink)
        pen.add(Thing(role, label, _of(box), checked=ticked))


def _mark(pen: Pen, role: str, box: Area, ticked: bool) -> None:
    left, top, right, _ = box
    theme, side = pen.theme, box[2] - box[0]
    if role == "radio":
        pen.ellipse(box, theme.field, theme.edge)
        if ticked:
            rest = max(2, side // 4)
            pen.ellipse((left + rest, top + rest, right - rest, box[3] - rest), theme.field_ink)
        return
    filled = ticked and pen.rng.random() < 0.4
    pen.box(box, theme.selected if filled else theme.field, theme.edge, pen.rng.choice((0, 2)))
    if ticked:
        ink = theme.chosen_ink if filled else theme.field_ink
        corners = ((0.2, 0.5), (0.42, 0.75), (0.8, 0.22))
        pen.line([(left + x * side, top + y * side) for x, y in corners], ink, 2)


def tabs(pen: Pen, area: Area) -> None:
    """Draw a row of tabs, one of them on top, and text or controls under it."""
    rng = pen.rng
    left, top, right, bottom = area
    face = pen.face()
    high = face.height + rng.randint(4, 8)
    x, active = left, rng.randrange(3)
    for number in range(rng.randint(2, 5)):
        text = pen.label(face, min(right - x - 10, 70))
        wide = int(face.width(text)) + rng.randint(6, 12)
        if not text or x + wide > right or top + high > bottom:
            break
        box = (x, top if number == active else top + 1, x + wide, top + high)
        fill = pen.theme.field if number == active else pen.theme.control
        pen.box(box, fill, pen.theme.edge)
        ink = pen.theme.field_ink if number == active else pen.theme.control_ink
        pen.centred(_of(box), text, face, ink)
        pen.add(Thing("tab", text, _of(box)))
        x += wide + rng.choice((-1, 1, 3))
    pen.line([(left, top + high - 1), (right - 1, top + high - 1)], pen.theme.edge)
    if bottom - top - high > 16:
        inner = (left + 2, top + high + 4, right, bottom)
        rng.choice((paragraph, checks, buttons, form))(pen, inner)


def rows(pen: Pen, area: Area) -> None:
    """Draw a list of rows, or a menu of items, one of them selected perhaps."""
    rng = pen.rng
    left, top, right, bottom = area
    face = pen.face()
    role = rng.choice(("row", "item", "option"))
    step = face.height + rng.randint(1, 8)
    count = min((bottom - top - 2) // step, rng.randint(2, 9))
    wide = right - left if role == "row" else rng.randint((right - left) // 2, right - left)
    selected = rng.randrange(2 * count) if count else 0
    pen.box((left, top, left + wide, top + count * step + 2), pen.theme.field, pen.theme.edge)
    for number in range(count):
        y = top + 1 + number * step
        box = (left + 1, y, left + wide - 1, y + step)
        ink = pen.theme.field_ink
        if number == selected:
            pen.box(box, pen.theme.selected)
            ink = pen.theme.chosen_ink
        elif role == "row" and rng.random() < 0.5:
            pen.line([(box[0], box[3]), (box[2] - 1, box[3])], pen.theme.edge)
        text = pen.label(face, wide - 12)
        if text:
            pen.text(left + 5, y + step / 2, text, face, ink)
            pen.add(Thing(role, text, _of(box)))


def table(pen: Pen, area: Area) -> None:
    """Draw a table with names of columns and rows."""
    rng = pen.rng
    left, top, right, bottom = area
    face = pen.face()
    columns = rng.randint(2, max(2, min(4, (right - left) // 48)))
    wide = (right - left) // columns
    step = face.height + rng.randint(1, 6)
    count = min((bottom - top - 1) // step, rng.randint(3, 7))
    if count < 2:
        return
    lined = rng.random() < 0.7
    for row in range(count):
        for column in range(columns):
            x, y = left + column * wide, top + row * step
            box = (x, y, x + wide + 1, y + step + 1)
            head = row == 0
            fill = pen.theme.control if head else pen.theme.field
            pen.box(box, fill, pen.theme.edge if lined else fill)
            make = pen.label if head or column == 0 else pen.value
            text = make(face, wide - 7)
            pen.add(Thing("cell", text, _of(box)))
            if text:
                ink = pen.theme.control_ink if head else pen.theme.field_ink
                pen.text(x + 4, y + step / 2 + 0.5, text, face, ink)


def shapes(pen: Pen, area: Area) -> None:
    """Draw shapes, letters and digits in colours, small and large; some shapes have a character in them."""
    rng = pen.rng
    occupied: list[Area] = []
    colours = _colours(rng)
    lettered = rng.random() < 0.3
    most = max(2, min(12, (area[2] - area[0]) * (area[3] - area[1]) // 1400))
    kinds = rng.sample((*SHAPES, "letter", "digit"), rng.randint(2, 8))
    small = rng.randint(10, 15)
    for _ in range(rng.randint(2, most) if most > 2 else 2):
        size = rng.choice(("small", "large"))
        side = small if size == "small" else rng.randint(2 * small, 2 * small + 12)
        kind, colour = rng.choice(kinds), rng.choice(colours)
        wide = side + side // 2 if kind == "rectangle" else side
        place = free_place(rng, area, wide, side, occupied)
        if place is None:
            continue
        occupied.append(place)
        if kind in ("letter", "digit"):
            _character(pen, place, kind, colour, size)
            continue
        fill = pen.colour(colour)
        pen.shape(kind, place, fill)
        label = ""
        face = pen.face()
        if lettered and side >= face.height + 4 and kind in ("circle", "square", "rectangle"):
            label = rng.choice("ABCDEFGHKLMNPRSTUVWXYZ0123456789")
            pen.centred(_of(place), label, face, _on(fill))
        pen.add(Thing("shape", label, _of(place), colour=colour, shape=kind, size=size))


def _character(pen: Pen, place: Area, kind: str, colour: str, size: str) -> None:
    """Draw a letter or a digit as a separate thing, as high as the place."""
    text = pen.rng.choice("0123456789" if kind == "digit" else "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    ink = pen.colour(colour)
    if contrast(ink, pen.theme.ground) < 1.6:
        return
    high = place[3] - place[1]
    face = Face(pen.face().name, 11 if pen.plain else max(9, min(40, round(high * 0.85))))
    if not pen.plain and face.size == 12:
        face = Face(face.name, 13)
    box = pen.text(
        (place[0] + place[2] - face.width(text)) / 2,
        (place[1] + place[3]) / 2,
        text,
        face,
        ink,
    )
    pen.add(Thing("shape", text, box, colour=colour, shape=kind, size=size))


def blocks(pen: Pen, area: Area) -> None:
    """Draw rectangles of one size in colours."""
    rng = pen.rng
    left, top, right, bottom = area
    side = rng.randint(16, 34)
    step = side + rng.randint(2, 10)
    colours = _colours(rng)
    columns, rows_ = (right - left) // step, (bottom - top) // step
    for at in range(min(columns * rows_, rng.randint(2, 9))):
        row, column = divmod(at, columns)
        x, y = left + column * step, top + row * step
        colour = colours[at] if at < len(colours) else rng.choice(colours)
        box = (x, y, x + side, y + side)
        pen.shape("square", box, pen.colour(colour))
        pen.add(Thing("shape", "", _of(box), colour=colour, shape="square"))


def figures(pen: Pen, area: Area) -> None:
    """Draw numbers that are shown with their names, and sliders."""
    rng = pen.rng
    left, top, right, bottom = area
    y, labels = top, set()
    for _ in range(rng.randint(1, 4)):
        face = pen.face()
        label = pen.label(face, (right - left) / 2 - 8)
        high = face.height + rng.randint(2, 10)
        if y + high > bottom or not label or label.lower() in labels:
            return
        labels.add(label.lower())
        middle = y + high / 2
        end = pen.text(left, middle, f"{label}:", face, pen.theme.ink)[2]
        number = str(rng.randrange(10 ** rng.randint(1, 4)))
        if rng.random() < 0.5:
            box = pen.text(end + 5, middle, number, face, pen.theme.ink)
            pen.add(Thing("number", label, box, value=number))
        else:
            start = max(int(end) + 8, left + (right - left) // 3)
            _slider(pen, label, (start, y, right - 4, y + high))
        y += high + rng.randint(0, 8)


def _slider(pen: Pen, label: str, box: Area) -> None:
    left, top, right, bottom = box
    middle, side = (top + bottom) // 2, pen.rng.randint(3, 6)
    pen.box((left, middle - 2, right, middle + 2), pen.theme.control, pen.theme.edge, 2)
    at = pen.rng.randint(left + side, right - side)
    pen.box(
        (at - side, middle - side - 1, at + side, middle + side + 1),
        pen.theme.selected,
        pen.theme.edge,
        2,
    )
    pen.add(Thing("slider", label, (left, middle - side - 1, right, middle + side + 1)))


def _colours(rng: Random) -> list[str]:
    """Return some names of colours that cannot be taken for each other."""
    names: list[str] = []
    for name in rng.sample(list(COLOURS), rng.randint(2, 8)):
        if SAME_LOOK.get(name) not in names:
            names.append(name)
    return names


def _on(fill: tuple[int, int, int]) -> tuple[int, int, int]:
    return (0, 0, 0) if sum(fill[:2]) + fill[1] > 330 else (255, 255, 255)


def _of(box: Area) -> Box:
    left, top, right, bottom = box
    return float(left), float(top), float(right), float(bottom)


LAYOUTS: Mapping[str, tuple[int, int, Layout]] = {
    "paragraph": (3, 30, paragraph),
    "buttons": (7, 40, buttons),
    "grid": (2, 40, grid),
    "form": (5, 36, form),
    "checks": (4, 40, checks),
    "tabs": (3, 60, tabs),
    "rows": (3, 40, rows),
    "table": (3, 50, table),
    "shapes": (5, 50, shapes),
    "blocks": (1, 40, blocks),
    "figures": (3, 24, figures),
}
"""Name -> weight, least height in pixels, function."""
