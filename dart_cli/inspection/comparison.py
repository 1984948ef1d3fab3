"""The differences between runs besides their curves: their settings, and a person's note on each.

settings_that_differ   the keys whose values differ between the runs
read_note              the text of `notes.md` in the folder of a run
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NOTE = "notes.md"
"""The file in the folder of a run in which a person writes a note; the pages of the run show it."""
MAX_NOTE_BYTES = 16_384
"""Bytes of a note that are read."""
NO_SETTING = "-"
"""The text in place of a value if a run lacks the key."""
_OWN = frozenset({"run.dir"})  # keys whose values always differ


def settings_that_differ(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return key -> its value in each configuration, for the keys whose values differ."""
    flat = [dict(_flat(config)) for config in configs]
    keys = sorted({key for settings in flat for key in settings} - _OWN)
    rows = {key: [_value_text(settings, key) for settings in flat] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def read_note(run_dir: Path) -> str:
    """Return a person's note on a run; empty if there is none. A link is not followed."""
    path = run_dir / NOTE
    if path.is_symlink() or not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_NOTE_BYTES + 1)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    note = text[:MAX_NOTE_BYTES].decode("utf-8", "replace").strip()
    return note + (" ..." if len(text) > MAX_NOTE_BYTES else "")


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key with its value. A list is one value."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _value_text(settings: Mapping[str, Any], key: str) -> str:
    """Return the value of a key as text; NO_SETTING if the run lacks the key."""
    if key not in settings:
        return NO_SETTING
    value = settings[key]
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
