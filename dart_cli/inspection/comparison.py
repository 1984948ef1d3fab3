"""What tells several runs apart besides their curves: their settings, and what a person noted about each.

settings_that_differ   the keys that have not the same value in all of them
read_note              the text of `notes.md` in a run's folder
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NOTE = "notes.md"
"""A person writes it into the folder of a run; the pages of the run show it."""
MOST_NOTED = 16_384
"""Bytes of a note that are read."""
NO_SETTING = "-"
"""Stands for the value of a run that lacks the key."""
_OWN = frozenset({"run.dir"})  # keys that differ between any two runs


def settings_that_differ(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return key -> its value in each configuration, of the keys that have not the same value in all."""
    flat = [dict(_flat(config)) for config in configs]
    keys = sorted({key for each in flat for key in each} - _OWN)
    rows = {key: [_words(each, key) for each in flat] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def read_note(run_dir: Path) -> str:
    """Return what a person noted about a run; empty without a note. A link is not followed."""
    path = run_dir / NOTE
    if path.is_symlink() or not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_NOTED + 1)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    shown = text[:MOST_NOTED].decode("utf-8", "replace").strip()
    return shown + (" ..." if len(text) > MOST_NOTED else "")


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key with its value; a list is one value."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _words(settings: Mapping[str, Any], key: str) -> str:
    if key not in settings:
        return NO_SETTING
    value = settings[key]
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
