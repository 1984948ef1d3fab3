"""The words that the small base reads whole in an instruction; every other word it spells.

What has to be found on the screen letter by letter (labels, names, values: ok, Submit, Paris) is not
among them, so that reading a label that was never seen is the same work as reading any other.
Words stand in lower case; those that open a sentence stand capitalised, too. Each is a token with
and without a leading space, as in `scripts/tiny_model.py`.
"""

from __future__ import annotations

_JOINING = """
    a an the this that these those it its and or not no yes of on in into inside out to from for
    with by at as is are be has have been you your his her their them all each every any both only
    than then so when if until after where how many much what which
""".split()

_NUMBERS = """
    one two three four five six seven eight nine ten first second third fourth fifth sixth seventh
    eighth last st nd rd th most number numbers odd even count total greater less greatest highest between
""".split()

_VERBS = """
    click clicking press pressing tap select choose pick check uncheck tick untick mark open close
    type enter write fill copy paste put drag drop move scroll find use set go switch focus expand
    collapse highlight draw create delete remove add give make keep read say tell show shown
    visible hold holds written named labeled labelled called hit push double wait buy
    forward mark rename search sort resize answer toggle play count see match matches starts ends
    please marked selected checked ticked unticked unchecked empty done
""".split()

_THINGS = """
    button buttons link links field fields box boxes checkbox checkboxes radio tab row rows list
    lists item items option options menu dialog window page slider sliders cell column table grid
    text textbox input area textarea textareas label word words letter letters digit line lines
    paragraph heading title name value date time color colour colored coloured shape shapes icon
    icons image dot point points circle circles square squares triangle triangles rectangle
    rectangles star diamond ring swatch file files folder folders email mail message key keys mouse
    pointer screen dropdown combo widget form picker password user everything post toggle panel
    trash side sides angle center coordinate selection
""".split()

_LOOKS = """
    red green blue yellow orange purple pink cyan magenta black white grey gray brown navy teal
    olive lime aqua small large smaller larger short shortest longest dark light bold upper lower
    case
""".split()

_PLACES = """
    left right up down above below under over beside near top bottom middle far end start around
    through along away back together horizontal vertical height width
""".split()

_KEYS = "escape backspace delete space home ctrl shift alt arrow tab enter end page".split()

_TASKS = """
    similar shades increasing ascending price number editor problem math using example
""".split()

_OPENING = """
    Step None Check Choose Click Copy Double Drag Draw Enter Fill Find Focus How In Is Mark Move Press Put Read
    Scroll Select Set Switch Tap The Then Tick To Toggle Type Uncheck Untick What Which
""".split()
"""What opens a sentence, of words that are seldom the label of something."""

SMALL_WORDS: tuple[str, ...] = tuple(
    dict.fromkeys(
        [*_JOINING, *_NUMBERS, *_VERBS, *_THINGS, *_LOOKS, *_PLACES, *_KEYS, *_TASKS, *_OPENING]
    )
)
"""Whole words of instructions, in a fixed order; each is a token with and without a leading space."""
