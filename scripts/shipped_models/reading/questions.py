"""Questions about a scene of any source; each has exactly one right answer.

    questions   draws kinds at random among the ones that the scene allows
    KINDS       kind -> weight, and the function that asks one such question, or returns None

The wordings are those of people who tell an agent what to do, those of MiniWoB++'s instructions among
them, but never the whole of an instruction that takes several steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random

from scripts.shipped_models.reading import wordings as say
from scripts.shipped_models.reading import words
from scripts.shipped_models.reading.layouts import look_alikes
from scripts.shipped_models.reading.naming import NOUNS, View, key_of, speakable
from scripts.shipped_models.reading.pen import COLOURS, SAME_LOOK, SHAPES
from scripts.shipped_models.reading.scene import Box, Query, Scene, Thing

Kind = Callable[[View, Random], Query | None]

FREE = ("type", "key", "scroll")
"""Kinds that no screen is needed for: one of them at most is asked about a scene."""

SAME = 2
"""Most questions about a scene with the same answer."""


def questions(scene: Scene, rng: Random, most: int) -> list[Query]:
    """Return up to `most` questions about the scene."""
    view = View(scene)
    queries: dict[str, Query] = {}
    answered: Counter[tuple[str, tuple[Box, ...]]] = Counter()
    free = False
    for kind in rng.choices(list(KINDS), [weight for weight, _ in KINDS.values()], k=5 * most):
        if len(queries) == most:
            break
        if kind in FREE and free:
            continue
        query = KINDS[kind][1](view, rng)
        answer = (query.answer, query.boxes) if query else ("", ())
        if query and query.text not in queries and answered[answer] < SAME:
            answered[answer] += 1
            queries[query.text] = query
            free = free or kind in FREE
    return list(queries.values())


# --- one function a kind -----------------------------------------------------------------------


def _click(view: View, rng: Random) -> Query | None:
    kind = rng.random()
    if kind < 0.12 or not view.plain:
        return _by_label(rng, view.single_words, (*say.CLICK, *say.CLICK_ROLE), "click")
    if kind < 0.65:
        return _by_label(rng, view.plain, say.CLICK, "click")
    role = rng.choice(view.plain).role
    return _by_label(rng, view.of_role(role), say.CLICK_ROLE, "click")


def _part(view: View, rng: Random) -> Query | None:
    long = [thing for thing in view.plain if " " in thing.label]
    if not long:
        return None
    thing = rng.choice(long)
    first = thing.label.split()[0]
    others = (t.label for t in view.things if t is not thing)
    if any(key_of(first) in key_of(label).split() for label in others) or len(first) < 2:
        return None
    return _pointing(rng.choice(say.CLICK).format(n=first), thing, "part")


def _order(view: View, rng: Random) -> Query | None:
    roles = [role for role in view.by_role if role in NOUNS and role not in ("word", "cell")]
    if not roles:
        return None
    role = rng.choice(roles)
    noun = rng.choice(NOUNS[role])
    if len(view.by_role[role]) == 1:
        return _pointing(rng.choice(say.ONLY).format(r=noun), view.by_role[role][0], "order")
    things = view.in_order(role)
    if not things:
        return None
    at = rng.randrange(min(len(things), len(say.ORDINALS)))
    ordinal = rng.choice((say.ORDINALS, say.ORDINALS, say.SHORT_ORDINALS))[at]
    if rng.random() < 0.25:
        at, ordinal = len(things) - 1, "last"
    templates = {
        "field": (*say.ORDER, *say.ORDER_FIELD),
        "checkbox": say.ORDER_TICK,
        "radio": say.ORDER_TICK,
    }
    text = rng.choice(templates.get(role, say.ORDER)).format(o=ordinal, r=noun)
    return _pointing(text, things[at], "order")


def _look(view: View, rng: Random) -> Query | None:
    """Ask by colour, shape or size: of shapes, and of buttons in colour."""
    coloured = [thing for thing in view.by_role["button"] if thing.colour]
    if coloured and (not view.by_role["shape"] or rng.random() < 0.5):
        thing = rng.choice(coloured)
        if sum(each.colour == thing.colour for each in coloured) > 1:
            return None
        text = rng.choice(("click the {} button", "press the {} button")).format(thing.colour)
        return _pointing(text, thing, "colour")
    shape = view.shapes(rng)
    if shape is None:
        return None
    kind, phrase, thing = shape
    if kind == "colour" and rng.random() < 0.5 and not coloured:
        return _pointing(rng.choice(say.COLOURED).format(n=thing.colour), thing, kind)
    if thing.label and thing.shape in ("letter", "digit") and rng.random() < 0.4:
        same = [each for each in view.by_role["shape"] if each.label == thing.label]
        if len(same) == 1:
            return _pointing(f"click the {thing.shape} {thing.label}", thing, "shape")
    return _pointing(rng.choice(say.SHAPE).format(n=phrase), thing, kind)


def _place(view: View, rng: Random) -> Query | None:
    place = view.place(rng)
    if place is None:
        return None
    role, where, thing, label = place
    text = f"click the {NOUNS[role][0]} {rng.choice(say.PLACE[where])} {label}"
    return _pointing(text, thing, "place")


def _field(view: View, rng: Random) -> Query | None:
    return _by_label(rng, view.of_role("field"), say.FIELD, "field")


def _tick(view: View, rng: Random) -> Query | None:
    things = view.marks("checkbox")
    if not things:
        return None
    thing = rng.choice(things)
    return _by_label(rng, [thing], say.UNTICK if thing.checked else say.TICK, "tick")


def _radio(view: View, rng: Random) -> Query | None:
    return _by_label(rng, [t for t in view.marks("radio") if not t.checked], say.RADIO, "radio")


def _tab(view: View, rng: Random) -> Query | None:
    return _by_label(rng, view.of_role("tab"), say.TAB, "tab")


def _row(view: View, rng: Random) -> Query | None:
    role = rng.choice([r for r in ("row", "item", "option") if view.by_role[r]] or ["row"])
    return _by_label(rng, view.marks(role), say.MENU if role == "item" else say.ROW, "row")


def _cell(view: View, rng: Random) -> Query | None:
    if not view.cells:
        return None
    row, column, thing = rng.choice(view.cells)
    return _pointing(rng.choice(say.CELL).format(n=row, c=column), thing, "cell")


def _link(view: View, rng: Random) -> Query | None:
    return _by_label(rng, view.of_role("link"), say.LINK, "link")


def _slider(view: View, rng: Random) -> Query | None:
    return _by_label(rng, view.of_role("slider"), say.SLIDER, "slider")


def _is(view: View, rng: Random) -> Query | None:
    """Ask a question whose answer is yes or no, with equal probability."""
    yes = rng.random() < 0.5
    ways: list[Callable[[], str]] = []
    marks = view.marks("checkbox") + view.marks("radio")
    fitting = [thing for thing in marks if thing.checked == yes]
    if fitting:
        word = rng.choice(("ticked", "checked", "selected"))
        ways.append(lambda: f"is {rng.choice(fitting).label} {word}")
    fields = [
        thing
        for thing in view.of_role("field")
        if (view.blank(thing) if yes else view.stands(thing.value) and thing.value)
    ]
    if fields:
        ways.append(lambda: f"is the field {rng.choice(fields).label} empty")
    shapes = {(thing.colour, thing.shape) for thing in view.by_role["shape"]}
    if len(shapes) > 1:
        colours = {colour for colour, _ in shapes}
        some = sorted(shapes if yes else _absent(shapes))
        near = [pair for pair in some if pair[0] in colours] or some
        ways.append(lambda: "is a {} {} visible".format(*rng.choice(near)))
    labels = [thing.label for thing in view.things if view.readable(thing)]
    if labels:
        label = rng.choice(labels) if yes else _unseen(view, rng, rng.choice(labels))
        if label:
            form = rng.choice(("is {} visible", 'is "{}" shown', "Is {} on the screen?"))
            ways.append(lambda: form.format(label))
    return Query(rng.choice(ways)(), "yes" if yes else "no", (), "is") if ways else None


def _absent(shapes: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return colours and shapes that nothing in sight could be mistaken for."""
    alike = {(SAME_LOOK.get(colour, colour), shape) for colour, shape in shapes} | shapes
    for colour, shape in list(alike):
        if shape in ("square", "rectangle"):
            alike |= {(colour, "square"), (colour, "rectangle")}
    return {(colour, shape) for colour in COLOURS for shape in SHAPES} - alike


