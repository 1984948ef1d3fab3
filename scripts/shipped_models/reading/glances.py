"""Small pictures, which cost little: what to type is in the instruction, or one line of text is in sight.

typing_scene     nothing in sight: type what is quoted, press a key
spelling_scene   one line of text: read it, type it, say whether it is there
"""

from __future__ import annotations

from random import Random

from scripts.shipped_models.reading import wordings as say
from scripts.shipped_models.reading import words
from scripts.shipped_models.reading.faces import Faces
from scripts.shipped_models.reading.naming import speakable
from scripts.shipped_models.reading.pen import Pen
from scripts.shipped_models.reading.scene import Query, Scene

BLANK, LINE = (42, 28), (98, 28)
"""Pixels."""

TYPINGS = 5
"""Questions about an empty picture."""

KEY = 0.15
"""Share of the questions about an empty picture that a key answers."""

READING = ("what is written here", "read the text", "What does it say?", "read the word")
COPYING = ("type the text that is shown", "copy the text", "type what is written here")


def typing_scene(seed: int, held_out: bool = False) -> Scene:
    """Return an empty picture and TYPINGS instructions to type or press something."""
    key = f"typing/{seed}/{held_out}"
    rng = Random(key)
    pen = Pen(rng, BLANK, "one", held_out)
    queries = []
    while len(queries) < TYPINGS:
        value = words.value(rng, held_out)
        if rng.random() < KEY:
            keys = rng.choice(list(say.KEYS))
            queries.append(Query(rng.choice(say.KEYS[keys]), f"key({keys})", (), "key"))
        elif speakable(value):
            form = rng.choice((*say.TYPE, *say.TYPE_INTO))
            text = form.format(t=value, n=words.label(rng, held_out))
            queries.append(Query(text, f"type({value})", (), "type"))
    scene = pen.scene(key)
    return Scene(scene.key, scene.png, queries=tuple(queries))


def spelling_scene(seed: int, faces: Faces, held_out: bool = False) -> Scene:
    """Return one line of text and questions about it."""
    key = f"spelling/{seed}/{faces}/{held_out}"
    rng = Random(key)
    pen = Pen(rng, LINE, faces, held_out)
    face = pen.face()
    make = pen.value if rng.random() < 0.4 else pen.label
    text = make(face, LINE[0] - 6)
    left = rng.uniform(2, max(2.0, LINE[0] - 3 - face.width(text)))
    pen.text(left, rng.uniform(9, 19), text, face, pen.theme.ink)
    queries = []
    if speakable(text):
        other = words.label(rng, held_out)
        queries = [
            Query(rng.choice(READING), f"answer({text})", (), "read"),
            Query(rng.choice(COPYING), f"type({text})", (), "copy"),
            Query(f'is "{text}" visible', "yes", (), "is"),
            Query(f'is "{other}" visible', "yes" if other == text else "no", (), "is"),
        ]
    scene = pen.scene(key)
    return Scene(scene.key, scene.png, scene.glyphs, scene.things, tuple(queries))
