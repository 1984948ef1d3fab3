"""What an error says of a key or section that is none of the schema's.

unknown        the whole sentence: an old key, another tool's word, or the nearest name
where_is       the same for a name without its section
did_you_mean   `; did you mean X?` for the nearest of some names
WORDS          what users of other tools write (other_tools.toml); docs/your-words.md shows it
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dart_cli.config.schema import section_types

PAGE = "docs/your-words.md"
_SHOWN = 3  # words of another tool's section that are explained


@dataclass(frozen=True)
class Word:
    """Options of other tools that mean one thing, and what it is called here."""

    subject: str
    theirs: tuple[str, ...]
    of: str  # tools that call it so
    ours: tuple[str, ...] = ()
    how: str = ""  # what else there is to say, or how it is done where no key does it

    @property
    def answer(self) -> str:
        """`dart's name for it is train.lr: left out, it follows the model's size`."""
        if not self.ours:
            return self.how
        *others, last = self.ours
        listed = (
            f"names for it are {', '.join(others)} and {last}"
            if others
            else f"name for it is {last}"
        )
        return f"dart's {listed}{self.how and f': {self.how}'}"


def _words() -> tuple[Word, ...]:
    tree = tomllib.loads((Path(__file__).parent / "other_tools.toml").read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = tree["word"]
    return tuple(
        Word(**row | {"theirs": tuple(row["theirs"]), "ours": tuple(row.get("ours", ()))})
        for row in rows
    )


WORDS = _words()
_KEY = re.compile(rf"\b(?:{'|'.join(section_types())})\.\w+|\bdart \w+(?: --\w+)?|\bmax_steps\b")
"""Keys and commands in a text of the table, which the page shows as code."""


@cache
def _by_name() -> Mapping[str, Word]:
    return {name: word for word in WORDS for name in word.theirs}


def unknown(key: str, value: object) -> str:
    """Return the sentence for a key of no section, or for a section that there is not, with its `value`."""
    sections = section_types()
    section, name = _parts(key)
    if word := _word(key):
        return f"unknown key {key}; {word.answer}"
    if name:
        known = list(sections[section].model_fields)
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {section}.{close[0]}?" if close else where_is(name)
        return f"unknown key {key}{hint or f'; [{section}] has ' + ', '.join(known)}"
    if isinstance(value, Mapping):
        return f"unknown section [{key}]{_of_section(key, value)}"
    return f"unknown key {key} outside any section{where_is(key)}"


def where_is(name: str) -> str:
    """`; did you mean train.lr?` for another tool's word, and a key that a section has or nearly has."""
    if word := _word(name):
        return f"; {word.answer}"
    home = _homes()
    close = difflib.get_close_matches(name, home, n=1)
    return f"; did you mean {home[close[0]]}.{close[0]}?" if close else ""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest of the known names; empty where none is near."""
    close = difflib.get_close_matches(wrong, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


@cache
def _homes() -> Mapping[str, str]:
    """Return the first section of those that have such a key."""
    homes: dict[str, str] = {}
    for section, kind in section_types().items():
        for each in kind.model_fields:
            homes.setdefault(each, section)
    return homes


def _parts(key: str) -> tuple[str, str]:
    """(section, name) of a key; the section may be one within another, as in `model.lora.rank`."""
    within = [name for name in section_types() if key.startswith(f"{name}.")]
    section = max(within, key=len, default=key.partition(".")[0])
    return section, key[len(section) + 1 :]


def _word(path: str) -> Word | None:
    """Return another tool's word: the longest end of a dotted path that the table has."""
    parts = path.lower().replace("-", "_").split(".")
    ends = (".".join(parts[at:]) for at in range(len(parts)))
    return next((_by_name()[end] for end in ends if end in _by_name()), None)


def _of_section(section: str, tree: Mapping[str, object]) -> str:
    """Return what a section of another name was meant for: a misspelt one of ours, or another tool's keys."""
    sections = section_types()
    close = difflib.get_close_matches(section, list(sections), n=1)
    if close and all(key in sections[close[0]].model_fields for key in tree):
        return f"; did you mean {close[0]}?"
    words = list(dict.fromkeys(_explained(section, tree)))
    if words:
        more = f", and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
        return f" of another tool ({PAGE}): {'; '.join(words[:_SHOWN])}{more}"
    return did_you_mean(section, sections) or f"; there are {', '.join(sections)}"


def _explained(section: str, tree: Mapping[str, object]) -> Iterator[str]:
    """Yield what each key of the tree is called here, as far as that is known."""
    level: list[tuple[str, object]] = [(section, tree)]
    while level:
        path, value = level.pop(0)
        name = path.rpartition(".")[2]
        if isinstance(value, Mapping) and value:
            level += [(f"{path}.{key}", each) for key, each in value.items()]
        elif word := _word(path):
            yield f"{name} is {' and '.join(word.ours)}" if word.ours else f"{name}: {word.how}"
        elif name in _homes():
            yield f"{name} is {_homes()[name]}.{name}"


def words_page() -> str:
    """Return the table as a page of the documentation."""
    lines = [
        "# Your words, our keys",
        "",
        "For those who come from TRL, verl, prime-rl or gymnasium: what an option is called there and here. An error",
        "for an unknown key says the same: `learning_rate`, in any section, is answered with `train.lr`. All keys: the",
        "[configuration](config.md). This page is made from the code (`python -m dart_cli.cli.reference`), and a test",
        "compares them.",
    ]
    for subject in dict.fromkeys(word.subject for word in WORDS):
        lines += ["", f"## {subject}", "", "| there | of | here |", "| --- | --- | --- |"]
        for word in WORDS:
            if word.subject == subject:
                theirs = ", ".join(map(_their_name, word.theirs))
                here = ", ".join(f"`{key}`" for key in word.ours)
                how = _KEY.sub(r"`\g<0>`", word.how)
                lines.append(f"| {theirs} | {word.of} | {here}{': ' * bool(here and how)}{how} |")
    return "\n".join(lines) + "\n"


def _their_name(name: str) -> str:
    section, _, key = name.rpartition(".")
    return f"`{key}` of `{section}`" if section else f"`{key}`"
