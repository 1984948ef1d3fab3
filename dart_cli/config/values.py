"""Values as text: on the command line, in a TOML file, in a message.

read_value    reads a value of the command line as TOML
to_toml       writes a value as TOML
short_value   writes a value for an error message
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")  # a key that needs no quotes


def read_value(text: str) -> Any:
    """Return a value of the command line: what it means in TOML, or the text itself if it is no TOML."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text.strip()


def to_toml(value: Any) -> str | None:
    """Return a value as TOML writes it; None for an unset key. It must have a type that fields have."""
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        text = str(value)
        if "\n" in text and "'''" not in text and text.replace("\n", "").isprintable():
            return f"'''\n{text}'''"
        # TOML reads the escapes of JSON, which leaves DEL as it is.
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(to_toml(element) or '' for element in value)}]"
    pairs = [
        f"{key if _BARE.fullmatch(key) else json.dumps(key)} = {to_toml(element)}"
        for key, element in value.items()
        if element is not None
    ]
    return f"{{ {', '.join(pairs)} }}" if pairs else "{}"


def short_value(value: object, *, quote: bool = True) -> str:
    """Return a value for a message, in one line of at most 60 characters."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not quote:
        text = " ".join(value.split())
    else:
        text = repr(str(value) if isinstance(value, Path) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