def _unseen(view: View, rng: Random, like: str) -> str:
    """Return a word that is not on the screen; half of them look like one that is."""
    last = like.rsplit(maxsplit=1)[-1]
    if rng.random() < 0.5 and last.isalpha() and last.islower() and len(last) > 2:
        for other in look_alikes(rng, last, words.is_held_out(last)):
            text = like[: -len(last)] + other
            if key_of(text) not in view.labels:
                return text
    text = words.cased(rng, words.word(rng, view.held_out))
    return text if key_of(text) not in view.labels else ""


def _value_of(view: View, rng: Random) -> tuple[dict[str, str], str, bool] | None:
    """Return the names of a field or a cell, its value, and whether it is a cell."""
    fields = [
        (t.label, t.value)
        for t in view.of_role("field")
        if speakable(t.value) and view.stands(t.value)
    ]
    cells = [cell for cell in view.cells if view.readable(cell[2])]
    if cells and (not fields or rng.random() < 0.5):
        row, column, thing = rng.choice(cells)
        return {"n": row, "c": column}, thing.label, True
    if not fields:
        return None
    label, value = rng.choice(fields)
    return {"n": label}, value, False


def _read(view: View, rng: Random) -> Query | None:
    content = _value_of(view, rng)
    if content is None:
        return None
    names, value, is_cell = content
    text = rng.choice(say.READ_CELL if is_cell else say.READ).format(**names)
    return Query(text, f"answer({value})", (), "read")


