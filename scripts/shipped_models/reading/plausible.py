"""Actions at random that could be meant: what a page offers, without regard to what leads where.

plausible       an answer to an instruction
random_action   an action to perform
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from dart_cli.language.parsers.compact import NOTCHES
from envs.contract.actions import Action, Click, Drag, KeyPress, Scroll, Type
from envs.contract.base import Observation
from scripts.shipped_models.reading import words
from scripts.shipped_models.reading.answers import Answer, Ask, load_safe, safe_box
from scripts.shipped_models.reading.looking import look
from scripts.shipped_models.reading.scene import Box, Thing

PRESSED = frozenset(
    "button link field checkbox radio tab row option item section select icon shape slider cell tile".split()
)
"""Roles of what is pressed; texts are pressed seldom."""

SUBMITS = re.compile(
    r"submit|ok|done|search|login|log in|send|cancel|next|save|book|buy|close", re.I
)
DRAGS = re.compile(r"\b(drag|draw|highlight|resize|rotate|slider|move)", re.I)
COPIES = re.compile(r"\b(copy|paste)", re.I)
KEYS = (("ctrl", "a"), ("ctrl", "c"), ("ctrl", "v"))
QUOTED = re.compile(r'"([^"]+)"')
MENTIONED = re.compile(r"\b(?:[A-Z][\w.@-]+|\d[\d/.:]*|[\w.-]+@[\w.]+)")

WHOLE = 0.15
"""How often the page as a whole may be scrolled."""

SMALL = 3  # CSS pixels to each side of where a drag begins and ends


def plausible(
    ask: Ask, instruction: str, things: Sequence[Thing], rng: Random, scale: float
) -> Answer:
    """Return one action out of many, whatever the instruction would need next. Raises EnvError."""
    load_safe(ask)
    has_field = any(thing.role == "field" for thing in things)
    focused = bool(ask("dartFocus()"))
    scrolls = ask(f"dartScrolls({scale:g})")
    whole = sum(1 for _, _, _, is_page in scrolls if is_page)
    texts = texts_of(instruction)
    shares = {
        "click": 1.0 if things else 0.0,
        "type": (0.9 if focused else 0.12) if texts and (has_field or focused) else 0.0,
        "scroll": 0.15 if len(scrolls) > whole else 0.04 * whole,
        "drag": 1.2 if DRAGS.search(instruction) and things else 0.0,
        "key": 0.5 if COPIES.search(instruction) and focused else 0.0,
    }
    if not any(shares.values()):
        return Answer("click({})", ((0.0, 50 * scale, 160 * scale, 210 * scale),))
    match rng.choices([*shares], [*shares.values()])[0]:
        case "type":
            return Answer(f"type({rng.choice(texts)})", ())
        case "scroll":
            box, up, _, _ = rng.choice(scrolls)
            way = "up" if up and rng.random() < 0.4 else "down"
            return Answer(f"scroll({{}},{way})", (_box(box),))
        case "drag":
            first, second = (_small(_point(rng.choice(things), rng), scale) for _ in range(2))
            return Answer("drag({},{})", (first, second))
        case "key":
            return Answer(f"key({'+'.join(rng.choice(KEYS))})", ())
    thing = rng.choices(things, [_weight(thing, instruction) for thing in things])[0]
    x, y = (thing.box[0] + thing.box[2]) / 2, (thing.box[1] + thing.box[3]) / 2
    if thing.role == "slider":
        x, y = _point(thing, rng)
    return Answer("click({})", (safe_box(x, y, ask, scale),))


def random_action(ask: Ask, instruction: str, observation: Observation, rng: Random) -> Action:
    """Return an action on the page as it is: a click, a text, a scroll, a drag. Raises EnvError."""
    load_safe(ask)
    scale = observation.width / 160
    things = [thing for thing in look(ask, scale).things if thing.role in PRESSED]
    scrolls = ask(f"dartScrolls({scale:g})")
    if rng.random() > WHOLE:  # many a page as a whole scrolls away to nothing
        scrolls = [scroll for scroll in scrolls if not scroll[3]]
    if ask("dartFocus()") and rng.random() < 0.6:
        return Type(text=rng.choice([*texts_of(instruction), words.value(rng, held_out=False)]))
    if scrolls and rng.random() < 0.25:
        left, top, right, bottom = _box(rng.choice(scrolls)[0])
        dy = NOTCHES if rng.random() < 0.7 else -NOTCHES
        return Scroll(x=round((left + right) / 2), y=round((top + bottom) / 2), dy=dy)
    if not things:
        return Click(
            x=rng.randrange(observation.width),
            y=rng.randrange(observation.height // 4, observation.height),
        )
    if COPIES.search(instruction) and rng.random() < 0.3:
        return KeyPress(keys=list(rng.choice(KEYS)))
    one, other = (_point(rng.choice(things), rng) for _ in range(2))
    if DRAGS.search(instruction) and rng.random() < 0.5:
        return Drag(path=[_pixel(one, observation), _pixel(other, observation)])
    x, y = _pixel(one, observation)
    return Click(x=x, y=y)


def texts_of(instruction: str) -> list[str]:
    """Return what an instruction quotes; if it quotes nothing, names and numbers that it mentions."""
    quoted = QUOTED.findall(instruction)
    mentioned = [text.rstrip(".") for text in MENTIONED.findall(instruction)[1:]]
    return quoted or [text for text in mentioned if not SUBMITS.fullmatch(text)]


def _weight(thing: Thing, instruction: str) -> float:
    weight = 1.0 if thing.role in PRESSED else 0.15
    label = thing.label.lower()
    if label and len(label) > 1 and label in instruction.lower():
        weight *= 2.5
    elif thing.role == "button" and SUBMITS.fullmatch(label):
        weight *= 2
    if thing.colour and thing.colour in instruction.lower():
        weight *= 2
    return weight


def _point(thing: Thing, rng: Random) -> tuple[float, float]:
    """Return a point in the middle part of a thing, where it is long anywhere along it."""
    left, top, right, bottom = thing.box
    share = rng.uniform(0.1, 0.9) if thing.role == "slider" else rng.uniform(0.4, 0.6)
    return left + share * (right - left), top + rng.uniform(0.4, 0.6) * (bottom - top)


def _pixel(point: tuple[float, float], observation: Observation) -> tuple[int, int]:
    x, y = point
    return min(observation.width - 1, max(0, round(x))), min(
        observation.height - 1, max(0, round(y))
    )


def _small(point: tuple[float, float], scale: float) -> Box:
    x, y = point
    half = SMALL * scale
    return x - half, y - half, x + half, y + half


def _box(edges: Sequence[float]) -> Box:
    left, top, right, bottom = edges
    return left, top, right, bottom
