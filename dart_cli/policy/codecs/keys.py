"""Names of keys: lower case, one per key, the same in every action language."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bus.errors import ActionError
from envs.inputs import SAME_KEY

_KEY = re.compile(r"[a-z0-9_]+|[!-/:-@\[-`{-~]")


def split_keys(text: str, separator: str | None) -> list[str]:
    """Names in a text such as `ctrl+a`, canonical. Raises ActionError for an unknown form."""
    keys = [SAME_KEY.get(key, key) for key in text.lower().split(separator)]
    return [_unescaped(key) for key in _checked(keys)]


def one_key(text: str, separator: str | None) -> str:
    """The one name in a text. Raises ActionError for several."""
    keys = split_keys(text, separator)
    if len(keys) > 1:
        raise ActionError(f"one key is held at a time, got {text[:24]!r}")
    return keys[0]


def join_keys(keys: Sequence[str], separator: str) -> str:
    """The text that `split_keys` reads as `keys`. Raises ActionError if there is none."""
    names = ["plus" if key == "+" else key for key in _checked(keys)]
    text = separator.join(names)
    if split_keys(text, separator) != list(keys):
        raise ActionError(
            f"keys {list(keys)!r} are not the names used here (see SAME_KEY in envs/inputs.py)"
        )
    return text


def _checked(keys: Sequence[str]) -> Sequence[str]:
    if not keys:
        raise ActionError("no key is given")
    for key in keys:
        if not _KEY.fullmatch(key):
            raise ActionError(f"{key[:24]!r} is not a key's name")
    return keys


def _unescaped(key: str) -> str:
    return "+" if key == "plus" else key


def read_keys(names: Sequence[str]) -> list[str]:
    """Canonical names of keys that stand alone or joined by +, e.g. ["Ctrl", "c"], ["ctrl+c"], [" "]."""
    keys: list[str] = []
    for name in names:
        if name == " ":
            keys.append("space")
        elif len(name) > 1 and "+" in name:
            keys += split_keys(name, "+")
        else:
            keys += split_keys(name.strip(), None)
    return list(_checked(keys))


def write_keys(keys: Sequence[str]) -> list[str]:
    """The names that `read_keys` reads as `keys`. Raises ActionError if there are none."""
    if read_keys(_checked(keys)) != list(keys):
        raise ActionError(
            f"keys {list(keys)!r} are not the names used here (see SAME_KEY in envs/inputs.py)"
        )
    return list(keys)


def one_of_keys(keys: Sequence[str]) -> str:
    """The one key of a list. Raises ActionError for several."""
    if len(keys) != 1:
        raise ActionError(f"one key is held or pressed at a time, got {', '.join(keys)[:40]}")
    return keys[0]
