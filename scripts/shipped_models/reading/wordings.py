"""How people word what an agent is to do: templates of the questions of `questions.py`.

Fields: `n` a label, `r` a role's noun, `o` an ordinal, `c` a column, `t` a text to type, `d` a direction,
`a` and `b` the ends of a drag. Many are phrases of MiniWoB++'s instructions.
"""

from __future__ import annotations

from collections.abc import Mapping

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
SHORT_ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th")

CLICK = (
    "click {n}",
    "click on {n}",
    "Click on {n}.",
    'click "{n}"',
    'Click on "{n}".',
    'press "{n}"',
    "press {n}",
    "select {n}",
    "Select {n}",
    "tap {n}",
    'choose "{n}"',
    "Select {n} with the mouse",
)
CLICK_ROLE = (
    "click the {n} {r}",
    "click on the {n} {r}",
    'Click on the "{n}" {r}.',
    'Click on the {r} "{n}".',
    'press the "{n}" {r}',
    "click the {r} {n}",
    "Click {r} {n}.",
    'Click the {r} labeled "{n}".',
    'click on the {r} named "{n}"',
    "select the {r} {n}",
)
FIELD = (
    "click the field {n}",
    "click the {n} field",
    "click on the {n} text field",
    'click the "{n}" field',
    'focus the "{n}" field',
    "Focus into the {n} textbox.",
    'click into the field labeled "{n}"',
    "select the {n} input",
)
TICK = (
    "tick {n}",
    "check {n}",
    "Check {n}",
    'check the "{n}" checkbox',
    "Select {n}",
    "tick the box {n}",
    "Check the {n} box.",
    'tick "{n}"',
    "mark {n} as checked",
)
UNTICK = (
    "untick {n}",
    "uncheck {n}",
    'uncheck the "{n}" checkbox',
    "Uncheck the {n} box.",
    'untick "{n}"',
)
RADIO = (
    "choose {n}",
    "select {n}",
    "Select {n}",
    "select the radio button {n}",
    'click the "{n}" radio button',
    "choose the option {n}",
    "Check the {n} radio button",
)
TAB = (
    "open the {n} tab",
    "click the {n} tab",
    "switch to the {n} tab",
    "Switch to the tab {n}",
    "go to the {n} tab",
    'Click on the tab "{n}".',
)
ROW = (
    "select the row {n}",
    "click the {n} row",
    "choose {n} from the list",
    "Select {n} from the list",
    'Choose "{n}" from the list.',
    "click the item {n}",
    "open {n}",
    "pick {n}",
    'click on the item labeled "{n}"',
)
MENU = ("choose {n} from the menu", 'click the menu item "{n}"', "Select {n}", "open {n}")
CELL = (
    "click the cell of {n} and {c}",
    "click the cell in row {n} and column {c}",
    "click the {c} of {n}",
    "select row {n}, column {c}",
    "Click on the {c} of {n}.",
)
LINK = (
    "click the link {n}",
    'Click on the link "{n}".',
    "open the link {n}",
    "click on the {n} link",
    'find and click on the link "{n}"',
)
SLIDER = ("click the {n} slider", "click on the slider {n}", 'click the slider labeled "{n}"')
SHAPE = ("click the {n}", "Click on a {n}", "click on the {n}", "select the {n}", "find the {n}")
COLOURED = ("Click on the {n} colored box.", "click the {n} box", "click {n}", "pick {n}")
ORDER = (
    "click the {o} {r}",
    "Click on the {o} {r}.",
    "click on the {o} {r}",
    "select the {o} {r}",
    "find and click the {o} {r}",
)
ORDER_FIELD = (
    "Focus into the {o} input textbox.",
    "click the {o} text field",
    "focus the {o} field",
)
ORDER_TICK = ("check the {o} {r}", "click the {o} {r}", "Check the {o} {r}")
ONLY = ("click the {r}", "Click the {r}.", "find the {r}", "click on the {r}")
PLACE: Mapping[str, tuple[str, ...]] = {
    "below": ("below", "under"),
    "above": ("above", "over"),
    "right": ("to the right of", "right of"),
    "left": ("to the left of", "left of"),
}
READ = (
    "what does the field {n} hold",
    "what is in the {n} field",
    "read the {n} field",
    "what is the value of {n}",
    'What is written in "{n}"?',
)
READ_CELL = ("what is the {c} of {n}", "read the {c} of {n}", "what is in row {n}, column {c}")
COPY = (
    "type the text of the field {n}",
    "copy the text of {n}",
    "type what the {n} field holds",
    "enter the value of {n}",
    'Type the text in "{n}"',
)
TYPE = (
    'type "{t}"',
    'enter "{t}"',
    'Enter "{t}"',
    "type {t}",
    'Enter "{t}" into the text field',
    'Type "{t}" in the textbox',
    'Type "{t}" into the text input',
    "write {t}",
    "fill in {t}",
    'enter the number "{t}"',
    'Enter the password "{t}"',
)
TYPE_INTO = ("write {t} into {n}", "enter {t} into the field {n}", 'Enter "{t}" into the {n} field')
KEYS: Mapping[str, tuple[str, ...]] = {
    "enter": ("press enter", "hit the enter key", "press the enter key"),
    "tab": ("press the tab key", "press tab"),
    "escape": ("press escape", "press the escape key"),
    "backspace": ("press backspace", "hit backspace"),
    "delete": ("press the delete key",),
    "up": ("press the up arrow key", "press arrow up"),
    "down": ("press the down arrow key", "press arrow down"),
    "left": ("press the left arrow key",),
    "right": ("press the right arrow key",),
    "home": ("press the home key",),
    "end": ("press the end key",),
    "ctrl+a": ("press ctrl+a", "select all text"),
    "ctrl+c": ("press ctrl+c", "copy the selection"),
    "ctrl+v": ("press ctrl+v", "paste"),
    "ctrl+z": ("press ctrl+z",),
}
SCROLL = ("scroll {d}", "Scroll {d}.", "scroll the page {d}")
DRAG = ("drag {a} to {b}", "drag {a} onto {b}", "Drag {a} to {b}.", "move {a} to {b}")