def _copy(view: View, rng: Random) -> Query | None:
    content = _value_of(view, rng)
    if content is None or content[2]:
        return None
    return Query(rng.choice(say.COPY).format(**content[0]), f"type({content[1]})", (), "copy")


def _type(view: View, rng: Random) -> Query | None:
    value = words.value(rng, view.held_out)
    if not speakable(value):
        return None
    fields = view.of_role("field")
    if fields and rng.random() < 0.3:
        text = rng.choice(say.TYPE_INTO).format(t=value, n=rng.choice(fields).label)
    else:
        text = rng.choice(say.TYPE).format(t=value)
    return Query(text, f"type({value})", (), "type")


def _number(view: View, rng: Random) -> Query | None:
    numbers = view.of_role("number")
    if not numbers:
        return None
    thing = rng.choice(numbers)
    forms = ["what number is shown for {}", "what is {}", "read the number of {}"]
    if len(view.by_role["number"]) == 1:
        forms.append("what number is shown")
    return Query(rng.choice(forms).format(thing.label), f"answer({thing.value})", (), "number")


def _count(view: View, rng: Random) -> Query | None:
    ways = {f"{role}s": len(view.by_role[role]) for role in ("button", "link", "field", "tab")}
    ways["checkboxes"] = len(view.by_role["checkbox"])
    shapes = view.by_role["shape"]
    for shape in shapes:
        ways["shapes"] = len(shapes)
        ways[f"{shape.colour} shapes"] = sum(each.colour == shape.colour for each in shapes)
        ways[f"{shape.shape}s"] = sum(each.shape == shape.shape for each in shapes)
    some = [(what, count) for what, count in ways.items() if 0 < count <= 6]
    if not some:
        return None
    what, count = rng.choice(some)
    text = rng.choice(("how many {} are there", "How many {} are there?", "count the {}"))
    return Query(text.format(what), f"answer({count})", (), "count")


def _key(view: View, rng: Random) -> Query | None:
    keys = rng.choice(list(say.KEYS))
    if key_of(keys) in view.labels:
        return None
    return Query(rng.choice(say.KEYS[keys]), f"key({keys})", (), "key")


def _scroll(view: View, rng: Random) -> Query | None:
    way = rng.choice(("down", "up"))
    return Query(
        rng.choice(say.SCROLL).format(d=way), f"scroll({{}},{way})", (view.screen,), "scroll"
    )


def _drag(view: View, rng: Random) -> Query | None:
    if rng.random() < 0.5 and len(view.by_role["shape"]) > 1:
        one, other = view.shapes(rng), view.shapes(rng)
        if one is None or other is None or one[2] is other[2]:
            return None
        ends = (f"the {one[1]}", f"the {other[1]}")
        boxes = (one[2].box, other[2].box)
    else:
        if len(view.plain) < 2:
            return None
        first, second = rng.sample(view.plain, 2)
        ends, boxes = (first.label, second.label), (first.box, second.box)
    text = rng.choice(say.DRAG).format(a=ends[0], b=ends[1])
    return Query(text, "drag({},{})", boxes, "drag")


def _double(view: View, rng: Random) -> Query | None:
    things = [*view.plain, *view.single_words]
    return _by_label(
        rng, things, ("double click {n}", 'double click "{n}"'), "double", "double_click"
    )


def _right(view: View, rng: Random) -> Query | None:
    return _by_label(
        rng, view.plain, ("right click {n}", "right click on {n}"), "right", "right_click"
    )


def _by_label(
    rng: Random, things: Sequence[Thing], templates: Sequence[str], kind: str, verb: str = "click"
) -> Query | None:
    """Ask for one of the things by its label, now and then in lower case."""
    if not things:
        return None
    thing = rng.choice(things)
    label = thing.label.lower() if rng.random() < 0.1 else thing.label
    noun = rng.choice(NOUNS[thing.role])
    return _pointing(rng.choice(templates).format(n=label, r=noun), thing, kind, verb)


def _pointing(text: str, thing: Thing, kind: str, verb: str = "click") -> Query:
    box: Box = thing.box
    return Query(text, f"{verb}({{}})", (box,), kind)


KINDS: Mapping[str, tuple[float, Kind]] = {
    "click": (8, _click),
    "part": (1, _part),
    "order": (2.5, _order),
    "look": (6, _look),
    "place": (3, _place),
    "field": (3, _field),
    "tick": (4, _tick),
    "radio": (3, _radio),
    "tab": (3, _tab),
    "row": (4, _row),
    "cell": (3, _cell),
    "link": (3, _link),
    "slider": (2, _slider),
    "is": (2, _is),
    "read": (2, _read),
    "copy": (1, _copy),
    "type": (1.2, _type),
    "number": (3, _number),
    "count": (1, _count),
    "key": (0.4, _key),
    "scroll": (0.3, _scroll),
    "drag": (0.8, _drag),
    "double": (0.5, _double),
    "right": (0.5, _right),
}
"""Weight and function by kind; "look" asks by colour, shape or size."""
