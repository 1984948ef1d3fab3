"""Paths into JSON values: `cards[title=Milk].list`, `users[0].name`, `orders[*].total`.

JsonPath          a path that was read; `values` gives what it names
without           a value without what some paths name
first_difference  where two values differ first, in words
same              returns whether two JSON values are equal, where true is not 1

A path is names with dots between them. A name is followed by any number of `[2]` (an entry, from the end if
negative), `[key=text]` (the first entry whose `key` is that text), `[*]` (all entries) and `["name"]` (a name
with any characters). `.` is the whole value. Placeholders such as `{card}` are filled in after the path was
read, so that a value may have any characters.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from bus.error_texts import did_you_mean

_NAME = re.compile(r"[^.\[\]]+")
_BRACKET = re.compile(
    r'\[(?:(-?\d+)|(\*)|"((?:[^"\\]|\\.)*)"|([^\[\]=]+)=((?:[^\[\]]|\[\d+\])*))\]'
)

Fill = Callable[[str], str]
"""A function that fills placeholders in."""


@dataclass(frozen=True)
class _Name:
    text: str


@dataclass(frozen=True)
class _Entry:
    number: int


@dataclass(frozen=True)
class _Every:
    pass


@dataclass(frozen=True)
class _First:
    key: str
    text: str


_Part = _Name | _Entry | _Every | _First


class NothingThereError(LookupError):
    """A path names nothing in a value; the text says where it ends."""


@dataclass(frozen=True)
class JsonPath:
    """A path into JSON values."""

    text: str
    parts: tuple[_Part, ...]

    @classmethod
    def of(cls, text: str) -> JsonPath:
        """Read a path. Raises ValueError, which names the place."""
        if text == ".":
            return cls(text, ())
        parts: list[_Part] = []
        at = 0
        while at < len(text):
            if bracket := _BRACKET.match(text, at):
                parts.append(_part_of(bracket))
                at = bracket.end()
                continue
            if text[at] == "." and parts:
                at += 1
            name = _NAME.match(text, at)
            if name is None:
                raise ValueError(
                    f"{text!r} is no path: want a name at character {at + 1}, "
                    "as in cards[title=Milk].list or users[0].name"
                )
            parts.append(_Name(name.group()))
            at = name.end()
        if not parts:
            raise ValueError('the path is empty; "." names the whole value')
        return cls(text, tuple(parts))

    def filled(self, fill: Fill) -> JsonPath:
        """Return the path with its placeholders filled in."""
        return JsonPath(fill(self.text), tuple(_filled(part, fill) for part in self.parts))

    def value(self, root: Any) -> Any:
        """Return what the path names: one value, or a list if it has `[*]`.

        Raises NothingThereError if there is no such value.
        """
        values = [root]
        for count, part in enumerate(self.parts):
            try:
                values = [inner for value in values for _, inner in _inside(value, part)]
            except NothingThereError as error:
                raise NothingThereError(f"{self._until(count)} {error}") from None
        return values if any(isinstance(part, _Every) for part in self.parts) else values[0]

    def _until(self, count: int) -> str:
        """Return the first `count` parts as text, for an error."""
        if count == 0:
            return "the value"
        return repr("".join(_text(part) for part in self.parts[:count]).lstrip("."))


def without(root: Any, paths: Iterable[JsonPath]) -> Any:
    """Return a copy of a value without what the paths name; a path that names nothing removes nothing."""
    pruned = copy.deepcopy(root)
    for path in paths:
        *way, last = path.parts or (None,)
        if last is None:
            return None
        holders = [pruned]
        try:
            for part in way:
                assert part is not None
                holders = [inner for value in holders for _, inner in _inside(value, part)]
        except NothingThereError:
            continue
        for holder in holders:
            try:
                places = [place for place, _ in _inside(holder, last)]
            except NothingThereError:
                continue
            for place in sorted(places, reverse=True):
                del holder[place]
    return pruned


def first_difference(before: Any, after: Any, at: str = "") -> str:
    """Return where two JSON values differ first, e.g. `users[0].name: "Ann" -> "Bo"`; empty if nowhere."""
    if same(before, after):
        return ""
    where = at.lstrip(".") or "it"
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if key not in after:
                return f"{where} lost {key!r}"
            if key not in before:
                return f"{where} has a new {key!r}: {_short(after[key])}"
            if inner := first_difference(before[key], after[key], f"{at}.{key}"):
                return inner
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            if inner := first_difference(old, new, f"{at}[{number}]"):
                return inner
    if isinstance(before, list) and isinstance(after, list):
        return f"{where} had {len(before)} entries, has {len(after)}"
    return f"{where}: {_short(before)} -> {_short(after)}"


def same(first: Any, second: Any) -> bool:
    """Return True if two JSON values are equal; true and 1 are not."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _part_of(bracket: re.Match[str]) -> _Part:
    number, every, name, key, text = bracket.groups()
    if number is not None:
        return _Entry(int(number))
    if every is not None:
        return _Every()
    if name is not None:
        return _Name(json.loads(f'"{name}"'))
    return _First(key, text)


def _filled(part: _Part, fill: Fill) -> _Part:
    match part:
        case _Name(text):
            return _Name(fill(text))
        case _First(key, text):
            return _First(fill(key), fill(text))
    return part


def _text(part: _Part) -> str:
    match part:
        case _Name(text):
            return f".{text}"
        case _Entry(number):
            return f"[{number}]"
        case _First(key, text):
            return f"[{key}={text}]"
    return "[*]"


def _inside(value: Any, part: _Part) -> Iterator[tuple[Any, Any]]:
    """Yield (key or number, value) of what `part` names in a value. Raises NothingThereError."""
    match part:
        case _Name(name):
            if not isinstance(value, dict):
                raise NothingThereError(f"is {_kind(value)}, which has no {name!r}")
            if name not in value:
                raise NothingThereError(f"has no {name!r}{did_you_mean(name, value)}")
            yield name, value[name]
            return
    if not isinstance(value, list):
        raise NothingThereError(f"is {_kind(value)}, no list")
    match part:
        case _Entry(number):
            place = number + len(value) if number < 0 else number
            if not 0 <= place < len(value):
                raise NothingThereError(f"has {len(value)} entries, none at {number}")
            yield place, value[place]
        case _First(key, text):
            for place, entry in enumerate(value):
                if isinstance(entry, dict) and key in entry and as_text(entry[key]) == text:
                    yield place, entry
                    return
            raise NothingThereError(f"has no entry whose {key} is {text!r}")
        case _Every():
            yield from enumerate(value)


def as_text(value: Any) -> str:
    """Return a JSON value as a text to compare: a text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return kinds.get(type(value), "a number")
