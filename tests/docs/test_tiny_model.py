"""The list of words that the tiny model knows is the one it was trained on."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

from scripts.grounding_screens import INSTRUCTIONS

PAGE = Path(__file__).parents[2] / "docs" / "tiny-model.md"


def test_the_page_lists_every_instruction_that_the_base_was_trained_on() -> None:
    text = (
        PAGE.read_text(encoding="utf-8")
        .partition("### The words it knows")[2]
        .partition("## A model that reads")[0]
    )
    words = {
        name.removesuffix("s"): listed.split(", ")
        for name, listed in re.findall(r"^- (colours|shapes|icons): (.*)$", text, re.MULTILINE)
    }
    phrases = [phrase for phrase in re.findall(r"`([^`]+)`", text) if "{" in phrase]
    listed = set()
    for phrase in phrases:
        names = re.findall(r"{(\w+)}", phrase)
        for values in product(*(words[name] for name in names)):
            listed.add(phrase.format(**dict(zip(names, values, strict=True))))
    assert listed == set(INSTRUCTIONS)
