"""The errors for keys and sections that the schema does not have.

unknown_key    the whole sentence, with dart's name for another tool's option, or with the nearest name
where_is       the suggestion for a name without a section
did_you_mean   `; did you mean X?` for the nearest of some names
WORDS          options of other tools, with dart's names for them (other_tools.toml, docs/your-words.md)
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
_MOST_EXPLAINED = 3  # keys of another tool's section that an error explains


@dataclass(frozen=True)
class Word:
    """Options of other tools that have the same meaning, and dart's name for it."""

    subject: str
    theirs: tuple[str, ...]
    of: str  # the tools that have these options
    ours: tuple[str, ...] = ()  # keys of dart
    how: str = ""  # a remark, or how it is done where there is no such key

    @property
    def answer(self) -> str:
        """For example `dart's name for it is train.lr: left out, it follows the model's size`."""
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
    """Return the rows of other_tools.toml."""
    tree = tomllib.loads((Path(__file__).parent / "other_tools.toml").read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = tree["word"]
    return tuple(
        Word(**row | {"theirs": tuple(row["theirs"]), "ours": tuple(row.get("ours", ()))})
        for row in rows
    )


WORDS = _words()
_KEY = re.compile(rf"\b(?:{'|'.join(section_types())})\.\w+|\bdart \w+(?: --\w+)?|\bmax_steps\b")
"""Matches keys and commands in a text of the table; the page shows them as code."""


@cache
def _by_name() -> Mapping[str, Word]:
    """Return another tool's option -> its row."""
    return {name: word for word in WORDS for name in word.theirs}


def unknown_key(key: str, value: object) -> str:
    """Return the error for a key or section that does not exist; `value` is what the file sets it to."""
    sections = section_types()
    section, name = _parts(key)
    if word := _word(key):
        return f"unknown key {key}; {word.answer}"
    if name:
        keys = list(sections[section].model_fields)
        close = difflib.get_close_matches(name, keys, n=1)
        hint = f"; did you mean {section}.{close[0]}?" if close else where_is(name)
        return f"unknown key {key}{hint or f'; [{section}] has ' + ', '.join(keys)}"
    if isinstance(value, Mapping):
        return f"unknown section [{key}]{_of_section(key, value)}"
    return f"unknown key {key} outside any section{where_is(key)}"


def where_is(name: str) -> str:
    """Return `; did you mean train.lr?` for another tool's option, or for a key like one of a section."""
    if word := _word(name):
        return f"; {word.answer}"
    home = _homes()
    close = difflib.get_close_matches(name, home, n=1)
    return f"; did you mean {home[close[0]]}.{close[0]}?" if close else ""


def did_you_mean(wrong: str, names: Iterable[str]) -> str:
    """Return `; did you mean X?` for the nearest of some names; empty where none is near."""
    close = difflib.get_close_matches(wrong, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


@cache
def _homes() -> Mapping[str, str]:
    """Return for each key, without its section, the first section that has it."""
    homes: dict[str, str] = {}
    for section, kind in section_types().items():
        for key in kind.model_fields:
            homes.setdefault(key, section)
    return homes


def _parts(key: str) -> tuple[str, str]:
    """Return the section and the name of a key. A section may be inside another, as in `model.lora.rank`."""
    prefixes = [name for name in section_types() if key.startswith(f"{name}.")]
    section = max(prefixes, key=len, default=key.partition(".")[0])
    return section, key[len(section) + 1 :]


def _word(path: str) -> Word | None:
    """Return the entry of the table for the longest end of a dotted path; None without one."""
    parts = path.lower().replace("-", "_").split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((_by_name()[end] for end in ends if end in _by_name()), None)


def _of_section(section: str, tree: Mapping[str, object]) -> str:
    """Return what an unknown section may mean: a misspelt section of dart, or keys of another tool."""
    sections = section_types()
    close = difflib.get_close_matches(section, list(sections), n=1)
    if close and all(key in sections[close[0]].model_fields for key in tree):
        return f"; did you mean {close[0]}?"
    texts = list(dict.fromkeys(_explanations(section, tree)))
    if texts:
        rest = len(texts) - _MOST_EXPLAINED
        more = f", and {rest} more" if rest > 0 else ""
        return f" of another tool ({PAGE}): {'; '.join(texts[:_MOST_EXPLAINED])}{more}"
    return did_you_mean(section, sections) or f"; there are {', '.join(sections)}"


def _explanations(section: str, tree: Mapping[str, object]) -> Iterator[str]:
    """Yield dart's name for each key of the tree that dart has or the table explains."""
    level: list[tuple[str, object]] = [(section, tree)]
    while level:
        path, value = level.pop(0)
        name = path.rpartition(".")[2]
        if isinstance(value, Mapping) and value:
            level += [(f"{path}.{key}", inner) for key, inner in value.items()]
        elif word := _word(path):
            yield f"{name} is {' and '.join(word.ours)}" if word.ours else f"{name}: {word.how}"
        elif name in _homes():
            yield f"{name} is {_homes()[name]}.{name}"


def words_page() -> str:
    """Return the table as a page of the documentation."""
    lines = [
        "# Your words, our keys",
        "",
        "This page gives dart's names for the options of TRL, verl, prime-rl, gymnasium and others. The error for an",
        "unknown key gives the same answer: `train.lr` for `learning_rate`, in any section. All keys of dart are in the",
        "[configuration](config.md). `python -m dart_cli.cli.reference` writes this page.",
    ]
    for subject in dict.fromkeys(word.subject for word in WORDS):
        lines += ["", f"## {subject}", "", "| option | of | in dart |", "| --- | --- | --- |"]
        for word in WORDS:
            if word.subject == subject:
                theirs = ", ".join(map(_their_name, word.theirs))
                here = ", ".join(f"`{key}`" for key in word.ours)
                how = _KEY.sub(r"`\g<0>`", word.how)
                lines.append(f"| {theirs} | {word.of} | {here}{': ' * bool(here and how)}{how} |")
    return "\n".join(lines) + "\n"


def _their_name(name: str) -> str:
    """Return another tool's option with its section, as code."""
    section, _, key = name.rpartition(".")
    return f"`{key}` of `{section}`" if section else f"`{key}`"
